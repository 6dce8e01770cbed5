"""Megatron-LM's names of tensors, in its own format and in Megatron-Core's, and the order of their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mtjax.convert.families.rows import linear, norm, row
from mtjax.convert.table import Row, Slots, Table, Tensor, dims
from mtjax.errors import UserError
from mtjax.theory.families.decoder import DENSE

LAYERS = "stack.layers"


@dataclass(frozen=True)
class Names:
    """What one of Megatron's implementations calls the modules of a GPT."""

    transformer_impl: str
    """Its `--transformer-impl`; "legacy" is the code before Megatron-Core."""
    embedding: str
    stack: str
    """Of the layers."""
    output: str
    head_copy: str
    """The last pipeline stage's copy of the embedding, for the output."""
    attention_norm: str
    """Of a layer, like all below; "weight" or "bias" follows."""
    mlp_norm: str
    query_key_value: str
    projection: str
    up: str
    down: str
    final_norm: str = "final_layernorm."

    @property
    def is_legacy(self) -> bool:
        """Whether it is the code before Megatron-Core."""
        return self.transformer_impl == "legacy"

    @property
    def words(self) -> str:
        """The embedding table."""
        return f"{self.embedding}.word_embeddings.weight"

    @property
    def layer(self) -> str:
        """The beginning of what a layer's tensors are called."""
        return f"{self.stack}.layers.{{layer}}"


_MODULES = {
    "query_key_value": "self_attention.query_key_value",
    "projection": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_CORE_MODULES = {
    "query_key_value": "self_attention.linear_qkv",
    "projection": "self_attention.linear_proj",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
_PLACES = {
    "embedding": "language_model.embedding",
    "stack": "language_model.encoder",
    "output": "language_model.output_layer.weight",
    "head_copy": "word_embeddings_for_head.weight",
}
_CORE_PLACES = {
    "embedding": "embedding",
    "stack": "decoder",
    "output": "output_layer.weight",
    "head_copy": "output_layer.weight",
}
LEGACY = Names("legacy", **_PLACES, **_MODULES, attention_norm="input_layernorm.", mlp_norm="post_attention_layernorm.")
"""To these, names of all versions of that code are brought when they are read."""
LEGACY_RMS = Names(
    "legacy",
    **_PLACES,
    **_MODULES,
    attention_norm="input_norm.",
    mlp_norm="post_attention_norm.",
    final_norm="final_norm.",
)
"""Those since there is RMS norm."""
LOCAL = Names(
    "local", **_CORE_PLACES, **_CORE_MODULES, attention_norm="input_layernorm.", mlp_norm="pre_mlp_layernorm."
)
TRANSFORMER_ENGINE = Names(
    "transformer_engine",
    **_CORE_PLACES,
    **_CORE_MODULES,
    attention_norm="self_attention.linear_qkv.layer_norm_",
    mlp_norm="mlp.linear_fc1.layer_norm_",
)
"""Whose norms are part of the linear layers behind them."""
WRITTEN: Mapping[str, Names] = {names.transformer_impl: names for names in (LEGACY, LOCAL, TRANSFORMER_ENGINE)}


def names_in(tensors: Iterable[str], source: str) -> Names:
    """The names in use in a checkpoint.

    Raises:
      UserError: its layers are an encoder of Megatron-Core's.
    """
    tensors = tuple(tensors)
    if any(name.startswith("encoder.layers.") for name in tensors):
        raise UserError(f"{source} is a BERT or T5 of Megatron-Core, of which mtjax reads GPTs")
    if not any(name.startswith("decoder.layers.") for name in tensors):
        return LEGACY
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in tensors)
    return TRANSFORMER_ENGINE if fused else LOCAL


QKV_ORDERS: Mapping[float, str] = {
    0.0: "qkv*heads*head_dim",
    1.0: "heads*head_dim*qkv",
    2.0: "heads*qkv*head_dim",
    3.0: "heads*qkv*head_dim",
}
"""checkpoint_version -> the order of the rows of query_key_value (`fix_query_key_value_ordering` in Megatron)."""
GROUPED_SINCE = 2.0
"""The first version that orders rows by heads, as those that know grouped queries do."""


def table(version: float, names: Names = LEGACY, queries_per_group: int = 1, is_grouped: bool = False) -> Table:
    """The tensors of GPT, Llama and BERT in a version of the format.

    Args:
      version: `checkpoint_version`.
      names: what the implementation calls them.
      queries_per_group: query heads that share a key and a value head.
      is_grouped: whether the experts of a rank are one module.

    Raises:
      UserError: the version is unknown, or has no grouped queries.
    """
    if version not in QKV_ORDERS:
        raise UserError(f"checkpoint_version is {version:g}, and the known ones are 0, 1, 2 and 3")
    if queries_per_group > 1 and version < GROUPED_SINCE:
        raise UserError(f"checkpoint_version {version:g} has no grouped queries, which need version 2 or 3")
    layer = _layer(names, QKV_ORDERS[version], queries_per_group)
    rows: tuple[Row, ...] = (
        row("embedding", names.words, "vocab embed"),
        row("positions", f"{names.embedding}.position_embeddings.weight", "positions embed"),
        *layer,
        *(replace(of, ours=of.ours.replace(LAYERS, f"{DENSE}.layers")) for of in layer),
        *(() if names.is_legacy else _experts(names, is_grouped)),
        *_norm("final_norm", f"{names.stack}.{names.final_norm}"),
        row("output", names.output, "vocab embed"),
        *(_bert() if names.is_legacy else ()),
    )
    models = "a GPT or BERT of Megatron-LM" if names.is_legacy else "a GPT of Megatron-Core"
    return Table(
        f"{models} (checkpoint_version {version:g})",
        rows,
        copies={names.head_copy: names.words},
        optional=("head", "order.pooler", "order.classifier"),
    )


def _layer(names: Names, qkv_order: str, queries_per_group: int) -> tuple[Row, ...]:
    attention, qkv = f"{LAYERS}.attention", f"{names.layer}.{names.query_key_value}"
    return (
        *_norm(f"{LAYERS}.attention_norm", f"{names.layer}.{names.attention_norm}"),
        *linear(f"{attention}.qkv", qkv, "embed", qkv_order),
        *_grouped(f"{attention}.qkv", f"{qkv}.weight", "weight", " embed", queries_per_group),
        *_grouped(f"{attention}.qkv", f"{qkv}.bias", "bias", "", queries_per_group),
        *(
            row(
                f"{attention}.{ours}_norm.scale", f"{names.layer}.self_attention.{ours[0]}_layernorm.weight", "head_dim"
            )
            for ours in ("query", "key")
        ),
        *linear(f"{attention}.output", f"{names.layer}.{names.projection}", "heads*head_dim", "embed"),
        *_norm(f"{LAYERS}.mlp_norm", f"{names.layer}.{names.mlp_norm}"),
        *linear(f"{LAYERS}.mlp.up", f"{names.layer}.{names.up}", "embed", "mlp"),
        # Of a rank, first all rows of its gate, then all of its other projection.
        *linear(f"{LAYERS}.mlp.up", f"{names.layer}.{names.up}", "embed", "gate*mlp"),
        *linear(f"{LAYERS}.mlp.down", f"{names.layer}.{names.down}", "mlp", "embed"),
    )


def _experts(names: Names, is_grouped: bool) -> tuple[Row, ...]:
    """A router and its experts; their norm is a module of its own, whatever the implementation."""
    ours, theirs = f"{LAYERS}.experts", f"{names.layer}.mlp"
    up, down = (
        f"{theirs}.experts.{name}.weight{{expert}}"
        if is_grouped
        else f"{theirs}.experts.local_experts.{{expert}}.{name}.weight"
        for name in ("linear_fc1", "linear_fc2")
    )
    return (
        *_norm(f"{ours}_norm", f"{names.layer}.pre_mlp_layernorm."),
        row(f"{ours}.router.weight", f"{theirs}.router.weight", "routes embed"),
        row(f"{ours}.router.bias", f"{theirs}.router.expert_bias", "routes"),
        Row(f"{ours}.up.weight", (Tensor(up, dims("mlp embed"), each=True),)),
        Row(f"{ours}.up.weight", (Tensor(up, dims("gate*mlp embed"), each=True),)),
        Row(f"{ours}.down.weight", (Tensor(down, dims("embed mlp"), each=True),)),
        row(f"{ours}.shared.up.weight", f"{theirs}.shared_experts.linear_fc1.weight", "mlp embed"),
        row(f"{ours}.shared.up.weight", f"{theirs}.shared_experts.linear_fc1.weight", "gate*mlp embed"),
        row(f"{ours}.shared.down.weight", f"{theirs}.shared_experts.linear_fc2.weight", "embed mlp"),
    )


def _grouped(ours: str, theirs: str, kind: str, inputs: str, queries: int) -> tuple[Row, Row]:
    """Of a rank, group by group: the rows of the group's query heads, of its key head and of its value head."""
    query = Tensor(theirs, dims(f"heads*head_dim{inputs}"), slots=Slots(0, queries, queries + 2))
    key_value = tuple(
        Tensor(theirs, dims(f"kv_heads*head_dim{inputs}"), ("kv", i), Slots(queries + i, 1, queries + 2))
        for i in range(2)
    )
    return Row(f"{ours}.query.{kind}", (query,)), Row(f"{ours}.key_value.{kind}", key_value)


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return row(f"{ours}.scale", f"{theirs}weight", "embed"), row(f"{ours}.bias", f"{theirs}bias", "embed")


def _bert() -> tuple[Row, ...]:
    """The rows of a BERT outside its layers."""
    return (
        row("token_types", "language_model.embedding.tokentype_embeddings.weight", "token_types embed"),
        *linear("head.dense", "lm_head.dense", "embed", "features"),
        *norm("head.norm", "lm_head.layernorm"),
        row("head.bias", "lm_head.bias", "vocab"),
        *linear("order.pooler", "language_model.pooler.dense", "embed", "features"),
        *linear("order.classifier", "binary_head", "embed", "classes"),
    )
