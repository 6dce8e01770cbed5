"""`python -m mtjax.compile`: the same as `mtjax compile`."""

import sys

from mtjax.commands.compile import main

if __name__ == "__main__":
    sys.exit(main())
