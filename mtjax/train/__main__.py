"""`python -m mtjax.train`, also `mtjax train`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mtjax.cli import parse, run_main

DESCRIPTION = """Trains a GPT, Llama, BERT or T5.

Without options: a small GPT, on the documentation that comes with Python, over 8 virtual CPU devices.

Examples:
  mtjax train --data book.txt --steps 500
  mtjax train --config gpt2-small --mesh 4x2 --out runs/small
  mtjax train --config runs/small/config.toml --resume
"""


@dataclass(frozen=True)
class Options:
    """For this start of the run only."""

    inspect: bool = False
    """Show what a step sends, as `mtjax inspect` does, before the first step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        command = parse(argv, "mtjax train", DESCRIPTION, Options)
        from mtjax.train.local import processes_needed, run_processes

        count = processes_needed(command.config, os.environ)
        if count > 1:
            print(
                f"{command.config.parallel.mesh} virtual CPU devices need {count} processes: starting them", flush=True
            )
            return run_processes(list(sys.argv[1:] if argv is None else argv), count)
        from mtjax.train.loop import train  # seconds to import: not before the options are right

        show = None
        if command.options.inspect:
            from mtjax.inspect.hook import show_program as show
        train(command.config, command.name, show=show)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
