"""The command line: `mtjax COMMAND`, options that commands share, and error reporting."""

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
from mtjax.config.follow import with_min_learning_rate
from mtjax.config.place import with_run_folder
from mtjax.config.renamed import old_names_in, with_new_names, with_new_options
from mtjax.config.repeated import with_joined_data
from mtjax.errors import UserError, first_line, nearest, shortened
from mtjax.families.registry import FAMILIES
from mtjax.help import HELP, HELP_ALL, ConfigDefaults, help_for, names_of, options_of, show_help, with_values
from mtjax.migrate.argument import option_of
from mtjax.migrate.suggest import advice, refusal

COMMANDS = {
    "train": "train a model",
    "launch": "train in several processes on this machine, with restarts after failures",
    "compile": "compile a run's programs ahead of time",
    "finetune": "finetune pretrained weights on a task",
    "predict": "label rows with a finetuned model",
    "ensemble": "label rows with several finetuned models together",
    "evaluate": "perplexity and cloze accuracy of a trained model",
    "plan": "estimate a model's memory and step time on meshes, without compiling",
    "inspect": "compile a training step and show its communication",
    "generate": "generate text, and chat, with trained weights",
    "serve": "serve trained weights over HTTP, with the APIs of OpenAI and Megatron-LM",
    "data": "build, merge, verify, clean and show corpora",
    "convert": "convert weights to and from Hugging Face's and Megatron-LM's formats",
    "from-megatron": "translate a launch script of Megatron-LM into a config",
}

Options = TypeVar("Options")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mtjax COMMAND ...`: the same as `python -m` with the command's package, such as `mtjax.train`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
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
    # Only the command that is asked for: importing all of them would take seconds.
    return import_module(f"mtjax.commands.{argv[0].replace('-', '_')}").main(argv[1:])


LONGEST_MESSAGE = 2000
"""Maximum length of an error message: it may quote long input."""
GARBAGE = (100_000, 50, 1000)
"""Thresholds of Python's garbage collector: tracing creates millions of objects that stay, and with the default
thresholds collection takes a tenth of the start-up time."""


DEBUG = "MTJAX_DEBUG"
"""Environment variable: 1 prints the traceback of an error that would otherwise be one sentence."""
BUG = 1
"""Exit code of an error that is not the user's, as of any Python program that ends with an exception."""
_OF_A_PATH = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""Errors about a path, which the user can fix."""


def run_main(body: Callable[[], int | None]) -> int:
    """Runs a command's body and reports errors in one line on stderr.

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
        if isinstance(e, BrokenPipeError) and _reader_has_left():  # `mtjax ... | head`: the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        # Schedulers don't restart after code 2, so it is only for errors that the user must fix, not for bugs or lost
        # connections inside a library.
        if e.errno in _OF_A_PATH and e.filename is not None:
            return _report(first_line(e), 2)
        what = type(e).__name__
        return _report(f"{what}: {first_line(e)} ({DEBUG}=1 shows the traceback)", BUG)


def _reader_has_left() -> bool:
    """Returns whether standard output is a pipe without a reader: other broken connections raise the same exception."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is not a file, or is closed
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _report(message: str, code: int) -> int:
    """Prints the error that is being handled, with its traceback if `MTJAX_DEBUG` is 1; returns the exit code."""
    if os.environ.get(DEBUG) == "1":
        traceback.print_exc()
    print(f"error: {shortened(message, LONGEST_MESSAGE)}", file=sys.stderr)
    return code


class Command(NamedTuple, Generic[Options]):
    """A parsed command line."""

    config: config.Config
    options: Options
    source: str
    """The config's name or path, as typed."""

    @property
    def name(self) -> str:
        """The config's file name, without folder and `.toml`."""
        return Path(self.source).name.removesuffix(".toml")


PLAIN = frozenset({"finetuning"})
"""Sections of the config that are not options, except in commands that request them."""


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
    """Parses a command line: options override `--config FILE`, which overrides the defaults.

    Args:
      argv: arguments; those of the process when None.
      prog: the command as the user types it.
      description: first paragraph of `--help`.
      options: a dataclass of the command's options in addition to the config.
      default: the shipped config that is used when `--config` is not given.
      base: maps that config and the command line to the config whose settings are the options' defaults.
      hidden: sections that are not options of this command.
      common: headings of `--help`, and the settings below each; `--help-all` shows the others too.

    Raises:
      UserError: the config file or an option is invalid, or settings are inconsistent.
      SystemExit: help was requested (0).
    """
    argv, renamed = with_new_options(config.options_in_order(sys.argv[1:] if argv is None else argv))
    argv, several = with_joined_data(argv)
    name = argument(argv, "--config") or default
    path = config.find(name)
    in_file = config.read_toml(path)
    tables = with_new_names(in_file)
    if renamed := [*renamed, *(f"{pair} (in {path})" for pair in old_names_in(in_file))]:
        print(f"note    {'; '.join(renamed)}: old names work until mtjax 0.2", file=sys.stderr, flush=True)
    start = config.from_dict(tables, source=str(path))
    family = argument(argv, "--family")
    if family in FAMILIES:  # it sets the defaults of the other options
        start = config.replace(start, family=family)
    if pattern := argument(argv, "--layer-pattern"):  # and this sets their number
        start = config.replace(start, layer_pattern=pattern)
    start = base(start, argv) if base else start
    groups = {f.name: getattr(start, f.name) for f in dataclasses.fields(start) if f.name not in hidden}
    fields: list[tuple[str, Any, Any]] = [("config", Annotated[Path, tyro.conf.arg(help=_CONFIG_HELP)], Path(name))]
    fields += [("command", options, options()), *((group, type(value), value) for group, value in groups.items())]
    shown = ConfigDefaults(path.name, dataclasses.asdict(config.replace(config.Config(), family=start.model.family)))
    # One dataclass, so that tyro knows every option of the command, with the file's values as defaults.
    arguments = dataclasses.make_dataclass("Arguments", [(n, t, _default(d)) for n, t, d in fields], frozen=True)
    parsed: Any = read(tyro.conf.OmitArgPrefixes[arguments], list(_listed(argv)), prog, description, common, shown)
    chosen = dataclasses.replace(start, **{group: getattr(parsed, group) for group in groups})
    check_bounds(parsed.command)
    typed = typed_options(argv)
    chosen = _with_derived_settings(chosen, typed, path, tables)
    try:
        config.validate(chosen)
    except UserError as e:
        raise UserError(f"{e}{_origins(str(e), typed, path, tables)}") from e
    for note in several:
        print(f"note    the data are {note}", file=sys.stderr, flush=True)
    return Command(chosen, parsed.command, name)


def _with_derived_settings(
    chosen: config.Config, typed: Collection[str], path: Path, tables: Mapping[str, Any]
) -> config.Config:
    """Returns the config with settings filled in that were not typed and depend on the config file's location or on
    typed options.

    Args:
      chosen: the config.
      typed: options of the command line.
      path: of the config file.
      tables: its contents.

    Raises:
      UserError: the folder to resume is ambiguous, or two options set the end of the run.
    """
    if "--out" not in typed:
        chosen = with_run_folder(chosen, path, tables)
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
    """Names the settings in a message whose values are from the config file."""
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
    shown: ConfigDefaults | None = None,
) -> Any:
    """Parses the options of a command line into the dataclass `options`.

    Args:
      options: the dataclass.
      argv: arguments; those of the process when None.
      prog: the command as the user types it.
      description: first paragraph of `--help`.
      common: headings of `--help`, and the options below each; None shows all.
      shown: of the config file that the options override; None without one.

    Raises:
      UserError: an option is invalid or missing.
      SystemExit: help was requested (0).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    listed = list(options_of(options))
    if {*HELP, HELP_ALL} & set(arguments):
        print(show_help(prog, description, listed, None if HELP_ALL in arguments else common, shown), end="")
        raise SystemExit(0)
    arguments = with_values(arguments, listed)
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            parsed = tyro.cli(options, prog=prog, description=description, args=arguments, add_help=False)
    except SystemExit as e:
        if not e.code:
            raise
    else:
        check_bounds(parsed)
        return parsed
    sentence = _one_sentence(output.getvalue(), arguments, names_of(listed))
    raise UserError(f"{sentence} ({prog} {help_for(sentence, listed, common)} lists the options)")


_VALUES = {"int()": "an integer", "INT": "an integer", "to float": "a number", "FLOAT": "a number"}
_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\) ?\.")
_NUMBER = re.compile(
    r"Error parsing (\S+): (?:invalid literal for|could not convert string) (int\(\)|to float).*?'(.*)'"
)
_SEVERAL = re.compile(r"Error parsing (\S+): no type matching (.*) could be instantiated from \[(.*?)\]")


def _one_sentence(box: str, argv: Sequence[str] = (), known: Collection[str] = ()) -> str:
    """Converts the message that tyro prints as a box into one sentence: what was wrong, the value, and what is valid;
    messages of other kinds are only joined into one line."""
    rows = re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()  # colours, on a terminal
    rows = rows[2:] if box.isascii() else rows[1:-1]  # without the title and the frame, which is a rule in ASCII
    lines = [row.strip(" │") for row in rows]
    rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"[─-]+", line)), len(lines))
    output = " ".join(" ".join(lines[:rule]).split())
    if match := _CHOICE.fullmatch(output):
        choices = [choice for choice in re.findall(r"'([^']*)'", match[3]) if choice != "None"]
        shown = (repr(choice) if "," in choice else choice for choice in choices)
        return f"{match[2]} {match[1]} is not one of {', '.join(shown)}{nearest(match[1], choices)}"
    if output.startswith("Unrecognized options: "):
        arguments = output.partition(": ")[2].split(", ")
        unknown = dict.fromkeys(word.partition("=")[0] for word in arguments if word.startswith("--"))
        if not unknown:
            return f"unexpected argument {arguments[0]!r}{_as_option(arguments[0], known)}"
        return refusal({option: _value_of(option, argv) for option in unknown}, known)
    if match := _NUMBER.match(output):
        return f"{match[1]} is {shortened(match[3])!r}, and must be {_VALUES[match[2]]}"
    if match := _SEVERAL.match(output):
        kinds = [kind.strip("{}") for kind in match[2].split("|") if kind != "{None}"]
        return (
            f"{match[1]} is {shortened(match[3])}, and must be {' or '.join(_VALUES.get(kind, kind) for kind in kinds)}"
        )
    if match := re.match(r"Missing value for argument '(.*?)'", output):
        return f"{match[1]} needs a value"
    if output.startswith("Missing from"):
        names = [line.split()[0] for line in lines[1:rule] if re.match(r"--\w|[A-Z]+$", line)]
        # Others are of help.
        names = [name for name in names if not name.startswith("--") or not known or name in known]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    return shortened(output.rstrip(". "), 400)


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    """Returns the value that was typed after an unknown option."""
    value = argument(argv, option)
    return None if value is None or value.startswith("--") else value


def _as_option(word: str, known: Collection[str]) -> str:
    """Suggests the option for `steps=10`, which is MaxText's syntax."""
    name, equals, value = word.partition("=")
    option = option_of(name)
    if not equals or not name.isidentifier():
        return ""
    return f": write {option} {value}" if option in known else advice(option, value, known)


def _listed(argv: Sequence[str]) -> Iterator[str]:
    """Splits the values of list options: "--layers-per-stage 5,6,6,5"."""
    for before, word in zip(["", *argv], argv, strict=False):
        option, equals, value = word.partition("=")
        is_list = (option if equals else before).replace("_", "-") in _lists()
        yield from [option, *value.split(",")] if is_list and equals else word.split(",") if is_list else [word]


@cache
def _lists() -> frozenset[str]:
    """Returns the options that take several values."""
    return frozenset(option.name for option in options_of(config.Config) if get_origin(option.type) is tuple)


_CONFIG_HELP = "A TOML file, or the name of a config that ships with mtjax (see configs/)."


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def argument(argv: Sequence[str], option: str) -> str | None:
    """Returns the value of the last `option`; it is read before the other options, whose defaults it sets."""
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
    """Returns the options that were typed, spelled as in `--help`: tyro also accepts `--learning_rate=1`."""
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
