"""Vocabulary-parallel embedding (section 3 of the paper): a lookup in a table whose rows are sharded over `model`.

Shape suffixes: B batch, S sequence, H hidden, V this rank's vocabulary rows.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float, Int

from mtjax.sharding.axes import map_ranks, psum_varying, varying_like
from mtjax.sharding.vocab import VocabSpecs, local_rows

if TYPE_CHECKING:
    from mtjax.sharding.stored_weight import StoredWeight


def vocab_parallel_embedding(
    table: "Array | StoredWeight", tokens: Int[Array, "batch seq"], dtype: jax.typing.DTypeLike
) -> Float[Array, "batch act_seq embed"]:
    """Looks up rows of a table whose rows are sharded.

    Communication: one all-reduce over `model`, or with sequence parallelism one reduce-scatter.

    Args:
      table: [vocab, embed], float32; or stored in another form, which has no gradient.
      tokens: ids in [0, vocab); other ids give zeros.
      dtype: type of the result and of the communication.

    Returns:
      [batch, act_seq, embed], sharded like hidden states.
    """
    specs, dtype = VocabSpecs.in_force(), jnp.dtype(dtype)
    if not isinstance(table, Array):
        with jax.named_scope("embedding"):
            return table.rows(specs, tokens, dtype)
    return _embedding(specs, dtype, table, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embedding(specs: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> Array:
    """Looks up rows of a float32 table: [batch, seq] -> [batch, act_seq, embed]."""

    def local(table_VH: Array, tokens_BS: Array) -> Array:
        row, owned = local_rows(specs, tokens_BS, table_VH.shape[0])
        # Exactly one rank has a token's row, the others contribute zeros to the reduction.
        vectors = jnp.where(owned[..., None], table_VH[row].astype(dtype), 0)
        return specs.sum_into_residual(vectors)

    with jax.named_scope("embedding"):
        return map_ranks(local, (specs.table, specs.tokens), specs.hidden)(table, tokens)


def _embedding_forward(specs: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> tuple[Array, Any]:
    return _embedding(specs, dtype, table, tokens), (table, tokens)


def _embedding_backward(specs: VocabSpecs, dtype: jnp.dtype, saved: Any, gradient: Array) -> tuple[Array, None]:
    """Scatter-adds the gradient to the rows of the table, in float32.

    Args:
      specs: shardings.
      dtype: of the embedding's result.
      saved: table [vocab, embed] and tokens [batch, seq].
      gradient: [batch, act_seq, embed]; all-gathered along the sequence with sequence parallelism.

    Returns:
      The table's gradient, [vocab, embed].
    """

    def local(table_VH: Array, tokens_BS: Array, gradient_BSH: Array) -> Array:
        """Computes the gradient of this rank's rows, inside the map."""
        gradient_BSH = specs.gather_sequence(gradient_BSH)
        rows, width = table_VH.shape
        row, owned = local_rows(specs, tokens_BS, rows)
        row = jnp.where(owned, row, rows)  # one past the end: dropped by the scatter
        flat = gradient_BSH.reshape(-1, width).astype(jnp.float32)
        # XLA: constant zeros would be allocated at the beginning of the step. These depend on the gradient.
        late_zero = 0 * jnp.abs(flat[0, 0])
        zeros = varying_like(jnp.full((rows, width), late_zero), table_VH, gradient_BSH, tokens_BS)
        # XLA: where the gradient is then reduce-scattered along the width (ZeRO), layout assignment would transpose it,
        # and every element of a token's vector would be added to another row, by a compare-and-swap loop. In this
        # layout a token's vector is contiguous; transposing the sum once costs its bytes.
        added = with_layout_constraint(zeros.at[row.reshape(-1)].add(flat, mode="drop"), Layout((0, 1)))
        return psum_varying(added, specs.samples)

    with jax.named_scope("embedding"):
        table, tokens = saved
        mapped = map_ranks(local, (specs.table, specs.tokens, specs.hidden), specs.table)
        return mapped(table, tokens, gradient), None


_embedding.defvjp(_embedding_forward, _embedding_backward)
