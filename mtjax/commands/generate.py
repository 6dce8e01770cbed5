"""`python -m mtjax.generate`, also `mtjax generate`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from mtjax.cli import read, run_main
from mtjax.config.checks import check_bounds
from mtjax.errors import UserError
from mtjax.generate.options import DESCRIPTION, Options
from mtjax.generate.request import Sampling
from mtjax.interrupt import CtrlC
from mtjax.waiting import IMPORTS, waiting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mtjax generate` with command-line arguments; returns the exit code."""

    def body() -> None:
        options: Options = read(Options, argv, "mtjax generate", DESCRIPTION)
        check_bounds(options.sampling)
        check_options(options)
        options.storage.check()
        with CtrlC():
            with waiting(IMPORTS):  # takes seconds: not before the options are checked
                from mtjax.generate.command import run

            run(options)

    return run_main(body)


def check_options(options: Options) -> None:
    """Checks that every given option has an effect in combination with the others.

    Raises:
      UserError: an option has no effect, or needs another one that is missing.
    """
    modes = {
        "--interactive": options.interactive,
        "--input": options.input,
        "--documents": options.documents,
        "prompts as arguments": options.prompts,
    }
    given = [name for name, value in modes.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are mutually exclusive: remove all but one")
    if (options.input is None and options.documents is None) != (options.output is None):
        raise UserError(
            "--input (or --documents) and --output require each other: the file of prompts, and the file for the texts"
        )
    if options.system is not None and not options.interactive:
        raise UserError("--system requires --interactive: add that, or remove --system")
    if options.logprobs and options.output is None:
        raise UserError("--logprobs requires --output: use --show-logprobs to print log-probabilities")
    if options.overwrite and options.output is None:
        raise UserError("--overwrite requires --output: remove it")
    for name in ("embedder", "without_document", "sources"):
        if getattr(options, name) and not options.retrieve:
            raise UserError(f"--{name.replace('_', '-')} requires --retrieve: add that, or remove it")
    check_beams(options)
    ignored = {"--samples": options.samples > 1, "--echo": options.echo} if options.interactive else {}
    ignored |= {"--show-logprobs": options.show_logprobs} if options.output else {}
    if name := next((name for name, value in ignored.items() if value), None):
        raise UserError(f"{name} has no effect with {given[0]}: remove it")


def check_beams(options: Options) -> None:
    """Checks that the options are compatible with --beams, and that --length-penalty is not given without it.

    Raises:
      UserError: an option is not compatible.
    """
    if options.beams is None:
        if options.length_penalty != Options("").length_penalty:
            raise UserError("--length-penalty requires --beams: add that, or remove --length-penalty")
        return
    given = {
        "--documents": options.documents is not None,
        "--interactive": options.interactive,
        "--stop": options.stop,
        "--echo": options.echo,
        "--state-snapshots": options.state_snapshots is not None,
        "--show-logprobs": options.show_logprobs,
        "--logprobs": options.logprobs,
        # All sampling parameters but the length, which beams have too.
        "sampling parameters such as --temperature": replace(options.sampling, max_tokens=Sampling().max_tokens)
        != Sampling(),
    }
    if name := next((name for name, value in given.items() if value), None):
        raise UserError(f"--beams (beam search) does not support {name}: remove one of them")
    if options.samples > options.beams:
        raise UserError(
            f"--samples is {options.samples} and --beams is {options.beams}: use at least as many beams as samples"
        )


if __name__ == "__main__":
    sys.exit(main())
