"""`python -m mtjax.plan`: what a model needs, on which mesh, for how long - without compiling."""

import sys
from collections.abc import Sequence

from rich.console import Console

from mtjax import cli
from mtjax.config import Config, Model, replace
from mtjax.plan.options import Options

DEFAULT = "gpt2-8.3b"

DESCRIPTION = """Say what a model needs and on which mesh, by formula: parameters, FLOPs, memory, traffic, days, cost.

With --mesh it reports on one plan; with --gpus it searches for the fastest plan that fits, with --days for the fewest
GPUs. --verify compiles the program and prints the error of each formula; --published compares with published runs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def body() -> None:
        command = cli.parse(argv, "mtjax plan", DESCRIPTION, Options, default=DEFAULT)
        command.options.check()
        from mtjax.plan.command import run  # not before the options are right: tables and formulas take time to import

        named = command.options.teacher
        config = replace(command.config, teacher=named) if named else command.config
        run(config, command.options, command.source, _verify, _taught)

    return cli.run_main(body)


def _verify(console: Console, config: Config, target: str) -> None:
    from mtjax.inspect.verify import print_verification  # compiles: all else here needs no jax

    print_verification(console, config, target)


def _taught(config: Config) -> tuple[Config, Model | None]:
    if config.finetuning.teacher is None:
        return config, None
    from mtjax.finetune.teacher import with_teacher  # reads what a teacher's weights say of themselves: needs jax

    return with_teacher(config)


if __name__ == "__main__":
    sys.exit(main())
