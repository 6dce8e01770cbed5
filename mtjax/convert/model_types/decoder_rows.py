"""Rows of a decoder's table, from transformers' names of its modules and the model's settings."""

from dataclasses import dataclass, replace
from typing import Literal

from mtjax.config import Model
from mtjax.config.sizes import head_dim, num_kv_heads
from mtjax.convert.model_types.rows import linear, norm, row, stacked
from mtjax.convert.table import Row, Slots, Table, Tensor, dims
from mtjax.layout.stacks import DENSE

LAYERS = "stack.layers"
BUFFERS = (r".*\.rotary_emb\.inv_freq", r".*\.masked_bias", r"(.*\.)?h\.\d+\.attn\.bias", r".*\.attention\.bias")
"""Tensors of old files that are not weights: frequencies and causal masks."""

Order = tuple[str, tuple[int, ...]] | None


@dataclass(frozen=True)
class ModuleNames:
    """transformers' names of a decoder's modules; the defaults are Llama's. An empty name: the type has no such."""

    prefix: str = "model."
    """Of all modules but the output; a bare model has none."""
    embedding: str = "embed_tokens"
    positions: str = ""
    positions_skip: int = 0
    """Rows before that of position 0, which have no effect."""
    embedding_norm: str = ""
    final_norm: str = "norm"
    output: str = "lm_head"
    """Without prefix."""
    layer: str = "layers.{layer}"
    attention: str = "self_attn"
    """In a layer, as all norms and `mlp`; the names up to `sinks` are in it."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    attention_output: str = "o_proj"
    qkv: str = ""
    """One tensor for query, key and value."""
    qkv_order: Literal["parts", "groups"] = "parts"
    """The order of its rows: all query heads, all key heads, all value heads; or each group's query heads, its key, its
    value."""
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    mlp: str = "mlp"
    """The names below are in it; it may be empty."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""
    """One tensor for gate and up, in this order."""
    interleaved: bool = False
    """Whether RoPE rotates neighbouring channels, where mtjax rotates a channel and that half of the rotated ones
    later."""

    @property
    def block(self) -> str:
        """The prefix of a layer's modules."""
        return f"{self.prefix}{self.layer}."

    def in_mlp(self, name: str) -> str:
        """Returns the full name of a module of the MLP."""
        return self.block + (f"{self.mlp}.{name}" if self.mlp else name)

    def in_attention(self, name: str) -> str:
        """Returns the full name of a module of attention."""
        return f"{self.block}{self.attention}.{name}"

    def table(self, model_type: str) -> Table:
        """Returns the table without rows, for the names that do not depend on the model."""
        output, embedding = f"{self.output}.weight", f"{self.prefix}{self.embedding}.weight"
        return Table(f"Hugging Face's {model_type}", (), self.prefix, ignored=BUFFERS, copies={output: embedding})


def decoder_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder without experts."""
    return *outside_rows(names), *attention_rows(names, model), *mlp_rows(names)


def outside_rows(names: ModuleNames) -> tuple[Row, ...]:
    """Returns the rows outside the layers."""
    return (
        row("embedding", f"{names.prefix}{names.embedding}.weight", "vocab embed"),
        *_positions(names),
        # `Table.select` leaves out rows of what a model lacks, so types need not say what they don't have.
        *norm("embedding_norm", names.prefix + names.embedding_norm),
        *norm("final_norm", names.prefix + names.final_norm),
        row("output", f"{names.output}.weight", "vocab embed"),
        row("output_bias", f"{names.output}.bias", "vocab"),
        # transformers' classifiers of all decoders have this name.
        row("head.classifier.weight", "score.weight", "classes embed"),
    )


def _positions(names: ModuleNames) -> tuple[Row, ...]:
    name = f"{names.prefix}{names.positions}.weight"
    return (Row("positions", (Tensor(name, dims("positions embed"), skip=names.positions_skip),)),)


def attention_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of attention, with its norms."""
    ours = f"{LAYERS}.attention"
    return (
        *norm(f"{LAYERS}.attention_norm", names.block + names.attention_norm),
        *norm(f"{LAYERS}.attention_output_norm", names.block + names.attention_output_norm),
        *(_fused(names, model) if names.qkv else _separate(names, model)),
        *_head_norms(names, model),
        row(f"{ours}.sinks", names.in_attention(names.sinks), "heads"),
        *linear(f"{ours}.output", names.in_attention(names.attention_output), "heads*head_dim", "embed"),
    )


def mlp_rows(names: ModuleNames) -> tuple[Row, ...]:
    """Returns the rows of the MLP, gated or not, with its norms."""
    ours = f"{LAYERS}.mlp"
    gate_up = tuple(names.in_mlp(name) for name in (names.gate, names.up))
    return (
        *norm(f"{LAYERS}.mlp_norm", names.block + names.mlp_norm),
        *norm(f"{LAYERS}.mlp_output_norm", names.block + names.mlp_output_norm),
        *linear(f"{ours}.up", names.in_mlp(names.up), "embed", "mlp"),
        *(
            linear(f"{ours}.up", names.in_mlp(names.gate_up), "embed", "gate*mlp")
            if names.gate_up
            else stacked(f"{ours}.up", "gate", gate_up, "embed", "mlp")
        ),
        *linear(f"{ours}.down", names.in_mlp(names.down), "mlp", "embed"),
    )


def in_dense_layers(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns the rows of the dense layers of a model with experts, which are a stack of their own."""
    return tuple(replace(of, ours=of.ours.replace(LAYERS, f"{DENSE}.layers", 1)) for of in rows)


def rotation_order(names: ModuleNames, model: Model) -> Order:
    """Returns the order of a head's channels in transformers' query and key; None for mtjax's own.

    transformers rotates channels 2i and 2i + 1 together; mtjax rotates i and i + rotated / 2.
    """
    if not names.interleaved or model.position != "rope":
        return None
    width = head_dim(model)
    rotated = int(width * model.rope_fraction + 1e-6)  # a fraction such as 0.29 of 100 is 28.999...
    # The file's channel for each of mtjax's: first the even ones, then the odd ones, then those that are not rotated.
    return "head_dim", (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width))


def _separate(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of query, key and value in three tensors."""
    ours, order = f"{LAYERS}.attention.qkv", rotation_order(names, model)
    query, key, value = (names.in_attention(name) for name in (names.query, names.key, names.value))
    rows = []
    for kind, inputs in (("weight", " embed"), ("bias", "")):

        def tensor(
            name: str,
            heads: str,
            part: tuple[str, int] | None = None,
            order: Order = order,
            kind: str = kind,
            inputs: str = inputs,
        ) -> Tensor:
            return Tensor(f"{name}.{kind}", dims(f"{heads}*head_dim{inputs}"), part, order=order)

        # Values are not rotated, so their order is None.
        of_all = (tensor(query, "heads", ("qkv", 0)), tensor(key, "heads", ("qkv", 1)))
        rows += [
            Row(f"{ours}.{kind}", (*of_all, tensor(value, "heads", ("qkv", 2), None))),
            Row(f"{ours}.query.{kind}", (tensor(query, "heads"),)),
            Row(
                f"{ours}.key_value.{kind}",
                (tensor(key, "kv_heads", ("kv", 0)), tensor(value, "kv_heads", ("kv", 1), None)),
            ),
        ]
    return tuple(rows)


def _fused(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of query, key and value in one tensor."""
    heads, keys = model.num_heads, num_kv_heads(model)
    is_grouped = names.qkv_order == "groups"
    # By parts, the whole tensor is one group.
    queries, shared = (heads // keys, 1) if is_grouped else (heads, keys)
    total = queries + 2 * shared
    ours, name = f"{LAYERS}.attention.qkv", names.in_attention(names.qkv)
    rows = []
    for kind, inputs in (("weight", " embed"), ("bias", "")):
        whole = dims(("heads*qkv*head_dim" if is_grouped else "qkv*heads*head_dim") + inputs)
        query = Tensor(f"{name}.{kind}", dims(f"heads*head_dim{inputs}"), slots=Slots(0, queries, total))
        key_value = tuple(
            Tensor(
                f"{name}.{kind}",
                dims(f"kv_heads*head_dim{inputs}"),
                ("kv", i),
                Slots(queries + i * shared, shared, total),
            )
            for i in range(2)
        )
        rows += [
            Row(f"{ours}.{kind}", (Tensor(f"{name}.{kind}", whole),)),
            Row(f"{ours}.query.{kind}", (query,)),
            Row(f"{ours}.key_value.{kind}", key_value),
        ]
    return tuple(rows)


def _head_norms(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of the norms of queries and keys; `{head}` in a name is one tensor for each head."""
    order, rows = rotation_order(names, model), []
    for kind, theirs, axis, count in (
        ("query", names.query_norm, "heads", model.num_heads),
        ("key", names.key_norm, "kv_heads", num_kv_heads(model)),
    ):
        for ours, name in (("scale", "weight"), ("bias", "bias")):
            full = f"{names.in_attention(theirs)}.{name}"
            if "{head}" in full:
                each = (full.replace("{head}", str(i)) for i in range(count))
                tensors = tuple(Tensor(one, dims("head_dim"), (axis, i), order=order) for i, one in enumerate(each))
            else:
                shape = {"head": "head_dim", "each_head": f"{axis} head_dim", "width": f"{axis}*head_dim"}
                # The weights of a norm are in the order of the channels that it multiplies: those of the rotated ones
                # are permuted alike.
                tensors = (Tensor(full, dims(shape[model.qk_norm_scope]), order=order),)
            rows.append(Row(f"{LAYERS}.attention.{kind}_norm.{ours}", tensors))
    return tuple(rows)
