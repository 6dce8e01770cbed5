"""`python -m mtjax.evaluate`: the same as `mtjax evaluate`."""

import sys

from mtjax.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
