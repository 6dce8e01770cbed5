"""`python -m mtjax.inspect`: the same as `mtjax inspect`."""

import sys

from mtjax.commands.inspect import main

if __name__ == "__main__":
    sys.exit(main())
