"""`python -m mtjax.serve`, also `mtjax serve`."""

import sys
from collections.abc import Sequence

from mtjax.cli import read, run_main
from mtjax.errors import require
from mtjax.interrupt import CtrlC
from mtjax.serve.options import DESCRIPTION, Options
from mtjax.waiting import IMPORTS, waiting

LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
"""Libraries of the extra serve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mtjax serve` with command-line arguments; returns the exit code."""

    def body() -> None:
        options: Options = read(Options, argv, "mtjax serve", DESCRIPTION)
        # Before weights are loaded, and before the import that would fail.
        for library in LIBRARIES:
            require(library, "serve")
        with CtrlC():
            with waiting(IMPORTS):  # takes seconds: not before the options are checked
                from mtjax.serve.command import run

            run(options)

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
