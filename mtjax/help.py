"""The options of a command, read from its dataclasses, and the text of `--help`."""

import ast
import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

HELP = ("-h", "--help")
"""Options that show help."""
HELP_ALL = "--help-all"
"""Shows all options if `--help` shows only common ones."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option or positional argument of a command."""

    name: str
    """As typed: `--hidden-size`; `PREFIX` for a positional argument."""
    field: str
    """The name of its dataclass field."""
    group: str
    """Name of its section."""
    type: Any
    """Type of its value, without `| None`."""
    kind: str
    """Placeholder of its value: N, TEXT, {gpt,llama}; "" for a switch."""
    default: Any
    """None if there is none, or if `text` describes it."""
    text: str
    """Help text."""
    is_optional: bool = False
    """Whether its value may be None."""
    alone: str | None = None
    """Its value if it is typed without one; None if it needs one."""

    @property
    def spelling(self) -> str:
        """Its spelling in the help: `--hidden-size N`, `--bias/--no-bias`."""
        if self.kind:
            return f"{self.name} {self.kind if self.alone is None else f'[{self.kind}]'}"
        has_both = self.name.startswith("--") and (self.default or self.is_optional)
        return f"{self.name}/--no-{self.name[2:]}" if has_both else self.name


@dataclasses.dataclass(frozen=True)
class ConfigDefaults:
    """What a config file's settings would be without the file."""

    file: str
    """Name of the file, whose values are the options' defaults."""
    without: Mapping[str, Any]
    """Section -> setting -> its default in the file's family."""

    def differs(self, option: Option) -> bool:
        """Returns whether the file sets an option to another value than its default."""
        return option.group in self.without and self.without[option.group][option.field] != option.default


def options_of(cls: Any, values: Any = None, group: str = "") -> Iterator[Option]:
    """Yields the options of a dataclass in order; fields that are dataclasses themselves are groups.

    Args:
      cls: the dataclass, with or without tyro's annotations.
      values: an instance that has the defaults; those of the class when None.
      group: name of the group.
    """
    cls, _ = _plain(cls)
    texts, hints = _docstrings(cls), get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, marks = _plain(hints[field.name])
        default = getattr(values, field.name) if values is not None else _default(field)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from options_of(kind, default, field.name)
            continue
        keys = ("name", "metavar", "help")
        named = {key: value for mark in marks for key in keys if (value := getattr(mark, key, None))}
        is_positional = tyro.conf.Positional in marks
        name = f"--{named.get('name', field.name).replace('_', '-')}"
        metavar = named.get("metavar") or _kind(kind)
        if is_positional:
            name, metavar = named.get("metavar") or field.name.upper(), ""
        text = named.get("help") or texts.get(field.name, "")
        text = " ".join(text.split())
        is_optional, alone = NoneType in get_args(hints[field.name]), field.metadata.get("alone")
        yield Option(name, field.name, group, kind, metavar, default, text, is_optional, alone)


def names_of(options: Sequence[Option]) -> set[str]:
    """Returns all options as they may be typed, switches also with `--no-`."""
    named = [option for option in options if option.name.startswith("--")]
    return {option.name for option in named} | {f"--no-{o.name[2:]}" for o in named if not o.kind} | {"--help"}


def with_values(arguments: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Returns the arguments with a value after each option typed without one, as tyro reads it: `--bias True` of a
    switch that may be None, `--fp8 delayed`."""
    values = ("True", "False", "None")
    switches = {o.name: "True" for o in options if o.is_optional and not o.kind}
    switches |= {f"--no-{name[2:]}": "False" for name in switches}
    alone = {o.name: o.alone for o in options if o.alone is not None}
    found: list[str] = []
    # tyro reads neither a switch without a value whose default may be None, nor an optional value.
    for word, after in itertools.pairwise([*arguments, "--"]):
        if word in alone and after.startswith("-"):
            found += [word, alone[word]]
        elif word not in switches or after in values:
            found.append(word)
        else:
            found += [word.replace("--no-", "--", 1) if switches[word] == "False" else word, switches[word]]
    return found


def show_help(
    prog: str,
    description: str,
    options: Sequence[Option],
    common: Mapping[str, Collection[str]] | None = None,
    shown_defaults: ConfigDefaults | None = None,
) -> str:
    """Formats the text of `--help`.

    Args:
      prog: the command as typed.
      description: its first paragraph.
      options: all options.
      common: headings, and the fields of the options below each; all options by group when None.
        Options of the command itself, which belong to no section of the config, are always shown.
      shown_defaults: of the config file that the options override.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    positional = [option for option in options if not option.name.startswith("--")]
    usage = " ".join([prog, *(f"[{option.name}]" for option in positional), "[OPTIONS]"])
    parts = [f"usage: {usage}", description.strip()]
    groups = by_heading(options, common)
    parts += [
        "\n".join([f"{heading}:", *(_lines(option, width, shown_defaults) for option in shown)])
        for heading, shown in groups.items()
        if shown
    ]
    more = len(options) - sum(map(len, groups.values()))
    if more:
        parts.append(f"`{prog} {HELP_ALL}` shows {more} more options.")
    return "\n\n".join(parts) + "\n"


def by_heading(options: Sequence[Option], common: Mapping[str, Collection[str]] | None) -> dict[str, list[Option]]:
    """Returns the options that `--help` shows below each heading; the arguments are those of `show_help`."""
    if common is not None:
        by_field = {option.field: option for option in options}
        return {"options": [option for option in options if option.group in ("", "command")]} | {
            heading: [by_field[name] for name in names if name in by_field] for heading, names in common.items()
        }
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(f"{option.group} options" if option.group else "options", []).append(option)
    return groups


def help_for(sentence: str, options: Sequence[Option], common: Mapping[str, Collection[str]] | None) -> str:
    """Returns `--help` if it shows all options of the command that a sentence names, else `--help-all`."""
    named = {re.sub("^--no-", "--", word) for word in re.findall(r"--[\w-]+", sentence)}
    shown = {option.name for below in by_heading(options, common).values() for option in below}
    return HELP_ALL if {option.name for option in options if option.name in named} - shown else HELP[1]


def _lines(option: Option, width: int, shown: ConfigDefaults | None) -> str:
    """Formats an option and its help text, wrapped to a width."""
    text, default = option.text, _shown(option.default)
    if shown is not None and shown.differs(option):
        usual = _shown(shown.without[option.group][option.field])
        text += f" In {shown.file}: {default or 'not given'}{f'; default: {usual}' if usual else ''}."
    elif default and (option.kind or option.default is True):
        text += f" Default: {default}."
    indent = " " * 6
    body = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {option.spelling}\n{body}"


def _shown(value: Any) -> str:
    """Formats a default; "" for none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, (), ""):
        return ""
    return (
        f"{value:g}"
        if isinstance(value, float)
        else " ".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a type without `Annotated` and `| None`, and the annotations."""
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *found = get_args(hint)
        marks = tuple(found)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if NoneType in get_args(hint) and len(kinds) == 1:
        return kinds[0], marks
    return hint, marks


def _kind(hint: Any) -> str:
    """Returns the placeholder of a value of this type; "" for a switch."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(repr(one) if "," in str(one) else str(one) for one in get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        members = get_args(hint)
        if members[1:] == (...,):
            return f"{_kind(members[0])} ..."
        return " ".join(map(_kind, members))
    return {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}[hint]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            # Python keeps no docstrings of fields; tyro reads the source too, but formats the text itself.
            node = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # a class created at run time has no source
            continue
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = str(below.value.value)
    return found
