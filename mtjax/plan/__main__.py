"""`python -m mtjax.plan`: the same as `mtjax plan`."""

import sys

from mtjax.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
