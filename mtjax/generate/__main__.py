"""`python -m mtjax.generate`, also `mtjax generate`."""

import sys
from collections.abc import Sequence

from mtjax.cli import read, run_main
from mtjax.config.checks import check_bounds
from mtjax.errors import UserError
from mtjax.generate.options import DESCRIPTION, Options
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
    idle = {"--samples": options.samples > 1, "--echo": options.echo} if options.interactive else {}
    idle |= {"--show-logprobs": options.show_logprobs} if options.output else {}
    if useless := next((name for name, value in idle.items() if value), None):
        raise UserError(f"{useless} has no effect with {given[0]}: leave it out")


if __name__ == "__main__":
    sys.exit(main())
