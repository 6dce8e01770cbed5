"""Products of activations with weights over named dimensions: column-parallel and row-parallel linear layers."""

import string
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Float

from mtjax.models.saved_names import SAVED, is_unrolled
from mtjax.sharding.axes import (
    PartitionSpec,
    merge_both,
    sequence_is_sharded,
    spec,
    varying_like,
    width_is_sharded,
)


class ProductRule(Protocol):
    """Computes a product, and its gradients, in the place of `product`."""

    gathers_sequence: bool
    """Whether it gathers the sequences of its input itself, in fewer bits, where sequence parallelism shards them."""

    def __call__(self, dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Any, /) -> Array:
        """Computes `x W`; arguments as of `product`; the weight may be a `QuantizedWeight`."""
        ...


def project(
    x: Float[Array, "batch seq ..."],
    weight: Any,
    bias: Array | None,
    outputs: Sequence[str | None],
    sequence: str = "seq",
    *,
    save_for_backward: bool = True,
    by_sample: bool = False,
    rule: ProductRule | None = None,
) -> Float[Array, "batch seq ..."]:
    """Computes `x W + b`, [batch, seq, *outputs], in the type of x, [batch, seq, *inputs].

    Args:
      weight: [*inputs, *outputs]: an array; a `StoredWeight`, without gradients; or a `QuantizedWeight`, for a `rule`.
      outputs: logical names.
      sequence: logical name of the result's sequence: "act_seq" where it is added to the hidden states.
      save_for_backward: whether layers that save their products save this one; else it is recomputed.
      by_sample: whether it is saved batch-major, for consumers that read it sample by sample, such as attention.
      rule: computes the product, and its gradients, in the place of `product`; for example in 8 bits.
    """
    if is_unrolled() and isinstance(weight, Array):
        from mtjax.models.project_apart import computes_apart, project_apart

        if computes_apart(outputs):
            return project_apart(x, weight, bias, outputs, sequence, save_for_backward, by_sample)
    num_inputs = weight.ndim - len(outputs)
    if is_seq_major := sequence_is_sharded():
        x, sharding = seq_major(x), spec(sequence, "batch", *outputs)
    else:
        splits_width = width_is_sharded() and sequence == "act_seq"
        sharding = spec("batch", sequence, *(("act_embed",) if splits_width else outputs))
        if splits_width and bias is not None:
            from mtjax.models.width import own_width

            bias = own_width(varying_like(bias, x))
    scales = None
    if not isinstance(weight, Array) and _is_stored(weight):
        result, scales = weight.product(x, num_inputs, sharding), weight.scales
    else:
        # `product` is a custom_vjp, and its weight's gradient varies over mesh axes like x: so must the weight.
        dims = einsum_letters(x.ndim - num_inputs, num_inputs, len(outputs))
        # Unrolled layers: `product` casts the weight itself, and computes its gradient in the weight's type, in which
        # it is reduced.
        operand = weight if is_unrolled() and rule is None else weight.astype(x.dtype)
        result: Any = (rule or product)(dims, sharding, x, jax.tree.map(lambda a: varying_like(a, x), operand))
    # The name is given before or after the transpose back. XLA: it would transpose the stacks of saved products
    # if these were seq-major and their consumer batch-major.
    if save_for_backward and not by_sample:
        result = checkpoint_name(result, SAVED)
    if is_seq_major:
        result = seq_major(result)
    if save_for_backward and by_sample:
        result = checkpoint_name(result, SAVED)
    if bias is None and scales is None:
        return result
    # In float32, so that the bias' gradient is summed over tokens, and reduced over the mesh, in float32.
    wide = result.astype(jnp.float32) if scales is None else result.astype(jnp.float32) * scales
    return (wide if bias is None else wide + bias).astype(x.dtype)


def _is_stored(weight: Any) -> bool:
    """Returns whether a weight computes its products itself, whatever the rule, as those of generation do."""
    from mtjax.sharding.stored_weight import StoredWeight

    return isinstance(weight, StoredWeight)


def einsum_letters(*dimensions: int) -> tuple[str, ...]:
    """Returns disjoint einsum letters for groups of so many dimensions."""
    letters = iter(string.ascii_lowercase)
    return tuple("".join(next(letters) for _ in range(n)) for n in dimensions)


def reshard_sequence(x: Float[Array, "batch seq embed"], sequence: str) -> Float[Array, "batch seq embed"]:
    """Reshards the sequences of hidden states: "seq" all-gathers them, "act_seq" shards them (sequence parallelism)."""
    if not sequence_is_sharded():
        return reshard(x, spec("batch", sequence, "embed"))
    return seq_major(reshard(seq_major(x), spec(sequence, "batch", "embed")))


def gather_sequence(
    x: Float[Array, "batch act_seq embed"], rule: ProductRule | None
) -> Float[Array, "batch any_seq embed"]:
    """All-gathers sequences for a column-parallel product, unless its rule does."""
    return x if rule is not None and rule.gathers_sequence else reshard_sequence(x, "seq")


def seq_major(x: Float[Array, "batch seq ..."]) -> Float[Array, "seq batch ..."]:
    """Swaps batch and sequence, either way: for products whose sequences are all-gathered before or reduce-scattered
    after them."""
    # XLA: on GPUs, the sharded dimension of a collective must be outermost. Of batch-major arrays it would transpose
    # the gathered sequences of all ranks; here a rank transposes its shard before it is sent.
    return jnp.swapaxes(x, 0, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Array) -> Array:
    """Computes `x W` in the type of x; the gradient of W is computed in the type of W.

    `dims` are (row, inner, outer), einsum letters: x is [row, inner] and W [inner, outer], each letter a dimension.
    """
    # XLA: a custom vjp, because autodiff computes the weight's gradient as the transpose of (gradient)' x, which takes
    # twice as long on CPUs as x' (gradient).
    row, inner, outer = dims
    weight = weight.astype(x.dtype)
    return jnp.einsum(f"{row}{inner},{inner}{outer}->{row}{outer}", x, weight, out_sharding=sharding)


def _product_forward(
    dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return product(dims, sharding, x, weight), (x, weight)


def _product_backward(
    dims: tuple[str, ...], _: PartitionSpec, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """Computes `dx = g W'` and `dW = x' g`, in the shapes and shardings of x and W, from g [row, outer]."""
    row, inner, outer = dims
    x, weight = saved[0], saved[1].astype(saved[0].dtype)
    x_spec, weight_spec = (jax.typeof(a).sharding.spec for a in saved)
    # With sequence parallelism, the gradient of a row-parallel product is sharded along the sequence. It is
    # all-gathered once for both products. XLA: it may gather it for each of them, as it does where a microbatch is one
    # sample.
    gradient = reshard(gradient, PartitionSpec(*x_spec[: len(row)], *weight_spec[len(inner) :]))
    # XLA: on CPUs, it copies an operand into another order for a product over several dimensions, so they are merged.
    outer, gradient, weight = merge_both(outer, (gradient, len(row)), (weight, len(inner)))
    x_gradient = jnp.einsum(f"{row}{outer},{inner}{outer}->{row}{inner}", gradient, weight, out_sharding=x_spec)
    inner, x, weight = merge_both(inner, (x, len(row)), (weight, 0))
    row, x, gradient = merge_both(row, (x, 0), (gradient, 0))
    merged_spec = jax.typeof(weight).sharding.spec
    letters, in_type = f"{row}{inner},{row}{outer}->{inner}{outer}", saved[1].dtype
    weight_gradient = jnp.einsum(letters, x, gradient, out_sharding=merged_spec, preferred_element_type=in_type)
    return x_gradient, weight_gradient.reshape(saved[1].shape, out_sharding=weight_spec)


product.defvjp(_product_forward, _product_backward)
