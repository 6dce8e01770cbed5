"""The command line: `mtjax COMMAND`, the options that commands share, and how errors are reported."""

import contextlib
import dataclasses
import errno
import gc
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_origin

import tyro

from mtjax import __version__, config
from mtjax.config.checks import check_bounds
from mtjax.config.common import COMMON
from mtjax.config.families import FAMILIES
from mtjax.config.follow import with_min_learning_rate
from mtjax.config.place import in_own_folder
from mtjax.config.renamed import old_names_in, with_new_names, with_new_options
from mtjax.errors import UserError, first_line, nearest, shortened
from mtjax.help import HELP, HELP_ALL, dataclass_of, names_of, options_of, show_help
from mtjax.migrate.argument import option_of
from mtjax.migrate.suggest import advice

COMMANDS = {
    "train": ("mtjax.train", "train a model"),
    "launch": ("mtjax.launch", "train in several processes on this machine, and again after failures"),
    "compile": ("mtjax.compile", "compile a run's programs before it"),
    "finetune": ("mtjax.finetune", "train a head on pretrained weights for a task"),
    "predict": ("mtjax.finetune.predict", "label rows with a finetuned model"),
    "ensemble": ("mtjax.finetune.ensemble", "label rows with several finetuned models together"),
    "evaluate": ("mtjax.evaluate", "perplexity and cloze accuracy of a trained model"),
    "plan": ("mtjax.plan", "estimate what a model needs, and on which mesh, without compiling"),
    "inspect": ("mtjax.inspect", "compile a run's step and show what it sends"),
    "generate": ("mtjax.generate", "continue texts, and chat, with trained weights"),
    "serve": ("mtjax.serve", "answer clients of OpenAI and Megatron-LM over HTTP, with trained weights"),
    "data": ("mtjax.data", "make, merge, check, clean and show corpora"),
    "convert": ("mtjax.convert", "take weights to and from Hugging Face's and Megatron-LM's formats"),
    "from-megatron": ("mtjax.convert.from_megatron", "translate a launch script of Megatron-LM into a config"),
}

Options = TypeVar("Options")


def main(argv: Sequence[str] | None = None) -> int:
    """`mtjax COMMAND ...`: the same as `python -m` with the command's package, `mtjax.train ...`."""
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
        print(
            f"error: no command is called {argv[0]!r}{nearest(argv[0], [*COMMANDS, '--help', '--version'])}",
            file=sys.stderr,
        )
        return 2
    return import_module(COMMANDS[argv[0]][0] + ".__main__").main(argv[1:])


LONGEST_MESSAGE = 2000
"""Characters of an error: what was typed may be a book."""
GARBAGE = (100_000, 50, 1000)
"""Thresholds of Python's search for cycles: tracing makes millions of objects that stay, and to search them as often as
Python does by itself takes a tenth of a start."""


DEBUG = "MTJAX_DEBUG"
"""Environment variable: 1 shows the traceback of an error that would otherwise be one sentence."""
BUG = 1
"""Exit code of an error that is not the user's: as of any Python program that ends with an exception."""
_OF_A_PATH = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""Errors about a path that somebody named, which the user can put right."""


def run_main(body: Callable[[], int | None]) -> int:
    """Runs a command's body and reports how it ended, in one line on stderr where that was an error.

    Returns:
      The exit code: the body's; 2 for a `UserError`, for a path that can't be used and for too little memory; 1 for
      other errors of the operating system, such as a lost connection; 130 for Ctrl-C.
    """
    gc.set_threshold(*GARBAGE)
    try:
        return body() or 0
    except UserError as e:
        return _report(str(e), 2)
    except MemoryError as e:
        return _report(f"out of memory on this machine{f': {first_line(e)}' if str(e) else ''}", 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as e:
        if isinstance(e, BrokenPipeError) and _reader_has_left():  # `mtjax ... | head`: it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        # Schedulers don't restart after code 2, so it is for what only the user can put right: a bug, or a connection
        # that was lost inside a library, is not that.
        if e.errno in _OF_A_PATH and e.filename is not None:
            return _report(first_line(e), 2)
        what = type(e).__name__
        return _report(f"{what}: {first_line(e)} ({DEBUG}=1 shows the traceback)", BUG)


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads: a broken connection elsewhere is the same exception."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is no file, or is closed
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _report(message: str, code: int) -> int:
    """Prints the error that is being handled, with its traceback where `MTJAX_DEBUG` is 1; returns the exit code."""
    if os.environ.get(DEBUG) == "1":
        traceback.print_exc()
    print(f"error: {shortened(message, LONGEST_MESSAGE)}", file=sys.stderr)
    return code


class Command(NamedTuple, Generic[Options]):
    """What a command line asks for."""

    config: config.Config
    options: Options
    source: str
    """The config's name or path, as typed."""

    @property
    def name(self) -> str:
        """The config's file, without folder and `.toml`."""
        return Path(self.source).name.removesuffix(".toml")


PLAIN = frozenset({"finetuning"})
"""Sections of the config that have no options, but where a command says so."""


def parse(
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    options: type[Options],
    default: str = "default",
    *,
    base: Callable[[config.Config, Sequence[str]], config.Config] | None = None,
    hidden: Collection[str] = PLAIN,
    common: Mapping[str, Collection[str]] = COMMON,
) -> Command[Options]:
    """The run that a command line asks for: its options over `--config FILE` over the defaults.

    Args:
      argv: arguments; those of the process when None.
      prog: the command as the user types it.
      description: what `--help` says first.
      options: a dataclass of the command's own options, besides the config.
      default: the shipped config that is used when `--config` is not given.
      base: from that config, and the words of the command line, to the one whose settings are the options' defaults.
      hidden: sections that have no options here.
      common: headings of `--help`, and the settings below each; `--help-all` shows the others too.

    Raises:
      UserError: the config file or an option is wrong, or values don't fit each other.
      SystemExit: help was asked for (0).
    """
    argv, renamed = with_new_options(sys.argv[1:] if argv is None else argv)
    name = argument(argv, "--config") or default
    path = config.find(name)
    in_file = config.read_toml(path)
    tables = with_new_names(in_file)
    if renamed := [*renamed, *(f"{pair} (in {path})" for pair in old_names_in(in_file))]:
        print(f"note    {'; '.join(renamed)}: the old name works until mtjax 0.2", file=sys.stderr, flush=True)
    start = config.from_dict(tables, source=str(path))
    family = argument(argv, "--family")
    if family in FAMILIES:  # it sets the defaults of the other options
        start = config.replace(start, family=family)
    start = base(start, argv) if base else start
    groups = {f.name: getattr(start, f.name) for f in dataclasses.fields(start) if f.name not in hidden}
    fields: list[tuple[str, Any, Any]] = [("config", Annotated[Path, tyro.conf.arg(help=_CONFIG_HELP)], Path(name))]
    fields += [("command", options, options())]
    fields += [(group, type(value), value) for group, value in groups.items()]
    arguments = dataclasses.make_dataclass("Arguments", [(n, t, _default(d)) for n, t, d in fields], frozen=True)
    parsed: Any = read(tyro.conf.OmitArgPrefixes[arguments], list(_listed(argv)), prog, description, common)
    chosen = dataclasses.replace(start, **{group: getattr(parsed, group) for group in groups})
    check_bounds(parsed.command)
    typed = typed_options(argv)
    chosen = _with_what_was_not_typed(chosen, typed, path, tables)
    try:
        config.validate(chosen)
    except UserError as e:
        raise UserError(f"{e}{_origins(str(e), typed, path, tables)}") from e
    return Command(chosen, parsed.command, name)


def _with_what_was_not_typed(
    chosen: config.Config, typed: Collection[str], path: Path, tables: Mapping[str, Any]
) -> config.Config:
    """Returns the config, with settings that were not typed and must follow the file's place, or what was typed.

    Args:
      chosen: the config.
      typed: options of the command line.
      path: of the config file.
      tables: what is in it.

    Raises:
      UserError: the folder to resume is not certain, or two options set the end of the run.
    """
    if "--out" not in typed:
        chosen = in_own_folder(chosen, path, tables)
    if "--min-learning-rate" not in typed:
        chosen, note = with_min_learning_rate(chosen, tables, str(path), typed="--learning-rate" in typed)
        if note is not None:
            print(note, file=sys.stderr, flush=True)
    if "--steps" in typed and chosen.training.train_samples is not None:
        raise UserError(
            f"--steps {chosen.training.steps} and train_samples {chosen.training.train_samples} both set the end of "
            "the run: use --train-samples alone, or add --train-samples None"
        )
    return chosen


def _origins(message: str, typed: Collection[str], path: Path, tables: Mapping[str, Any]) -> str:
    """Returns which of the settings that a message names have their values from the config file."""
    in_file = [
        key
        for table in tables.values()
        for key in table
        if re.search(rf"\b{key}\b", message) and not {option_of(key), option_of(f"no_{key}")} & {*typed}
    ]
    return f" ({', '.join(in_file)} {'is' if len(in_file) == 1 else 'are'} from {path})" if in_file else ""


def read(
    options: Any,
    argv: Sequence[str] | None,
    prog: str,
    description: str = "",
    common: Mapping[str, Collection[str]] | None = None,
) -> Any:
    """The options of a command line, as the dataclass `options`.

    Args:
      options: the dataclass.
      argv: arguments; those of the process when None.
      prog: the command as the user types it.
      description: what `--help` says first.
      common: headings of `--help`, and the options below each; None shows all.

    Raises:
      UserError: one is wrong or missing.
      SystemExit: help was asked for (0).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    listed = list(options_of(dataclass_of(options)))
    if {*HELP, HELP_ALL} & set(words):
        print(show_help(prog, description, listed, None if HELP_ALL in words else common), end="")
        raise SystemExit(0)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(options, prog=prog, description=description, args=words, add_help=False)
    except SystemExit as e:
        if not e.code:
            raise
    else:
        check_bounds(parsed)
        return parsed
    raise UserError(f"{_one_sentence(said.getvalue(), words, names_of(listed))} ({prog} --help lists the options)")


_VALUES = {"int()": "a whole number", "INT": "a whole number", "to float": "a number", "FLOAT": "a number"}
_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\) ?\.")
_NUMBER = re.compile(
    r"Error parsing (\S+): (?:invalid literal for|could not convert string) (int\(\)|to float).*?'(.*)'"
)
_SEVERAL = re.compile(r"Error parsing (\S+): no type matching (.*) could be instantiated from \[(.*?)\]")


def _one_sentence(box: str, argv: Sequence[str] = (), known: Collection[str] = ()) -> str:
    """The message that tyro prints as a box, as one sentence: what was wrong, the value, and what would be right.

    Messages of a kind not handled here are only joined to one line.
    """
    rows = re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()  # colours, on a terminal
    rows = rows[2:] if box.isascii() else rows[1:-1]  # without title and frame, which in ASCII is a rule
    lines = [row.strip(" │") for row in rows]
    rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"[─-]+", line)), len(lines))
    said = " ".join(" ".join(lines[:rule]).split())
    if match := _CHOICE.fullmatch(said):
        choices = [choice for choice in re.findall(r"'([^']*)'", match[3]) if choice != "None"]
        return f"{match[2]} {match[1]} is not one of {', '.join(choices)}{nearest(match[1], choices)}"
    if said.startswith("Unrecognized options: "):
        words = said.partition(": ")[2].split(", ")
        unknown = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
        if unknown is None:
            return f"{words[0]!r} belongs to no option{_as_option(words[0], known)}"
        return f"no option is called {unknown}{advice(unknown, _value_of(unknown, argv), known)}"
    if match := _NUMBER.match(said):
        return f"{match[1]} is {shortened(match[3])!r}, and must be {_VALUES[match[2]]}"
    if match := _SEVERAL.match(said):
        kinds = [kind.strip("{}") for kind in match[2].split("|") if kind != "{None}"]
        return (
            f"{match[1]} is {shortened(match[3])}, and must be {' or '.join(_VALUES.get(kind, kind) for kind in kinds)}"
        )
    if match := re.match(r"Missing value for argument '(.*?)'", said):
        return f"{match[1]} needs a value"
    if said.startswith("Missing from"):
        names = [line.split()[0] for line in lines[1:rule] if re.match(r"--\w|[A-Z]+$", line)]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    return shortened(said.rstrip(". "), 400)


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    """What was typed behind an option that does not exist."""
    value = argument(argv, option)
    return None if value is None or value.startswith("--") else value


def _as_option(word: str, known: Collection[str]) -> str:
    """How `steps=10`, as MaxText reads it, is typed here."""
    name, equals, value = word.partition("=")
    option = option_of(name)
    if not equals or not name.isidentifier():
        return ""
    return f": write {option} {value}" if option in known else advice(option, value, known)


def _listed(argv: Sequence[str]) -> Iterator[str]:
    """`argv`, in which a list may be one word: "--layers-per-stage 5,6,6,5"."""
    for before, word in zip(["", *argv], argv, strict=False):
        option, equals, value = word.partition("=")
        is_list = (option if equals else before).replace("_", "-") in _lists()
        yield from [option, *value.split(",")] if is_list and equals else word.split(",") if is_list else [word]


@cache
def _lists() -> frozenset[str]:
    """Options that take several numbers."""
    return frozenset(option.name for option in options_of(config.Config) if get_origin(option.type) is tuple)


_CONFIG_HELP = "A TOML file, or the name of a config that ships with mtjax (see configs/)."


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def argument(argv: Sequence[str], option: str) -> str | None:
    """The value of the last `option`, which must be read before the other options, whose defaults it sets."""
    value = None
    wanted = option.replace("_", "-")
    for i, word in enumerate(argv):
        name, equals, behind = word.partition("=")
        if name.replace("_", "-") != wanted:
            continue
        if equals:
            value = behind
        elif i + 1 < len(argv):
            value = argv[i + 1]
    return value


def typed_options(argv: Sequence[str]) -> set[str]:
    """Returns the options that were typed, as `--help` names them: tyro also reads `--learning_rate=1`."""
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
