"""Names of tensors in Megatron-LM's legacy code and in Megatron-Core, and the order of their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Row, Slots, Table, Tensor, dims
from mtjax.errors import UserError
from mtjax.families.hybrid.hugging_face.hybrid_rows import mamba_rows, own_stacks
from mtjax.families.hybrid.megatron_arguments import letters_in
from mtjax.families.hybrid.megatron_rows import delta_rows, gated_attention_rows
from mtjax.layout.stacks import DENSE

LAYERS = "stack.layers"


@dataclass(frozen=True)
class MegatronNames:
    """Names of a GPT's modules in one of Megatron's implementations."""

    transformer_impl: str
    """Its `--transformer-impl`; "legacy" is the code before Megatron-Core."""
    embedding: str
    stack: str
    """The module that contains the layers."""
    output: str
    head_copy: str
    """The last pipeline stage's copy of the embedding, which computes the logits."""
    attention_norm: str
    """Within a layer, like all fields below; "weight" or "bias" is appended."""
    mlp_norm: str
    query_key_value: str
    projection: str
    up: str
    down: str
    final_norm: str = "final_layernorm."

    @property
    def is_legacy(self) -> bool:
        """Whether the implementation is the code before Megatron-Core."""
        return self.transformer_impl == "legacy"

    @property
    def words(self) -> str:
        """The embedding."""
        return f"{self.embedding}.word_embeddings.weight"

    @property
    def layer(self) -> str:
        """Prefix of the names of a layer's tensors."""
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
_LEGACY_STRUCTURE = {
    "embedding": "language_model.embedding",
    "stack": "language_model.encoder",
    "output": "language_model.output_layer.weight",
    "head_copy": "word_embeddings_for_head.weight",
}
_CORE_STRUCTURE = {
    "embedding": "embedding",
    "stack": "decoder",
    "output": "output_layer.weight",
    "head_copy": "output_layer.weight",
}
LEGACY = MegatronNames(
    "legacy", **_LEGACY_STRUCTURE, **_MODULES, attention_norm="input_layernorm.", mlp_norm="post_attention_layernorm."
)
"""Names of the legacy code; names of its other versions are replaced by these when a checkpoint is read."""
LEGACY_RMS = MegatronNames(
    "legacy",
    **_LEGACY_STRUCTURE,
    **_MODULES,
    attention_norm="input_norm.",
    mlp_norm="post_attention_norm.",
    final_norm="final_norm.",
)
"""Names in the versions of the legacy code that have RMS norm."""
LOCAL = MegatronNames(
    "local", **_CORE_STRUCTURE, **_CORE_MODULES, attention_norm="input_layernorm.", mlp_norm="pre_mlp_layernorm."
)
TRANSFORMER_ENGINE = MegatronNames(
    "transformer_engine",
    **_CORE_STRUCTURE,
    **_CORE_MODULES,
    attention_norm="self_attention.linear_qkv.layer_norm_",
    mlp_norm="mlp.linear_fc1.layer_norm_",
)
"""Names in Transformer Engine layers, where a norm is fused into the linear layer that follows it."""
HYBRID = replace(TRANSFORMER_ENGINE, final_norm="final_norm.")
"""Names in hybrid models, whose layers are Transformer Engine's."""
WRITTEN: Mapping[str, MegatronNames] = {names.transformer_impl: names for names in (LEGACY, LOCAL, TRANSFORMER_ENGINE)}


def names_in(tensors: Iterable[str], source: str) -> MegatronNames:
    """Detects which names a checkpoint uses.

    Raises:
      UserError: the checkpoint is an encoder of Megatron-Core.
    """
    tensors = tuple(tensors)
    if letters_in(tensors):
        return HYBRID
    if any(name.startswith("encoder.layers.") for name in tensors):
        raise UserError(f"{source} is a BERT or T5 of Megatron-Core; only its GPT is supported")
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
"""The first version that orders rows by heads, as grouped-query attention requires."""


def table(version: float, names: MegatronNames = LEGACY, queries_per_group: int = 1, is_grouped: bool = False) -> Table:
    """Returns the table of the tensors of GPT, Llama and BERT in a version of the format.

    Args:
      version: `checkpoint_version`.
      names: names in the implementation.
      queries_per_group: number of query heads that share a key head and a value head.
      is_grouped: whether the experts of a rank are one module.

    Raises:
      UserError: the version is unknown, or does not support grouped-query attention.
    """
    if version not in QKV_ORDERS:
        raise UserError(f"checkpoint_version is {version:g}; supported versions: 0, 1, 2, 3")
    if queries_per_group > 1 and version < GROUPED_SINCE:
        raise UserError(f"checkpoint_version {version:g} does not support grouped-query attention: use version 2 or 3")
    layer = layer_rows(names, QKV_ORDERS[version], queries_per_group)
    rows: tuple[Row, ...] = (
        row("embedding", names.words, "vocab embed"),
        row("positions", f"{names.embedding}.position_embeddings.weight", "positions embed"),
        *layer,
        # In a model with experts, the first dense layers are a separate stack.
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
        # Copies exist only with tied embeddings: in Megatron-Core an untied output has the same name, but its own row.
        copies={names.head_copy: names.words},
        optional=("head", "order.pooler", "order.classifier"),
    )


def table_of(
    model: Model, names: MegatronNames, version: float, *, is_grouped: bool = False, is_distributed: bool = False
) -> Table:
    """Returns the table of a model's tensors.

    Args:
      model: the model.
      names: names in the implementation.
      version: `checkpoint_version`.
      is_grouped: whether the experts of a rank are one module.
      is_distributed: whether the parts of the first product of Mamba-2 or of a gated delta net are separate tensors, as
        in torch_dist.

    Raises:
      UserError: the version is unknown, or does not support grouped-query attention.
    """
    if model.family == "retro":
        from mtjax.families.retro.megatron import retro_table

        return retro_table(model, names, version)
    found = table(version, names, model.num_heads // num_kv_heads(model), is_grouped)
    if not model.layer_pattern:
        return found
    # A Mamba layer's norm is fused into its first product; attention, MLP and experts have the names of a GPT's, in
    # layers that have nothing else.
    mixer, attention = f"{names.layer}.mixer", f"{names.layer}.self_attention"
    recurrent = (
        *_norm("mamba.layers.mamba_norm", f"{mixer}.in_proj.layer_norm_"),
        *mamba_rows(model, mixer, is_split=is_distributed),
        *delta_rows(model, attention, is_split=is_distributed),
    )
    rows = own_stacks(found.rows)
    if model.attention_output_gate:
        ours, theirs = "attention.layers.attention", f"{names.layer}.{names.query_key_value}"
        others = (of for of in rows if not of.ours.startswith(f"{ours}.qkv."))
        rows = (*others, *gated_attention_rows(model, ours, theirs))
    return replace(found, format="a hybrid model of Megatron-Core", rows=(*rows, *recurrent))


def layer_rows(names: MegatronNames, qkv_order: str, queries_per_group: int) -> tuple[Row, ...]:
    """Returns the rows of a layer: attention, MLP and norms."""
    attention, qkv = f"{LAYERS}.attention", f"{names.layer}.{names.query_key_value}"
    return (
        *_norm(f"{LAYERS}.attention_norm", f"{names.layer}.{names.attention_norm}"),
        *linear(f"{attention}.qkv", qkv, "embed", qkv_order),
        # A model has either one parameter for query, key and value, or two with grouped queries; `Table.select` takes
        # the rows of those that it has.
        *_grouped(f"{attention}.qkv", f"{qkv}.weight", "weight", " embed", queries_per_group),
        *_grouped(f"{attention}.qkv", f"{qkv}.bias", "bias", "", queries_per_group),
        *(
            row(
                f"{attention}.{kind}_norm.scale", f"{names.layer}.self_attention.{kind[0]}_layernorm.weight", "head_dim"
            )
            for kind in ("query", "key")
        ),
        *linear(f"{attention}.output", f"{names.layer}.{names.projection}", "heads*head_dim", "embed"),
        *_norm(f"{LAYERS}.mlp_norm", f"{names.layer}.{names.mlp_norm}"),
        # Of the two rows, `Row.fits` takes the one that has the parameter's dimensions: with a gate or without.
        *linear(f"{LAYERS}.mlp.up", f"{names.layer}.{names.up}", "embed", "mlp"),
        # A rank has all rows of its shard of the gate, then all of its shard of the up projection.
        *linear(f"{LAYERS}.mlp.up", f"{names.layer}.{names.up}", "embed", "gate*mlp"),
        *linear(f"{LAYERS}.mlp.down", f"{names.layer}.{names.down}", "mlp", "embed"),
    )


def _experts(names: MegatronNames, is_grouped: bool) -> tuple[Row, ...]:
    """Returns the rows of a router and its experts; their norm is a separate module in all implementations."""
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
        row(f"{ours}.shared_gate.weight", f"{theirs}.shared_experts.gate_weight", "routes embed"),
    )


def _grouped(ours: str, theirs: str, kind: str, inputs: str, queries: int) -> tuple[Row, Row]:
    """Returns the rows of query, key and value; Megatron stacks them by group: query heads, key head, value head."""
    query = Tensor(theirs, dims(f"heads*head_dim{inputs}"), slots=Slots(0, queries, queries + 2))
    key_value = tuple(
        Tensor(theirs, dims(f"kv_heads*head_dim{inputs}"), ("kv", i), Slots(queries + i, 1, queries + 2))
        for i in range(2)
    )
    return Row(f"{ours}.query.{kind}", (query,)), Row(f"{ours}.key_value.{kind}", key_value)


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return row(f"{ours}.scale", f"{theirs}weight", "embed"), row(f"{ours}.bias", f"{theirs}bias", "embed")


def _bert() -> tuple[Row, ...]:
    """Returns the rows of a BERT outside its layers."""
    return (
        row("token_types", "language_model.embedding.tokentype_embeddings.weight", "token_types embed"),
        *linear("head.dense", "lm_head.dense", "embed", "features"),
        *norm("head.norm", "lm_head.layernorm"),
        row("head.bias", "lm_head.bias", "vocab"),
        *linear("order.pooler", "language_model.pooler.dense", "embed", "features"),
        *linear("order.classifier", "binary_head", "embed", "classes"),
    )
