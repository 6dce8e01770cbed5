"""`python -m mtjax.serve`: the same as `mtjax serve`."""

import sys

from mtjax.commands.serve import main

if __name__ == "__main__":
    sys.exit(main())
