"""`python -m mtjax.train`: the same as `mtjax train`."""

import sys

from mtjax.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
