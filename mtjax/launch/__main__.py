"""`python -m mtjax.launch`: the same as `mtjax launch`."""

import sys

from mtjax.commands.launch import main

if __name__ == "__main__":
    sys.exit(main())
