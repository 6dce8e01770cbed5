"""A translation: our settings of a Megatron-LM run, and what could not be carried over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtjax.convert.from_megatron.given import Given
from mtjax.migrate.megatron import by_dest


@dataclass
class Translation:
    """Settings, and what to tell about them."""

    given: Given
    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings of the run."""
    implied: set[str] = field(default_factory=set)
    """Those among them that follow from Megatron's defaults."""
    without: dict[str, str] = field(default_factory=dict)
    """Attributes of arguments that have no equal, and what changes."""
    needless: dict[str, str] = field(default_factory=dict)
    """Attributes of arguments that mtjax needs no setting for, and why."""
    differs: list[str] = field(default_factory=list)
    """Settings that do not mean quite the same."""
    with_run: list[str] = field(default_factory=list)
    """What is typed when the run is started."""

    def get(self, dest: str) -> Any:
        """The value of an argument, or Megatron's default."""
        return self.given.values.get(dest, by_dest()[dest].default)

    def has(self, dest: str) -> bool:
        """Whether an argument was given, and is not switched off."""
        return self.given.values.get(dest) not in (None, False)

    def set(self, dest: str, settings: Mapping[str, Any]) -> None:
        """Sets settings that follow from an argument."""
        self.settings |= settings
        self.implied -= set(settings)
        if dest not in self.given.values:
            self.implied |= set(settings)

    def drop(self, dest: str, why: str = "") -> None:
        """Remembers an argument as one without an equal."""
        if dest in self.given.values:
            self.without[dest] = why or by_dest()[dest].note
