"""Names of the tensors of a Retro in Megatron-Core up to 0.15 (`megatron/core/models/retro`)."""

from dataclasses import replace

from mtjax.config import Model
from mtjax.convert.megatron_tables import QKV_ORDERS, MegatronNames, layer_rows
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Row, Table
from mtjax.families.retro.config import first_retro_layer
from mtjax.families.retro.layout import ENCODER_FIRST, FIRST_ATTENTION, FIRST_REST, PLAIN, RETRO
from mtjax.families.retro.megatron_arguments import CROSS
from mtjax.layout.stacks import ENCODER, STACK

CROSS_NORM = "pre_cross_attn_layernorm"


def retro_table(model: Model, names: MegatronNames, version: float = 3.0) -> Table:
    """Returns the table of the tensors of a Retro: layers of three of our stacks are one layer there, and the encoder
    is part of the first layer that reads neighbours."""
    first, order = first_retro_layer(model), QKV_ORDERS[version]
    encoder = f"{names.layer.format(layer=first)}.{CROSS}.encoder"
    inside = replace(names, stack=encoder)
    # The first encoder layer has norms of its own, also in Transformer Engine's layers.
    local = replace(inside, mlp_norm="pre_mlp_layernorm.norm.")
    rows = (
        row("embedding", names.words, "vocab embed"),
        row("positions", f"{names.embedding}.position_embeddings.weight", "positions embed"),
        *(one for path in (PLAIN, FIRST_ATTENTION, FIRST_REST, RETRO) for one in _stack(path, names, order)),
        *_stack(ENCODER_FIRST, local, order),
        *_stack(ENCODER, inside, order),
        *norm("first_norm", f"{names.layer.format(layer=first)}.{CROSS_NORM}"),
        *norm("final_norm", f"{names.stack}.{names.final_norm.rstrip('.')}"),
        row("output", names.output, "vocab embed"),
    )
    return Table("a Retro of Megatron-Core", rows, copies={names.head_copy: names.words})


def _stack(path: str, names: MegatronNames, qkv_order: str) -> tuple[Row, ...]:
    """Returns the rows of a stack's layers: those of a GPT's, and cross-attention, chunked or the encoder's."""
    layers = f"{path}.layers"
    rows = (replace(one, ours=one.ours.replace(f"{STACK}.layers", layers)) for one in layer_rows(names, qkv_order, 1))
    return (*rows, *_cross(f"{layers}.cross", names), *_cross(f"{layers}.chunked", names))


def _cross(ours: str, names: MegatronNames) -> tuple[Row, ...]:
    theirs = f"{names.layer}.{CROSS}.attn"
    return (
        *norm(f"{ours}_norm", f"{names.layer}.{CROSS_NORM}"),
        *linear(f"{ours}.query", f"{theirs}.linear_q", "embed", "heads*head_dim"),
        *linear(f"{ours}.key_value", f"{theirs}.linear_kv", "embed", "heads*kv*head_dim"),
        *linear(f"{ours}.output", f"{theirs}.linear_proj", "heads*head_dim", "embed"),
    )
