"""The states of Mamba-2 and of gated delta nets for generation: as large for a long sequence as for a short one."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from mtjax.config import Model
from mtjax.config.ssm import ssm_groups, ssm_heads
from mtjax.models.kv_cache import CachePositions
from mtjax.sharding.axes import spec
from mtjax.sharding.kv_heads import groups_in_use


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """What a layer with a recurrent state remembers of each sequence."""

    taps: Float[Array, "sequences taps groups channels"]
    """Inputs of the convolution: those of the newest tokens that the next token's convolution reads."""
    state: Float[Array, "sequences groups heads head_dim state"]
    """float32."""
    length: int = field(metadata={"static": True})
    """Capacity of each sequence in tokens: that of the model's KV caches; the state itself has no limit."""

    @classmethod
    def empty(cls, model: Model, sequences: int, length: int, dtype: jax.typing.DTypeLike) -> "RecurrentState":
        """Builds the states of sequences that have not begun; each rank has those of its heads."""
        groups = groups_in_use(ssm_groups(model))
        heads = ssm_heads(model) // groups
        channels = heads * model.ssm_head_dim + 2 * model.ssm_state
        taps = (sequences, model.ssm_conv - 1, groups, channels)
        state = (sequences, groups, heads, model.ssm_head_dim, model.ssm_state)
        return cls(
            jnp.zeros(taps, dtype, out_sharding=spec("batch", None, "heads", None)),
            jnp.zeros(state, jnp.float32, out_sharding=spec("batch", "heads", None, None, None)),
            length,
        )

    def is_new(self, positions: CachePositions) -> Bool[Array, "batch seq"]:
        """Returns which tokens are read: neither the padding of a chunk nor tokens of inactive sequences."""
        if positions.sequence is None:
            return positions.positions < self.length
        assert positions.count is not None
        return (jnp.arange(positions.positions.shape[1]) < positions.count)[None]

    def read_by(self, positions: CachePositions) -> tuple[Array, Array]:
        """Returns taps and states of the sequences with new tokens: zeros for one that begins."""
        if positions.sequence is None:
            return self.taps, self.state
        begins = positions.positions[0, 0] == 0
        taps, state = (lax.dynamic_index_in_dim(a, positions.sequence, keepdims=True) for a in (self.taps, self.state))
        return jnp.where(begins, 0, taps), jnp.where(begins, 0, state)

    def replaced(
        self, taps: Array, tokens: Float[Array, "batch seq groups channels"], state: Array, positions: CachePositions
    ) -> "RecurrentState":
        """Returns the states after new tokens.

        Args:
          taps: before them.
          tokens: their inputs of the convolution.
          state: after the tokens.
          positions: of the tokens.
        """
        seen = jnp.concatenate([taps, tokens.astype(taps.dtype)], 1)
        # Moved on by the number of new tokens: an inactive sequence keeps its taps, and padding is left out.
        count, kept = self.is_new(positions).sum(1), self.taps.shape[1]
        newest = jax.vmap(lambda row, first: lax.dynamic_slice_in_dim(row, first, kept))(seen, count)
        newest = newest.astype(self.taps.dtype)
        if positions.sequence is None:
            return RecurrentState(newest, state, self.length)
        at = positions.sequence
        return RecurrentState(self.taps.at[at].set(newest[0]), self.state.at[at].set(state[0]), self.length)

    def of(self, taps: Array, state: Array) -> "RecurrentState":
        """Returns other states of the same sequences."""
        return RecurrentState(taps, state, self.length)

    def resized(self, length: int) -> "RecurrentState":
        """Returns the states with another capacity of the sequences."""
        return RecurrentState(self.taps, self.state, length)
