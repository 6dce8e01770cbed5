"""Settings and values that had other names in mtjax before December 2026.

Configs and checkpoints with the old names are read as they are. On the command line an old name works until 0.2, with
a note that says the new one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtjax.config.arguments import typed_options

NAMES = {
    "balance_loss": "router_aux_loss",
    "expert_groups_kept": "expert_groups_top_k",
    "expert_method": "expert_dispatch",
    "failed_saves": "max_failed_saves",
    "gradient_wire_dtype": "grad_reduce_dtype",
    "max_bad_steps": "max_nonfinite_steps",
    "router_bias_rate": "router_bias_update_rate",
    "schedule": "pipeline_schedule",
}
"""Old name of a setting -> its new name."""
VALUES = {
    "context_method": {"gather": "all-gather"},
    "expert_dispatch": {"gather": "all-gather", "exchange": "all-to-all"},
}
"""Name of a setting -> old name of a value -> its new name."""


def with_new_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config's tables with the current names. If both names are present, the new one takes precedence."""
    return {section: _renamed(table) if isinstance(table, Mapping) else table for section, table in tables.items()}


def _renamed(table: Mapping[str, Any]) -> dict[str, Any]:
    named = {NAMES.get(name, name): value for name, value in table.items()}
    # Second, so that a new name wins wherever it stands in the table.
    named |= {name: value for name, value in table.items() if name not in NAMES}
    return {name: _new_value(name, value) for name, value in named.items()}


def _new_value(name: str, value: Any) -> Any:
    # TOML values may be lists, which can't be keys.
    return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def old_names_in(tables: Mapping[str, Any]) -> list[str]:
    """Returns `old is now new` for each old name of a setting or value in a config's tables."""
    pairs = []
    for table in tables.values():
        for name, value in table.items() if isinstance(table, Mapping) else ():
            new = NAMES.get(str(name), str(name))
            if (new, _new_value(new, value)) != (name, value):
                pairs.append(_pair(name, value, " = ", new))
    return pairs


def with_new_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command line with the current names, and `old is now new` for each old one.

    Args:
      argv: arguments; an option is followed by its value, or contains it after `=`.
    """
    renamed, pairs = list(argv), []
    for typed in typed_options(argv):
        new = NAMES.get(typed.setting, typed.setting)
        value = _new_value(new, typed.value)
        if (new, value) != (typed.setting, typed.value):
            option = f"--{new.replace('_', '-')}"
            typed.write(renamed, option, value)
            pairs.append(_pair(typed.option, typed.value or "", " ", option))
    return renamed, pairs


def _pair(old: str, value: Any, between: str, new: str) -> str:
    setting = new.removeprefix("--").replace("-", "_")
    renamed = _new_value(setting, value)
    shown = (f"{between}{value}", f"{between}{renamed}") if renamed != value else ("", "")
    return f"{old}{shown[0]} is now {new}{shown[1]}"
