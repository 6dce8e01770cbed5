"""`python -m mtjax.serve`, also `mtjax serve`."""

import sys
from collections.abc import Sequence

from mtjax.cli import read, run_main
from mtjax.errors import require
from mtjax.interrupt import CtrlC
from mtjax.serve.options import DESCRIPTION, Options

LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
"""Of the extra serve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> None:
        options: Options = read(Options, argv, "mtjax serve", DESCRIPTION)
        for library in LIBRARIES:
            require(library, "serve")
        with CtrlC():
            from mtjax.serve.command import run  # seconds to import: not before the options are right

            run(options)

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
