"""The table of Megatron-LM's arguments and their equivalents in mtjax."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtjax.migrate.argument import Argument, Sections
from mtjax.migrate.model_arguments import MODEL
from mtjax.migrate.older_arguments import OLDER
from mtjax.migrate.system_arguments import SYSTEM
from mtjax.migrate.training_arguments import TRAINING

SECTIONS: Sections = {**MODEL, **TRAINING, **SYSTEM, **OLDER}
TABLE: tuple[Argument, ...] = tuple(row for rows in SECTIONS.values() for row in rows)
OF_MODEL = frozenset(row.dest for rows in MODEL.values() for row in rows)
"""Attributes of the arguments that define the network."""
SAVED_AS: Mapping[str, str] = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "hybrid_layer_pattern": "hybrid_override_pattern",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}
"""Attributes that some versions of Megatron-LM save under another name, that of Megatron-Core's config."""


@cache
def by_name() -> Mapping[str, Argument]:
    """Returns the rows by argument as typed, such as `--lr`."""
    return {name: row for row in TABLE for name in row.names}


@cache
def by_dest() -> Mapping[str, Argument]:
    """Returns the rows by the attribute that Megatron saves an argument under, such as `lr`."""
    # Each dest has one row: where two arguments share one, the rarer has a name of its own (see `--bias-gelu-fusion`).
    return {row.dest: row for row in TABLE}


def default_of(dest: str) -> Any:
    """Returns Megatron's default of an argument."""
    return by_dest()[dest].default


def supported(prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Returns the arguments of the network that only some values of are supported by mtjax, with these values.

    Args:
      prefix: only arguments that begin with it.
    """
    return {
        row.dest: row.same
        for row in TABLE
        if row.dest in OF_MODEL and row.same is not None and row.dest.startswith(prefix)
    }


def markdown() -> str:
    """Formats the table for docs/migrate.md."""
    parts = []
    for heading, rows in SECTIONS.items():
        lines = [f"### {heading}", "", "| Megatron-LM | mtjax | |", "|---|---|---|"]
        for row in rows:
            names = ", ".join(f"`{name}`" for name in row.names)
            is_option = row.equal.startswith(("--", "mtjax "))
            equal = (f"`{row.equal}`" if is_option else row.equal) if row.status == "equal" else row.status
            note = row.note.replace("|", "\\|")
            lines.append(f"| {names} | {equal} | {note} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
