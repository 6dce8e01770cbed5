"""`python -m mtjax.evaluate`, also `mtjax evaluate`."""

import sys
from collections.abc import Sequence

from mtjax.cli import read, run_main
from mtjax.evaluate.options import DESCRIPTION, Options
from mtjax.waiting import IMPORTS, waiting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        options = read(Options, argv, "mtjax evaluate", DESCRIPTION)
        options.check()
        # These import jax, which takes seconds: only after the options are checked.
        with waiting(IMPORTS):
            if options.harness is not None:
                from mtjax.evaluate.harness import evaluate_harness as evaluate
            elif options.neighbours is not None:
                from mtjax.evaluate.neighbours import evaluate_neighbours as evaluate
            elif options.task == "continuations":
                from mtjax.evaluate.continuations import evaluate_continuations as evaluate
            else:
                from mtjax.evaluate.run import evaluate

        evaluate(options)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
