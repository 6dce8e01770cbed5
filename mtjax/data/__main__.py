"""`python -m mtjax.data`: the same as `mtjax data`."""

import sys

from mtjax.commands.data import main

if __name__ == "__main__":
    sys.exit(main())
