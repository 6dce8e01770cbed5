"""A translation: mtjax's settings of a Megatron-LM run, and the arguments that were not translated exactly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtjax.convert.from_megatron.given import GivenArguments
from mtjax.migrate.megatron import by_dest


@dataclass
class Translation:
    """Settings, and notes for the report."""

    given: GivenArguments
    settings: dict[str, Any] = field(default_factory=dict)
    """mtjax's settings of the run."""
    implied: set[str] = field(default_factory=set)
    """Names of settings that follow from Megatron's defaults."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Attributes of arguments that are not supported -> the effect."""
    unneeded: dict[str, str] = field(default_factory=dict)
    """Attributes of arguments for which mtjax needs no setting -> the reason."""
    differences: list[str] = field(default_factory=list)
    """Notes on settings whose meaning differs from Megatron's."""
    run_options: list[str] = field(default_factory=list)
    """Options to add when the run is started."""
    environment: list[str] = field(default_factory=list)
    """Environment variables to set when the run is started: `NAME=VALUE`."""
    run_first: list[str] = field(default_factory=list)
    """Commands to run before the run is started, each with what it is for."""

    def command(self, config: str) -> str:
        """Returns the command that starts the run with its config."""
        return " ".join([*self.environment, "mtjax train --config", config, *self.run_options])

    @property
    def asks_for_flash(self) -> bool:
        """Whether the run asks for flash attention."""
        return self.has("use_flash_attn") or self.given.values.get("attention_backend") in ("flash", "fused")

    def get(self, dest: str) -> Any:
        """Returns the value of an argument, or Megatron's default."""
        return self.given.values.get(dest, by_dest()[dest].default)

    def has(self, dest: str) -> bool:
        """Returns whether an argument was given, and is not False."""
        return self.given.values.get(dest) not in (None, False)

    def set(self, dest: str, settings: Mapping[str, Any]) -> None:
        """Sets settings that follow from an argument; they are `implied` if it was not given."""
        self.settings |= settings
        # An earlier argument may have implied the setting that this one gives.
        self.implied -= set(settings)
        if dest not in self.given.values:
            self.implied |= set(settings)

    def drop(self, dest: str, why: str = "") -> None:
        """Records an argument as not supported, if it was given."""
        if dest in self.given.values:
            self.unsupported[dest] = why or by_dest()[dest].note
