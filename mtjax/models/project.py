"""Products of activations with weights over named dimensions, split over the mesh."""

import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float

from mtjax.models.recompute import PRODUCT
from mtjax.models.transposed_weight import TransposedWeight
from mtjax.sharding.axes import merge, sequence_is_sharded, spec, varying_like
from mtjax.sharding.int8 import Int8Matrix


def project(
    x: Float[Array, "batch seq ..."],
    weight: Array | Int8Matrix | TransposedWeight,
    bias: Array | None,
    outputs: Sequence[str | None],
    sequence: str = "seq",
    *,
    save_for_backward: bool = True,
    by_sample: bool = False,
) -> Float[Array, "batch seq ..."]:
    """`x W + b` in the type of x.

    Args:
      x: [batch, seq, *inputs].
      weight: [*inputs, *outputs]; in 8 bits or turned for products that are not differentiated.
      bias: [*outputs], if any.
      outputs: logical names.
      sequence: logical name of the result's sequence: "act_seq" where it enters the residual stream.
      is_kept: whether layers that save their products save this one; else it is computed again, where it is needed.
      by_sample: whether it is read sample by sample, as attention does, and so saved; else XLA would turn stacks of it.
    """
    letters = iter(string.ascii_lowercase)
    num_inputs = weight.ndim - len(outputs)
    row, inner, outer = (
        "".join(next(letters) for _ in range(n)) for n in (x.ndim - num_inputs, num_inputs, len(outputs))
    )
    if split := sequence_is_sharded():
        x, place = seq_major(x), spec(sequence, "batch", *outputs)
    else:
        place = spec("batch", sequence, *outputs)
    is_int8 = isinstance(weight, Int8Matrix)
    if isinstance(weight, TransposedWeight):
        product: Any = weight.product(x, num_inputs, place)
    else:
        matrix = weight.values if is_int8 else weight
        product = _product((row, inner, outer), place, x, varying_like(matrix.astype(x.dtype), x))
    if save_for_backward and not by_sample:
        product = checkpoint_name(product, PRODUCT)
    if split:
        product = seq_major(product)
    if save_for_backward and by_sample:
        product = checkpoint_name(product, PRODUCT)
    if bias is None and not is_int8:
        return product
    # In float32, so that the bias' gradient is summed over tokens, and over the mesh, in float32.
    wide = product.astype(jnp.float32) * weight.scales if is_int8 else product.astype(jnp.float32)
    return (wide if bias is None else wide + bias).astype(x.dtype)


def reshard_sequence(x: Float[Array, "batch seq embed"], sequence: str) -> Float[Array, "batch seq embed"]:
    """The residual stream with sequences placed as the logical name says: whole for "seq", split for "act_seq"."""
    if not sequence_is_sharded():
        return reshard(x, spec("batch", sequence, "embed"))
    return seq_major(reshard(seq_major(x), spec(sequence, "batch", "embed")))


def seq_major(x: Float[Array, "one another ..."]) -> Float[Array, "another one ..."]:
    """Sequence first and batch second, or back: for products beside which split sequences are gathered or scattered.

    GPUs send arrays whose outermost dimension is the one that is split. Of several samples XLA would transpose the
    sequences of all ranks; here it transposes what a rank has of them, before it sends.
    """
    return jnp.swapaxes(x, 0, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array) -> Array:
    """`x W` with x [row, inner] and W [inner, outer], each letter of `dims` a dimension.

    Autodiff would get the weight's gradient as the transpose of (gradient)' x, which XLA computes on CPUs in twice the
    time that x' (gradient) takes.
    """
    row, inner, outer = dims
    return jnp.einsum(f"{row}{inner},{inner}{outer}->{row}{outer}", x, weight, out_sharding=place)


def _product_forward(
    dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _product(dims, place, x, weight), (x, weight)


def _product_backward(
    dims: tuple[str, str, str], _: PartitionSpec, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    row, inner, outer = dims
    x, weight = saved
    x_spec, weight_spec = (jax.typeof(a).sharding.spec for a in saved)
    # A row-parallel product's is split along the sequence. Gathered once for both products below: left to XLA, each may
    # gather it on its own, as they do where a microbatch is one sample.
    gradient = reshard(gradient, PartitionSpec(*x_spec[: len(row)], *weight_spec[len(inner) :]))
    # Over several dimensions XLA would copy an operand into another order first, on CPUs.
    outer, gradient, weight = _merged(outer, (gradient, len(row)), (weight, len(inner)))
    x_gradient = jnp.einsum(f"{row}{outer},{inner}{outer}->{row}{inner}", gradient, weight, out_sharding=x_spec)
    inner, x, weight = _merged(inner, (x, len(row)), (weight, 0))
    row, x, gradient = _merged(row, (x, 0), (gradient, 0))
    merged_spec = jax.typeof(weight).sharding.spec
    weight_gradient = jnp.einsum(f"{row}{inner},{row}{outer}->{inner}{outer}", x, gradient, out_sharding=merged_spec)
    return x_gradient, weight_gradient.reshape(saved[1].shape, out_sharding=weight_spec)


def _merged(dims: str, left: tuple[Array, int], right: tuple[Array, int]) -> tuple[str, Array, Array]:
    """Merges the dimensions `dims`, which each of two arrays has from the given position on, into one.

    Nothing changes if an array is split along any but the first of them.
    """
    first, second = (merge(a, start, start + len(dims)) for a, start in (left, right))
    if first is None or second is None:
        return dims, left[0], right[0]
    return dims[0], first, second


_product.defvjp(_product_forward, _product_backward)
