"""Log-probabilities of given tokens, for evaluation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from mtjax.sharding.axes import map_ranks
from mtjax.sharding.vocab import LossOptions, VocabSpecs, summaries_of


def vocab_parallel_scores(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    options: LossOptions,
    bias: Float[Array, " vocab"] | None = None,
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Computes the log-probability of each label, float32, and whether no token is more likely.

    Arguments and communication are those of `vocab_parallel_cross_entropy`; smoothing and z-loss don't matter.
    """
    specs, plain = VocabSpecs.in_force(), replace(options, label_smoothing=0.0)

    def local(hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array) -> tuple[Array, Array]:
        """Scores this rank's tokens, inside the map."""
        of_logits = summaries_of(specs, plain, hidden_BSH, table_VH, bias_V, labels_BS)
        log_likelihood = of_logits.label - of_logits.maximum - jnp.log(of_logits.exponentials)
        # Equal where the label's logit is the largest; both are the same number of the same product, so no rounding
        # differs.
        return log_likelihood, of_logits.label == of_logits.maximum

    with jax.named_scope("loss"):
        arguments = (specs.hidden, specs.table, specs.bias, specs.tokens)
        return map_ranks(local, arguments, (specs.tokens, specs.tokens))(hidden, table, bias, labels)
