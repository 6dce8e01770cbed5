"""Gated delta nets and gated attention of Megatron-Core's hybrid models: names and order of rows."""

from functools import partial

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.config.ssm import ssm_groups, ssm_heads
from mtjax.convert.model_types.rows import row
from mtjax.convert.table import Dims, Row, Slots, Tensor, dims
from mtjax.families.hybrid.hugging_face.hybrid_rows import GROUPS, INNER, stacked


def delta_rows(model: Model, name: str, *, is_split: bool) -> tuple[Row, ...]:
    """Returns the rows of gated delta nets.

    Args:
      model: the model.
      name: full name of the module in a layer.
      is_split: whether the parts of a product are separate tensors, NAME.query and so on, and not one.
    """
    ours, heads = "delta.layers.delta", ssm_heads(model)
    keys, values = (GROUPS, ssm_groups(model) * model.ssm_state), (INNER, heads * model.ssm_head_dim)
    logits = (("heads",), heads)
    # Whole parts one after the other, unlike transformers' order by groups of heads.
    parts = {"query": keys, "key": keys, "value": values, "z": values, "beta": logits, "alpha": logits}
    embed: Dims = (("embed",),)
    product = partial(stacked, parts, name, is_split, "in_proj.weight", "query key value z beta alpha", rest=embed)
    # torch's convolution is [channels, 1, taps].
    channels = partial(stacked, parts, name, is_split, "conv1d.weight", "query key value", rest=((), ("taps",)))
    gate_value, query_key = ("z", "value"), ("query", "key")
    return (
        row("delta.layers.delta_norm.scale", f"{name}.in_proj.layer_norm_weight", "embed"),
        Row(f"{ours}.inputs.gate_value", tuple(product(of, index=("gate", i)) for i, of in enumerate(gate_value))),
        Row(f"{ours}.inputs.query_key", tuple(product(of, index=("kv", i)) for i, of in enumerate(query_key))),
        Row(f"{ours}.inputs.beta", (product("beta"),)),
        Row(f"{ours}.inputs.rate", (product("alpha"),)),
        Row(f"{ours}.conv", (channels("value"),)),
        Row(f"{ours}.conv_query_key", tuple(channels(of, index=("kv", i)) for i, of in enumerate(query_key))),
        row(f"{ours}.rate_bias", f"{name}.dt_bias", "heads"),
        row(f"{ours}.a_log", f"{name}.A_log", "heads"),
        row(f"{ours}.norm_scale", f"{name}.out_norm.weight", "head_dim"),
        row(f"{ours}.output.weight", f"{name}.out_proj.weight", "embed heads*head_dim"),
    )


def gated_attention_rows(model: Model, ours: str, theirs: str) -> tuple[Row, ...]:
    """Returns the rows of attention's first product with gates: of each group query heads, their gates, a key head and
    a value head.

    Args:
      model: the model.
      ours: name of the attention in a stack.
      theirs: name of the product.
    """
    found = (_gated_rows(model, ours, theirs, kind, inputs) for kind, inputs in (("weight", " embed"), ("bias", "")))
    return tuple(of for rows in found for of in rows)


def _gated_rows(model: Model, ours: str, theirs: str, kind: str, inputs: str) -> tuple[Row, ...]:
    queries = model.num_heads // num_kv_heads(model)

    def heads(first: int, count: int, axis: str = "heads", index: tuple[str, int] | None = None) -> Tensor:
        slots = Slots(first, count, 2 * queries + 2)
        return Tensor(f"{theirs}.{kind}", dims(f"{axis}*head_dim{inputs}"), index, slots)

    firsts = (0, 2 * queries, 2 * queries + 1)
    key_value = tuple(heads(first, 1, "kv_heads", ("kv", i)) for i, first in enumerate(firsts[1:]))
    return (
        Row(f"{ours}.qkv.{kind}", tuple(heads(first, 1, index=("qkv", i)) for i, first in enumerate(firsts))),
        Row(f"{ours}.qkv.query.{kind}", (heads(0, queries),)),
        Row(f"{ours}.qkv.key_value.{kind}", key_value),
        Row(f"{ours}.gate.{kind}", (heads(queries, queries),)),
    )
