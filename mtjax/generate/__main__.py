"""`python -m mtjax.generate`: the same as `mtjax generate`."""

import sys

from mtjax.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
