"""`python -m mtjax.convert`: the same as `mtjax convert`."""

import sys

from mtjax.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
