"""A row of the table of Megatron-LM's arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["equal", "default", "none"]
"""equal: mtjax has a setting for it. default: mtjax always does so, or needs no setting. none: there is no equal."""


Sections = Mapping[str, tuple["Argument", ...]]
"""Headings, and the rows below each."""


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM, or several that belong together, and what mtjax has instead."""

    names: tuple[str, ...]
    """As typed: `--lr`. The first one is the argument; others are its older names."""
    status: Status
    equal: str = ""
    """As typed for mtjax: `--learning-rate`; `N` stands for the argument's value."""
    setting: str | None = None
    """The setting that has the same value, where the translation is only a matter of names."""
    note: str = ""
    """What differs in meaning; of an argument without an equal, what the run loses or does instead."""
    default: Any = None
    """Megatron's default, None for none."""
    same: tuple[Any, ...] | None = None
    """Values with which Megatron's model is mtjax's. Other values can't be translated."""
    dest: str = ""
    """The attribute that Megatron saves it under."""
    stores: bool = True
    """What the bare argument, without a value, stores there."""


def _row(typed: str, status: Status, values: dict[str, Any]) -> Argument:
    names = tuple(typed.split())
    values.setdefault("dest", names[0].removeprefix("--").replace("-", "_"))
    return Argument(names, status, **values)


def same(typed: str, setting: str, **values: Any) -> Argument:
    """A row for an argument whose value is that of a setting."""
    values.setdefault("equal", option_of(setting))
    return _row(typed, "equal", values | {"setting": setting})


def equal(typed: str, to: str, note: str = "", **values: Any) -> Argument:
    """A row for an argument that becomes other settings, or another value."""
    return _row(typed, "equal", values | {"equal": to, "note": note})


def always(typed: str, note: str, **values: Any) -> Argument:
    """A row for an argument that mtjax does not need: `note` says why."""
    return _row(typed, "default", values | {"note": note})


def none(typed: str, note: str, **values: Any) -> Argument:
    """A row for an argument that mtjax has no equal of: `note` says what changes."""
    return _row(typed, "none", values | {"note": note})


def off(row: Argument, dest: str) -> Argument:
    """The row of an argument that switches `dest` off."""
    return Argument(**(vars(row) | {"dest": dest, "stores": False, "default": True}))


def option_of(setting: str) -> str:
    """A setting as typed: `--learning-rate`."""
    return "--" + setting.replace("_", "-")
