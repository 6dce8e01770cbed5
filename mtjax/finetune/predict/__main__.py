"""`python -m mtjax.finetune.predict`: the same as `mtjax predict`."""

import sys

from mtjax.commands.predict import main

if __name__ == "__main__":
    sys.exit(main())
