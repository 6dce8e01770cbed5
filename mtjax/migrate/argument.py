"""A row of the table of Megatron-LM's arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["equal", "default", "none"]
"""equal: mtjax has a setting for it. default: mtjax always does so, or needs no setting. none: mtjax does not support
it."""


Sections = Mapping[str, tuple["Argument", ...]]
"""Headings, and the rows below each."""


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM, or several that belong together, and its equivalent in mtjax."""

    names: tuple[str, ...]
    """As typed: `--lr`. The first one is the argument; the others are its older names."""
    status: Status
    equal: str = ""
    """As typed for mtjax: `--learning-rate`; `N` stands for the argument's value."""
    setting: str | None = None
    """The setting with the same value, if only the name differs."""
    note: str = ""
    """Differences in meaning; for an unsupported argument, what the run does instead."""
    default: Any = None
    """Megatron's default, None for none."""
    same: tuple[Any, ...] | None = None
    """Values for which Megatron's model is supported by mtjax. Other values can't be translated."""
    dest: str = ""
    """The attribute that Megatron saves it under."""
    stores: bool = True
    """The value that the bare argument stores there."""


def _row(typed: str, status: Status, values: dict[str, Any]) -> Argument:
    names = tuple(typed.split())
    # As argparse names attributes.
    values.setdefault("dest", names[0].removeprefix("--").replace("-", "_"))
    return Argument(names, status, **values)


def same(typed: str, setting: str, **values: Any) -> Argument:
    """Builds a row for an argument with the same value as a setting."""
    values.setdefault("equal", option_of(setting))
    return _row(typed, "equal", values | {"setting": setting})


def equal(typed: str, to: str, note: str = "", **values: Any) -> Argument:
    """Builds a row for an argument that becomes other settings, or another value."""
    return _row(typed, "equal", values | {"equal": to, "note": note})


def always(typed: str, note: str, **values: Any) -> Argument:
    """Builds a row for an argument that mtjax does not need: `note` gives the reason."""
    return _row(typed, "default", values | {"note": note})


def none(typed: str, note: str, **values: Any) -> Argument:
    """Builds a row for an argument that mtjax does not support: `note` says what changes."""
    return _row(typed, "none", values | {"note": note})


def off(row: Argument, dest: str) -> Argument:
    """Builds the row of an argument that turns `dest` off."""
    # argparse's store_false: the attribute has another name, and is True unless the argument is given.
    return Argument(**(vars(row) | {"dest": dest, "stores": False, "default": True}))


def option_of(setting: str) -> str:
    """Converts a setting's name to its option: `--learning-rate`."""
    return "--" + setting.replace("_", "-")
