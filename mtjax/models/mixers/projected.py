"""Self-attention whose query, key and value are more than one product: those of adapters are added to it."""

from jax import Array
from jaxtyping import Float

from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.transformer import SelfAttention
from mtjax.models.project import gather_sequence


class ProjectedSelfAttention(SelfAttention):
    """Self-attention that computes query, key and value in `project_in`."""

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """See `SelfAttention.__call__`."""
        mixed, state = self.mix(*self.project_in(x, context), context, state)
        return self.project_out(mixed, context), state

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array]:
        """All-gathers sequences, and computes query, key and value of the ranks' heads."""
        return self.qkv(gather_sequence(x, self.qkv.rule))
