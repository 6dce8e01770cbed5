"""The logits of entire samples, which no training step and no generation computes: these read the table by shards."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.models.language_model import WithVocabulary
from mtjax.models.project import reshard_sequence
from mtjax.sharding.axes import spec


def full_logits(model: WithVocabulary, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq vocab"]:
    """Computes float32 logits over the padded vocabulary, which is sharded, from what the output table reads."""
    table, bias = model.output_parameters
    x, weight, sharding = reshard_sequence(hidden, "seq"), table.astype(hidden.dtype), spec("batch", "seq", "vocab")
    # Accumulated in float32, as in the loss: differences of large logits matter.
    products = jnp.einsum("bsh,vh->bsv", x, weight, preferred_element_type=jnp.float32, out_sharding=sharding)
    return model.output_options.logits(products, bias)
