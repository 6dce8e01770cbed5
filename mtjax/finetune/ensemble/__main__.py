"""`python -m mtjax.finetune.ensemble`: the same as `mtjax ensemble`."""

import sys

from mtjax.commands.ensemble import main

if __name__ == "__main__":
    sys.exit(main())
