"""`python -m mtjax.convert.from_megatron`: the same as `mtjax from-megatron`."""

import sys

from mtjax.commands.from_megatron import main

if __name__ == "__main__":
    sys.exit(main())
