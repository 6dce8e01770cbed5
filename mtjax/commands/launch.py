"""`python -m mtjax.launch`, also `mtjax launch`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mtjax import cli
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.errors import UserError
from mtjax.train import options as train_options

DESCRIPTION = """Trains in several processes on this machine, and restarts from the last checkpoint after a failure.

The options of `mtjax train` follow after `--`. Each line of output begins with the number of its process.

Examples:
  mtjax launch --restarts 10 -- --config gpt2-small --mesh 8x1 --data a.txt --tokenizer gpt2:FOLDER --out runs/small
  mtjax launch --processes 2 -- --mesh 2x4
"""


@dataclass(frozen=True)
class Options:
    """How the processes are started and restarted."""

    processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; when not given, one per GPU, or without GPUs as many as the virtual CPU devices need."""
    restarts: int = at_least(0, 0)
    """Maximum number of restarts from the last checkpoint after a failure; on fewer devices if some have failed and the
    mesh still divides the batch. Invalid input and a requested stop are not failures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        arguments = list(sys.argv[1:] if argv is None else argv)
        at = arguments.index("--") if "--" in arguments else len(arguments)
        options: Options = cli.read(Options, arguments[:at], "mtjax launch", DESCRIPTION)
        if at == len(arguments):
            raise UserError("the options of mtjax train go after `--`: mtjax launch --restarts 3 -- --config NAME")
        train = arguments[at + 1 :]
        # Here, so that a wrong option is one error, and not one of each process.
        command = cli.parse(train, "mtjax train", train_options.DESCRIPTION, train_options.Options)
        from mtjax.launch.run import launch  # takes a second to import: only for valid options

        return launch(train, command.config, command.name, options.processes, options.restarts, os.environ)

    return cli.run_main(body)


if __name__ == "__main__":
    sys.exit(main())
