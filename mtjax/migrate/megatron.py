"""The table of Megatron-LM's arguments: what mtjax has for each."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtjax.migrate.argument import Argument, all_of
from mtjax.migrate.model_arguments import MODEL
from mtjax.migrate.system_arguments import SYSTEM
from mtjax.migrate.training_arguments import TRAINING

TABLE: tuple[Argument, ...] = all_of(MODEL, TRAINING, SYSTEM)


@cache
def by_name() -> Mapping[str, Argument]:
    """Argument as typed, `--lr` -> its row."""
    return {name: row for row in TABLE for name in row.names}


@cache
def by_dest() -> Mapping[str, Argument]:
    """The attribute that Megatron saves an argument under, `lr` -> its row."""
    return {row.dest: row for row in TABLE}


def default_of(dest: str) -> Any:
    """Megatron's default of an argument."""
    return by_dest()[dest].default


def supported(prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Arguments of the network whose value must be one of these for mtjax to have the model.

    Args:
      prefix: only arguments that begin with it.
    """
    return {row.dest: row.same for row in MODEL if row.same is not None and row.dest.startswith(prefix)}
