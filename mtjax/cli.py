"""The command line: `mtjax COMMAND`, the options that every command shares, and how errors end."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import tyro

from mtjax import __version__, config
from mtjax.errors import UserError, nearest

COMMANDS = {
    "train": ("mtjax.train", "train a model"),
    "plan": ("mtjax.plan", "say what a model needs, on which mesh, without compiling"),
    "inspect": ("mtjax.inspect", "compile a run's step and show what it sends"),
    "data": ("mtjax.data", "make, merge, check, clean and show corpora"),
    "convert": ("mtjax.convert", "take weights to and from Hugging Face's and Megatron-LM's formats"),
}

Options = TypeVar("Options")


def main(argv: Sequence[str] | None = None) -> int:
    """`mtjax COMMAND ...`: the same as `python -m mtjax.COMMAND ...`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
        print(f"usage: mtjax COMMAND [OPTIONS]\n\n{rows}\n\n`mtjax COMMAND --help` explains the options of each.")
        return 0
    if argv[0] == "--version":
        print(f"mtjax {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: no command is called {argv[0]!r}{nearest(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[argv[0]][0] + ".__main__").main(argv[1:])


def run_main(body: Callable[[], int | None]) -> int:
    """Runs a command's body: a `UserError` becomes one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        return body() or 0
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `mtjax ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class Command(NamedTuple, Generic[Options]):
    """What a command line asks for."""

    config: config.Config
    options: Options
    name: str
    """Of the config: its file without folder and `.toml`."""


def parse(
    argv: Sequence[str] | None, prog: str, description: str, options: type[Options], default: str = "default"
) -> Command[Options]:
    """The run that a command line asks for: its options over `--config FILE` over the defaults.

    Args:
      argv: arguments; those of the process when None.
      prog: the command as the user types it.
      description: what `--help` says first.
      options: a dataclass of what the command asks beside the config.
      default: the shipped config that stands when `--config` is not given.

    Raises:
      UserError: the config file is wrong, or values don't fit each other.
      SystemExit: an option is wrong (2), or help was asked for (0); said by tyro.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = _argument(argv, "--config") or default
    base = config.load(name)
    family = _argument(argv, "--family")
    if family in config.FAMILIES:  # what it brings are the defaults of the other options
        base = config.replace(base, family=family)
    groups = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    fields: list[tuple[str, Any, Any]] = [("config", Annotated[Path, tyro.conf.arg(help=_CONFIG_HELP)], Path(name))]
    fields += [("command", options, options())]
    fields += [(group, type(value), value) for group, value in groups.items()]
    arguments = dataclasses.make_dataclass("Arguments", [(n, t, _default(d)) for n, t, d in fields], frozen=True)
    parsed: Any = tyro.cli(tyro.conf.OmitArgPrefixes[arguments], prog=prog, description=description, args=argv)
    chosen = config.Config(**{group: getattr(parsed, group) for group in groups})
    config.validate(chosen)
    return Command(chosen, parsed.command, Path(name).name.removesuffix(".toml"))


_CONFIG_HELP = "A TOML file, or the name of a config that ships with mtjax (see configs/)."


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def _argument(argv: Sequence[str], option: str) -> str | None:
    """What follows the last `option`: it must be read before the other options, whose defaults it sets."""
    found = None
    for i, word in enumerate(argv):
        if word == option and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found
