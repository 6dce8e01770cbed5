"""`python -m mtjax.finetune`: the same as `mtjax finetune`."""

import sys

from mtjax.commands.finetune import main

if __name__ == "__main__":
    sys.exit(main())
