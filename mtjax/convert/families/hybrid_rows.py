"""Rows of hybrid models: Mamba-2 layers, and a stack for each kind of layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.ssm import ssm_heads
from mtjax.convert.families.decoder_rows import LAYERS, Names, attention_rows, mlp_rows, outside_rows
from mtjax.convert.families.rows import linear, norm, row
from mtjax.convert.table import Dims, Row, Rows, Tensor, dims


def mamba_rows(model: Model, name: str, norm_name: str) -> tuple[Row, ...]:
    """Returns the rows of Mamba-2 layers, of which transformers keeps the parts of a product in one tensor.

    Args:
      model: the model.
      name: full name of the mixer.
      norm_name: full name of its norm.
    """
    ours, inner = "mamba.layers.mamba", ssm_heads(model) * model.ssm_head_dim
    shared = model.ssm_groups * model.ssm_state
    heads, groups_ = ("heads", "head_dim"), ("groups", "state")

    def parts(theirs: str, of: int, first: int, part: str, group: tuple[str, ...], width: int, rest: Dims) -> list[Any]:
        return [
            Tensor(f"{name}.{theirs}", (group, *rest), (part, i), rows=Rows(first + i * width, of)) for i in range(2)
        ]

    total, channels, embed = 2 * inner + 2 * shared + ssm_heads(model), inner + 2 * shared, (("embed",),)
    rates = Tensor(f"{name}.in_proj.weight", dims("heads embed"), rows=Rows(2 * (inner + shared), total))
    gate_value = parts("in_proj.weight", total, 0, "gate", heads, inner, embed)
    b_c = parts("in_proj.weight", total, 2 * inner, "kv", groups_, shared, embed)
    rows = [
        Row(f"{ours}.inputs.gate_value", tuple(gate_value)),
        Row(f"{ours}.inputs.b_c", tuple(b_c)),
        Row(f"{ours}.inputs.rate", (rates,)),
    ]
    # torch's convolution is [channels, 1, taps].
    convolution: tuple[tuple[str, str, Dims], ...] = (("weight", "", ((), ("taps",))), ("bias", "_bias", ()))
    for kind, ending, rest in convolution:
        value = Tensor(f"{name}.conv1d.{kind}", (heads, *rest), rows=Rows(0, channels))
        b_c = parts(f"conv1d.{kind}", channels, inner, "kv", groups_, shared, rest)
        rows += [Row(f"{ours}.conv{ending}", (value,)), Row(f"{ours}.conv_b_c{ending}", tuple(b_c))]
    return (
        *norm("mamba.layers.mamba_norm", norm_name),
        *rows,
        row(f"{ours}.rate_bias", f"{name}.dt_bias", "heads"),
        row(f"{ours}.a_log", f"{name}.A_log", "heads"),
        row(f"{ours}.skip", f"{name}.D", "heads"),
        row(f"{ours}.norm_scale", f"{name}.norm.weight", "heads*head_dim"),
        *linear(f"{ours}.output", f"{name}.out_proj", "heads*head_dim", "embed"),
    )


def _own_stacks(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Renames the rows of a transformer's layers: each mixer has its own stack."""

    def renamed(ours: str) -> str:
        if not ours.startswith(f"{LAYERS}."):
            return ours
        rest = ours.removeprefix(f"{LAYERS}.")
        return f"{rest.split('.')[0].removesuffix('_norm')}.layers.{rest}"

    return tuple(replace(of, ours=renamed(of.ours)) for of in rows)


def hybrid_rows(mixer: str, experts: Callable[[Names], tuple[Row, ...]] = lambda names: ()) -> Any:
    """Returns a function for a type's rows; `mixer` is the name of Mamba-2 in a layer."""

    def rows(names: Names, model: Model) -> tuple[Row, ...]:
        own = (*attention_rows(names, model), *mlp_rows(names), *experts(names))
        mamba = mamba_rows(model, names.block + mixer, names.block + names.attention_norm)
        return (*outside_rows(names), *_own_stacks(own), *mamba)

    return rows
