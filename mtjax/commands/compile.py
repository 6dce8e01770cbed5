"""`python -m mtjax.compile`, also `mtjax compile`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mtjax import cli

DESCRIPTION = """Compiles the programs of a run into the compile cache, so that the run starts without compiling.

It takes the options of `mtjax train`, and compiles all programs of a run: the initialization, the step, the validation,
the fingerprints of a checkpoint and the sample at the end. It needs the devices and processes of the run: programs
for GPUs can't be cached on a machine without them.

Examples:
  mtjax compile --config gpt2-small --mesh 4x2 --data corpus.txt --tokenizer gpt2:FOLDER
  srun mtjax compile --config gpt2-1.2b --data corpus/text_document
"""


@dataclass(frozen=True)
class Options:
    """Where to cache programs."""

    compile_cache: str | None = None
    """Folder of the compile cache, the same as the run's; when not given, $JAX_COMPILATION_CACHE_DIR, or else a folder
    in ~/.cache."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        command = cli.parse(argv, "mtjax compile", DESCRIPTION, Options)
        from mtjax.compile.programs import compile_run  # imports jax, which takes seconds: only for valid options

        compile_run(command.config, command.options.compile_cache)
        return 0

    return cli.run_main(body)


if __name__ == "__main__":
    sys.exit(main())
