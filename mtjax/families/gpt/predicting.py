"""A decoder that is also trained to predict tokens further ahead (multi-token prediction)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Config
from mtjax.config.float8 import PREDICTION
from mtjax.families.gpt.model import GPT
from mtjax.layout.stacks import stacks_of
from mtjax.models.language_model import Batch, HiddenStates, Keys
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.models.prediction import PREFIX, Predictor, ahead, keys_of, loss_name, run_predictor
from mtjax.models.routers import router_reports
from mtjax.models.run_alone import run_alone
from mtjax.models.stack_chunks import in_chunk
from mtjax.sharding.axes import num_shards
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy


class PredictingGPT(GPT):
    """A language model with layers that predict further tokens, with a loss each."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        model = config.model
        # Pipeline stages recompute entire chunks, and the head not at all.
        loop_settings = LayerLoopSettings.of(config.training)
        self.predictor_loop_settings = in_chunk(loop_settings) if num_shards("layers") > 1 else loop_settings
        self.num_predictors = model.mtp_num_layers
        for number in range(1, self.num_predictors + 1):
            # The attributes' names are the parameters' names: `mtp_1`, `mtp_2`, ... As in DeepSeek-V3, predictors are
            # layers of the last kind: in a model with experts they have experts.
            kind, predictor_key = stacks_of(model)[-1].kind, jax.random.fold_in(key, 2)
            predictor = Predictor(model, self.dtype, kind=kind, number=number, key=predictor_key)
            setattr(self, f"{PREFIX}{number}", predictor)

    def token_losses(self, hidden: Array, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of each next token, [batch, seq], and of the tokens further ahead."""
        losses = super().token_losses(hidden, batch, keys, options)
        return losses | self._predicted(hidden, batch, keys, options)

    def _predicted(self, hidden: Array, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the losses of multi-token prediction, and those and the counters of its routers.

        Args:
          hidden: final hidden states, [batch, act_seq, embed].
          batch: tokens and labels of entire samples.
          keys: dropout keys.
          options: of the cross-entropy.
        """
        (table, bias, _), reports, losses = self.output_head(), [], {}
        # Rotation and segments are those of the tokens themselves: a predictor only embeds what is ahead.
        context = self._context(batch, keys, HiddenStates(hidden))
        for number in range(1, self.num_predictors + 1):
            predictor: Predictor = getattr(self, f"{PREFIX}{number}")
            own_keys = keys_of(predictor, keys)
            # XLA: else it would combine reductions of embeddings with those of the layer before.
            tokens, _ = jax.lax.optimization_barrier((batch["tokens"], jax.lax.stop_gradient(hidden)))
            embedded = self._embed_ahead({**batch, "tokens": tokens}, own_keys, number)
            predictor_context = dataclasses.replace(context, dropout_keys=own_keys, layer=predictor.layer_number)
            with jax.named_scope("layers"), jax.named_scope(PREDICTION):
                run = partial(run_predictor, context=predictor_context)
                x, report = run_alone(run, self.predictor_loop_settings, hidden, predictor, embedded)
            # The next predictor continues from the normalized hidden states of this one.
            hidden, labels = predictor.final_norm(x), ahead(batch["labels"], number)
            losses[loss_name(number)] = vocab_parallel_cross_entropy(hidden, table, labels, options, bias)
            reports.append({"experts": report} if report else None)
        return losses | {f"{PREFIX}{name}": value for name, value in router_reports(reports).items()}

    def _embed_ahead(self, batch: Batch, keys: Keys, distance: int) -> Float[Array, "batch act_seq embed"]:
        """Embeds the tokens that are `distance` ahead, with their positions."""
        tokens, ids = ahead(batch["tokens"], distance), batch.get("position_ids")
        if ids is not None:
            return self._embed({"tokens": tokens, "position_ids": ahead(ids, distance)}, keys, None).x
        # The last tokens have none ahead; nothing that counts reads what stands there.
        last = tokens.shape[1] - 1
        return self._embed({"tokens": tokens}, keys, None, jnp.minimum(jnp.arange(last + 1) + distance, last)).x
