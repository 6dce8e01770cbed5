"""Rows of hybrid models: Mamba-2 layers, and a stack for each kind of layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mtjax.config import Model
from mtjax.config.ssm import ssm_groups, ssm_heads
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames, attention_rows, mlp_rows, outside_rows
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Dims, Row, Rows, Tensor

GROUPS, INNER = ("groups", "state"), ("heads", "head_dim")
_PARTS: Mapping[str, tuple[str, ...]] = {"z": INNER, "x": INNER, "B": GROUPS, "C": GROUPS, "dt": ("heads",)}
"""Parts of the first product, of which the convolution has x, B and C -> mtjax's dimensions of their rows."""


def stacked(
    parts: Mapping[str, tuple[tuple[str, ...], int]],
    name: str,
    is_split: bool,
    theirs: str,
    order: str,
    part: str,
    rest: Dims,
    index: tuple[str, int] | None = None,
) -> Tensor:
    """Returns a part of a tensor that has parts of different widths, one after the other.

    Args:
      parts: part -> mtjax's dimensions of its rows, and their number.
      name: full name of the mixer.
      is_split: whether the parts are separate tensors, NAME.z and so on.
      theirs: the tensor within the mixer.
      order: its parts, separated by spaces.
      part: the part to return.
      rest: dimensions after the rows.
      index: a dimension of the parameter, and the index of it that the part is.
    """
    shape: Dims = (parts[part][0], *rest)
    if is_split:
        return Tensor(f"{name}.{theirs}.{part}", shape, index)
    names = order.split()
    first = sum(parts[other][1] for other in names[: names.index(part)])
    rows = Rows(first, parts[part][1], sum(parts[other][1] for other in names))
    return Tensor(f"{name}.{theirs}", shape, index, rows=rows)


def mamba_rows(model: Model, name: str, *, is_split: bool = False, stack: str = "mamba") -> tuple[Row, ...]:
    """Returns the rows of Mamba-2 layers but their norm.

    Args:
      model: the model.
      name: full name of the mixer.
      stack: the stack of the layers that have Mamba-2.
      is_split: whether the parts of a product are separate tensors, NAME.z and so on, and not one.
    """
    ours, inner = f"{stack}.layers.mamba", ssm_heads(model) * model.ssm_head_dim
    shared = ssm_groups(model) * model.ssm_state
    widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": ssm_heads(model)}
    part = partial(stacked, {part: (_PARTS[part], width) for part, width in widths.items()}, name, is_split)
    product = partial(part, "in_proj.weight", "z x B C dt", rest=(("embed",),))
    rows = [
        Row(f"{ours}.inputs.gate_value", tuple(product(of, index=("gate", i)) for i, of in enumerate("zx"))),
        # B and C have a parameter of their own: all heads of a group share them, so they are sharded differently.
        Row(f"{ours}.inputs.b_c", tuple(product(of, index=("kv", i)) for i, of in enumerate("BC"))),
        Row(f"{ours}.inputs.rate", (product("dt"),)),
    ]
    # torch's convolution is [channels, 1, taps].
    convolution: tuple[tuple[str, str, Dims], ...] = (("weight", "", ((), ("taps",))), ("bias", "_bias", ()))
    for kind, ending, rest in convolution:
        channels = partial(part, f"conv1d.{kind}", "x B C", rest=rest)
        b_c = tuple(channels(of, index=("kv", i)) for i, of in enumerate("BC"))
        rows += [Row(f"{ours}.conv{ending}", (channels("x"),)), Row(f"{ours}.conv_b_c{ending}", b_c)]
    return (
        *rows,
        row(f"{ours}.rate_bias", f"{name}.dt_bias", "heads"),
        row(f"{ours}.a_log", f"{name}.A_log", "heads"),
        row(f"{ours}.skip", f"{name}.D", "heads"),
        row(f"{ours}.norm_scale", f"{name}.norm.weight", "heads*head_dim"),
        *linear(f"{ours}.output", f"{name}.out_proj", "heads*head_dim", "embed"),
    )


def own_stacks(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Renames the rows of a transformer's layers: each mixer has its own stack."""

    def renamed(ours: str) -> str:
        if not ours.startswith(f"{LAYERS}."):
            return ours
        rest = ours.removeprefix(f"{LAYERS}.")
        # A norm belongs to the stack of its mixer: attention_norm to attention.
        return f"{rest.split('.')[0].removesuffix('_norm')}.layers.{rest}"

    return tuple(replace(of, ours=renamed(of.ours)) for of in rows)


def hybrid_rows(
    mixer: str, experts: Callable[[ModuleNames], tuple[Row, ...]] = lambda names: (), stack: str = "mamba"
) -> Any:
    """Returns a function for a type's rows; `mixer` is the name of Mamba-2 in a layer, `stack` that of the layers with
    Mamba-2, which in another stack than mamba have attention, too."""

    def rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
        own = (*attention_rows(names, model), *mlp_rows(names), *experts(names))
        mamba = mamba_rows(model, names.block + mixer, stack=stack)
        mamba_norm = norm(f"{stack}.layers.mamba_norm", names.block + names.attention_norm)
        rows = own_stacks(own)
        if stack != "mamba":
            rows = tuple(replace(of, ours=of.ours.replace("attention.layers", f"{stack}.layers", 1)) for of in rows)
        return (*outside_rows(names), *rows, *mamba_norm, *mamba)

    return rows
