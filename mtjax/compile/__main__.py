"""`python -m mtjax.compile`, also `mtjax compile`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mtjax import cli

DESCRIPTION = """Compiles the programs of a run and keeps them, so that the run begins with its first step.

It takes the options of `mtjax train`, and does all but train: devices, tokenizer, then the initial state, the step,
the validation, the fingerprints of a checkpoint and the sample at the end. It needs devices of the kind that the run
has, as many, in as many processes: programs for a GPU can't be kept from a machine without it.

Examples:
  mtjax compile --config gpt2-small --mesh 4x2 --data corpus.txt
  srun mtjax compile --config gpt2-1.2b
"""


@dataclass(frozen=True)
class Options:
    """Where to keep them."""

    compile_cache: str | None = None
    """Folder of compiled programs, the same as the run's; $JAX_COMPILATION_CACHE_DIR when not given, else a folder in
    ~/.cache."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        command = cli.parse(argv, "mtjax compile", DESCRIPTION, Options)
        from mtjax.compile.programs import compile_run  # imports jax, for seconds: not before the options are right

        compile_run(command.config, command.options.compile_cache)
        return 0

    return cli.run_main(body)


if __name__ == "__main__":
    sys.exit(main())
