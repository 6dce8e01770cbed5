"""`python -m mtjax.plan`: memory, time and cost of a model on a mesh, by formula."""

import sys
from collections.abc import Sequence

from rich.console import Console

from mtjax import cli
from mtjax.config import Config, Model, replace
from mtjax.plan.options import Options

DEFAULT = "gpt2-8.3b"

DESCRIPTION = """Estimate parameters, FLOPs, memory, traffic, step time, days and cost of a model on a mesh, by formula.

With --mesh it reports on one plan; with --gpus it searches for the fastest plan that fits, with --days for the fewest
GPUs. --verify compiles the program and prints the error of each formula; --published compares with published runs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def body() -> None:
        command = cli.parse(argv, "mtjax plan", DESCRIPTION, Options, default=DEFAULT)
        command.options.check(cli.typed_options(sys.argv[1:] if argv is None else argv))
        from mtjax.plan.command import run  # slow to import: only after the options are checked

        teacher = command.options.teacher
        config = replace(command.config, teacher=teacher) if teacher else command.config
        run(config, command.options, command.source, _verify, _with_teacher)

    return cli.run_main(body)


def _verify(console: Console, config: Config, target: str) -> None:
    from mtjax.inspect.compiler_log import hide_compiler_log

    hide_compiler_log()
    from mtjax.inspect.verify import print_verification  # imports jax, which nothing else here needs

    print_verification(console, config, target)


def _with_teacher(config: Config) -> tuple[Config, Model | None]:
    """Returns the config with the teacher's width, and the teacher's model; None without a teacher."""
    if config.finetuning.teacher is None:
        return config, None
    from mtjax.finetune.teacher import with_teacher  # reads the metadata of the teacher's weights: imports jax

    return with_teacher(config)


if __name__ == "__main__":
    sys.exit(main())
