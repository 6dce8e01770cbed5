"""`python -m mtjax.inspect`: compile a run's step for a target and check its collectives against the contract."""

import sys
from collections.abc import Sequence

from mtjax import cli
from mtjax.config import replace
from mtjax.inspect.compiler_log import hide_compiler_log
from mtjax.inspect.options import Options
from mtjax.waiting import IMPORTS, waiting

DESCRIPTION = """Compile the train step of a config, without the target's devices, and check its communication.

Every collective of the optimized program is listed with its mesh axis, number of executions in a step, shape and bytes,
and whether computation overlaps with it; then all are checked against the run's contract. Exit code 0: the contract
holds, also of a program that does not fit the memory, 1: it is violated, 2: wrong usage.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def body() -> int:
        command = cli.parse(argv, "mtjax inspect", DESCRIPTION, Options)
        command.options.check()
        hide_compiler_log()
        # These import jax, which takes seconds: only after the options are checked.
        if command.options.generate:
            from mtjax.generate.inspected import run as run_generating

            return run_generating(command.config, command.options)
        with waiting(IMPORTS):
            from mtjax.finetune.teacher import with_teacher
            from mtjax.inspect.command import run

        teacher = command.options.teacher
        config = replace(command.config, teacher=teacher) if teacher else command.config
        return run(config, command.options, command.source, with_teacher)

    return cli.run_main(body)


if __name__ == "__main__":
    sys.exit(main())
