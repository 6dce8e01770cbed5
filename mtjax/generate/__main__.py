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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> None:
        options: Options = read(Options, argv, "mtjax generate", DESCRIPTION)
        check_bounds(options.sampling)
        check_options(options)
        with CtrlC():
            from mtjax.generate.command import run  # seconds to import: not before the options are right

            run(options)

    return run_main(body)


def check_options(options: Options) -> None:
    """Checks that every given option has an effect with the others.

    Raises:
      UserError: names one that has none, or one that is missing.
    """
    modes = {"--interactive": options.interactive, "--input": options.input, "prompts as arguments": options.prompts}
    given = [name for name, value in modes.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other: leave out all but one")
    if (options.input is None) != (options.output is None):
        raise UserError("--input and --output go together: one names the prompts, the other where the texts go")
    if options.system is not None and not options.interactive:
        raise UserError("--system has an effect with --interactive only: leave it out")
    if options.logprobs and options.output is None:
        raise UserError("--logprobs has an effect with --output only: --show-logprobs shows them here")
    if options.overwrite and options.output is None:
        raise UserError("--overwrite has an effect with --output only: leave it out")
    check_beams(options)
    idle = {"--samples": options.samples > 1, "--echo": options.echo} if options.interactive else {}
    idle |= {"--show-logprobs": options.show_logprobs} if options.output else {}
    if useless := next((name for name, value in idle.items() if value), None):
        raise UserError(f"{useless} has no effect with {given[0]}: leave it out")


def check_beams(options: Options) -> None:
    """Checks that the options fit a search by beams, or that none of it is given without one.

    Raises:
      UserError: names the one that does not.
    """
    if options.beams is None:
        if options.length_penalty != Options("").length_penalty:
            raise UserError("--length-penalty has an effect with --beams only: leave it out")
        return
    given = {
        "--interactive": options.interactive,
        "--stop": options.stop,
        "--echo": options.echo,
        "--show-logprobs": options.show_logprobs,
        "--logprobs": options.logprobs,
        "--temperature and the like": replace(options.sampling, max_tokens=Sampling().max_tokens) != Sampling(),
    }
    if useless := next((name for name, value in given.items() if value), None):
        raise UserError(f"--beams searches the most probable texts, without any use for {useless}: leave it out")
    if options.samples > options.beams:
        raise UserError(f"--samples is {options.samples}, and --beams {options.beams}: give at least as many beams")


if __name__ == "__main__":
    sys.exit(main())
