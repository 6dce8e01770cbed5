"""`python -m mtjax.convert.from_megatron`, also `mtjax from-megatron`."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import at_least
from mtjax.convert.from_megatron.given import GivenArguments, from_file, from_words
from mtjax.convert.from_megatron.output import note_kernel
from mtjax.convert.from_megatron.report import config_of, report, toml_of
from mtjax.convert.from_megatron.translate import translate
from mtjax.errors import UserError, nearest
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import MOST_DEVICES
from mtjax.migrate.megatron import by_name

DESCRIPTION = """Translates a launch script or arguments of Megatron-LM into a config of mtjax.

Prints the TOML, and on stderr the arguments that mtjax does not support, that it does not need, and that could not be
read. Unknown arguments end it, unless --ignore-unknown is given. The script is parsed, not run: variables, arrays,
conditions, functions and the scheduler's directives are evaluated. Values from outside the script are given as its
arguments, or with --set. A YAML file of arguments, or a file that contains only arguments, can be given instead of a
script, and so can the folder of a checkpoint of Megatron-LM, which has all arguments of its run.

Examples:
  mtjax from-megatron train_gpt3_175b_distributed.sh CKPT LOGS vocab.json merges.txt corpus_text_document --gpus 1024
  mtjax from-megatron train.sh --set DATA_DIR=/data --output run.toml
  mtjax from-megatron --gpus 64 -- --num-layers 32 --hidden-size 4096 --tensor-model-parallel-size 8 ...
  mtjax from-megatron CHECKPOINT --output run.toml
  mtjax train --config run.toml
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax from-megatron`."""

    script: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENT ...]")] = ()
    """The script, and its arguments ($1, $2, ...); or a checkpoint's folder."""
    variables: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE")]
    ] = ()
    """A variable of the script, which overrides the value that the script assigns. May be given several times."""
    gpus: int | None = at_least(1, None, most=MOST_DEVICES)
    """Number of GPUs. Default: the number of processes that the script starts."""
    ignore_unknown: bool = False
    """Translate the run without the arguments that are not known; they are listed."""
    output: Path | None = None
    """File for the TOML, instead of standard output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # What follows are Megatron's options, some of which have names of ours.
    at = words.index("--") if "--" in words else len(words)
    return run_main(lambda: run(read(Options, words[:at], "mtjax from-megatron", DESCRIPTION), words[at + 1 :]))


def run(options: Options, words: Sequence[str]) -> None:
    """Translates a script or arguments.

    Raises:
      UserError: neither is given, it can't be read, or the run can't be translated.
    """
    given = _given(options, words)
    _check_unknown(given, options)
    given.gpus = options.gpus or given.gpus
    to, mesh = translate(given)
    config = config_of(to)
    note_kernel(to, config, mesh)
    config_error = None
    # What mtjax refuses is printed nevertheless, with the reason: it can be mended there.
    try:
        check_config(config, mesh)
    except UserError as e:
        config_error = str(e)
    text, following = toml_of(to, mesh), None
    if options.output is None:
        print(text, end="")
    else:
        if options.output.exists():
            raise UserError(f"--output {options.output} exists already: name another file")
        options.output.write_text(text, encoding="utf-8")
        first = to.run_first[0] if to.run_first and not to.run_first[0].startswith("if ") else None
        following = f"next    {first or to.command(str(options.output)) + _launched(mesh.size)}"
    if summary := report(to, config_error):
        print(summary, file=sys.stderr, flush=True)
    # The last line: the report has what to look at before.
    if following is not None:
        print(following)


def _check_unknown(given: GivenArguments, options: Options) -> None:
    """Checks that all arguments are known, or may be ignored.

    Raises:
      UserError: one is unknown and --ignore-unknown is not given.
    """
    if not given.unlisted or options.ignore_unknown:
        return
    names = [typed + nearest(re.split(r"[ =:]", typed)[0], by_name(), 0.8) for typed in given.unlisted]
    raise UserError(
        f"{given.source}: unknown arguments: {'; '.join(names)}; correct them, or add --ignore-unknown to translate the"
        " run without them"
    )


def _launched(gpus: int) -> str:
    """Returns how to start a run of several servers, for the end of a line."""
    return "" if gpus <= 8 else f"  (with srun or mpirun, on all {gpus:,} GPUs: docs/clusters.md)"


def _given(options: Options, words: Sequence[str]) -> GivenArguments:
    """Reads the arguments from the script, if any, and from the command line after `--`.

    Raises:
      UserError: there are none, or they can't be read.
    """
    if not options.script and not words:
        raise UserError("nothing to translate: give a launch script, or arguments of Megatron-LM after --")
    variables = {}
    for item in options.variables:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--set {item} is not NAME=VALUE")
        variables[name] = value
    given = GivenArguments("the arguments")
    script = list(options.script)
    if script and Path(script[0]).is_dir():
        if len(script) > 1 or options.variables:
            raise UserError(f"{script[0]} is a checkpoint's folder: it takes no arguments and no --set")
        from mtjax.convert.from_megatron.checkpoint import from_checkpoint  # imports jax, for a second

        given = from_checkpoint(Path(script[0]))
    elif script:
        given = from_file(Path(script[0]), script[1:], variables)
    from_words(words, given)
    return given


if __name__ == "__main__":
    sys.exit(main())
