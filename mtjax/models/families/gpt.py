"""GPT-2: learned positions, pre-LN layers, output projection tied to the embedding (section 4.2 of the paper).

Other settings choose rotary positions, other norms and activations, grouped-query attention, an untied output, and
experts.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Config
from mtjax.config.sizes import dense_layers, main_layers, output_shape, padded_vocab_size
from mtjax.layout.plan import ExpertDispatch
from mtjax.layout.stacks import DENSE, STACK
from mtjax.models.dropout import dropout
from mtjax.models.embedding import EMBEDDING_SITE, embed_tokens, in_table, position_table, vocabulary_table
from mtjax.models.heads import WithVocabulary
from mtjax.models.kv_cache import CachePositions
from mtjax.models.layer_context import PADDING_MASK, RESIDUAL, LayerContext, Padding
from mtjax.models.linear import constant
from mtjax.models.mixers.experts import router_reports
from mtjax.models.mixers.registry import layer_kind
from mtjax.models.norms import make_norm
from mtjax.models.prediction import PREFIX, Predictor, ahead, keys_of, loss_name, run_predictor
from mtjax.models.recompute import Recompute, run_alone
from mtjax.models.rotary import QueryScale, Rotary
from mtjax.models.stack import InterleavedStacks, Stack
from mtjax.models.trunk import (
    HARD,
    SOFT,
    TEACHER,
    TEACHER_TABLE,
    Batch,
    HiddenStates,
    Keys,
    Section,
    run_sections,
)
from mtjax.sharding.axes import num_shards
from mtjax.sharding.context.ring_attention import Method
from mtjax.sharding.context.zigzag import local_positions
from mtjax.sharding.distillation import vocab_parallel_distillation
from mtjax.sharding.vocab import LossOptions, OutputOptions, vocab_parallel_cross_entropy


class Decoder(nnx.Module):
    """A decoder without its head: embedding and layers."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, stack_key = jax.random.split(key, 3)
        self.embedding = vocabulary_table(model, table_key)
        self.positions = position_table(model, model.sequence_length, position_key)
        self.rotary = Rotary(model) if model.position == "rope" else None
        self.query_scale = QueryScale(model) if model.attention_scale_beta else None
        recompute = Recompute.of(config.training)
        kind = layer_kind(model)
        stack = partial(Stack, model, dtype, recompute=recompute, parallel=config.parallel, key=stack_key)
        # A stack has layers of one kind. Models with dense layers and layers with experts have two.
        dense = dense_layers(model)
        self.dense = stack(kind="transformer", layers=dense) if dense else None
        self.stack = stack(kind=kind, layers=main_layers(model))
        self.is_interleaved = model.moe_every > 1
        self.embedding_norm = make_norm(model, dtype) if model.embedding_norm else None
        self.final_norm = make_norm(model, dtype)
        self.rate, self.scale = model.hidden_dropout, model.embedding_scale
        self.method: Method = config.parallel.context_method
        self.expert_dispatch: ExpertDispatch = config.parallel.expert_dispatch
        self.dtype = dtype

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        position_ids: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        keys: Keys = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the final hidden states, normalized.

        Args:
          tokens: ids.
          position_ids: of each token in its document; 0, 1, ... when None.
          segment_ids: when given, tokens attend within their segment only.
          keys: one dropout key per sample; None turns dropout off.
        """
        batch = {"tokens": tokens, "position_ids": position_ids, "segment_ids": segment_ids}
        return self.final_norm(run_sections(self, batch, keys)[0].x)

    @property
    def sections(self) -> dict[str, Section]:
        """One section, of one stack, or of two where only some layers have experts."""
        if self.dense is None:
            return {STACK: Section(self.stack, self._embed, self._context)}
        stacks = InterleavedStacks(self.dense, self.stack, self.is_interleaved)
        return {STACK: Section(stacks, self._embed, self._context, (DENSE,))}

    def _embed(
        self, batch: Batch, keys: Keys, before: HiddenStates | None, positions: Array | None = None
    ) -> HiddenStates:
        """Embeds tokens and positions: [batch, act_seq, embed]."""
        with jax.named_scope("embedding"):
            tokens = batch["tokens"]
            positions = local_positions(tokens.shape[1]) if positions is None else positions
            x = embed_tokens(
                self.embedding, self.positions, tokens, self.dtype, batch.get("position_ids"), positions, self.scale
            )
            x = x if self.embedding_norm is None else self.embedding_norm(x)
            return HiddenStates(dropout(x, self.rate, keys, EMBEDDING_SITE, RESIDUAL, positions=positions))

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Collects segments, positions, rotation and padding of a batch for the layers."""
        length, ids = batch["tokens"].shape[1], batch.get("position_ids")
        positions = local_positions(length)
        context = LayerContext(
            keys,
            batch.get("segment_ids"),
            positions=positions,
            context_method=self.method,
            expert_dispatch=self.expert_dispatch,
            padding=Padding.of(batch),
        )
        if self.rotary is None and self.query_scale is None:
            return context
        # Without position ids, all samples have the same positions: [1, seq], broadcast over the batch.
        if ids is None:
            ids = (jnp.arange(length) if positions is None else positions)[None]
        rotation = None if self.rotary is None else self.rotary(ids, length * num_shards("seq"))
        scale = None if self.query_scale is None else self.query_scale(ids)
        return dataclasses.replace(context, rotation=rotation, query_scale=scale)


class GPT(Decoder, WithVocabulary):
    """A decoder-only language model.

    Parameters count `V h + s h + l (12 h^2 + 13 h) + 2 h` for V padded vocabulary rows.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        model = config.model
        self.output = None if model.tie_embeddings else vocabulary_table(model, jax.random.fold_in(key, 1))
        # Pipeline stages recompute entire chunks, and the head not at all.
        recompute = Recompute.of(config.training)
        self.predictor_recompute = recompute.in_chunk if num_shards("layers") > 1 else recompute
        self.num_predictors = model.mtp_num_layers
        for number in range(1, self.num_predictors + 1):
            # The attributes' names are the parameters' names: `mtp_1`, `mtp_2`, ...
            kind, predictor_key = layer_kind(model), jax.random.fold_in(key, 2)
            predictor = Predictor(model, self.dtype, kind=kind, number=number, key=predictor_key)
            setattr(self, f"{PREFIX}{number}", predictor)
        rows = padded_vocab_size(model)
        self.output_bias = constant(0.0, {"vocab": rows}) if model.output_bias else None
        self.output_options = OutputOptions(rows, **output_shape(model))

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The stacks whose layers generate text, in their order."""
        return (self.stack,) if self.dense is None else (self.dense, self.stack)

    def embed_new(
        self, tokens: Int[Array, "batch seq"], cache_positions: CachePositions, length: int
    ) -> tuple[Float[Array, "batch act_seq embed"], LayerContext]:
        """Embeds new tokens of sequences in KV caches of `length` tokens; returns the layers' inputs."""
        del length
        batch = {"tokens": tokens, "position_ids": in_table(self.positions, cache_positions.positions)}
        hidden = self._embed(batch, None, None)
        return hidden.x, dataclasses.replace(self._context(batch, None, hidden), cache_positions=cache_positions)

    def final_hidden(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Normalizes the hidden states behind the last layer, for the output table."""
        return self.final_norm(x)

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of each next token, [batch, seq], and with a teacher also of its probabilities."""
        # The logits are never gathered: the loss is fused with the product with the sharded output table.
        hidden, (table, bias, _) = self.final_norm(trunk_output.x), self.output_head()
        if TEACHER in batch:
            targets = batch["labels"], batch[TEACHER], batch[TEACHER_TABLE]
            hard, soft = vocab_parallel_distillation(hidden, table, *targets, options, bias)
            return {HARD: hard, SOFT: soft}
        losses = {"loss": vocab_parallel_cross_entropy(hidden, table, batch["labels"], options, bias)}
        return losses | (self._predicted(hidden, batch, keys, options) if self.num_predictors else {})

    def _predicted(self, hidden: Array, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the losses of multi-token prediction, and those and the counters of its routers.

        Args:
          hidden: final hidden states, [batch, act_seq, embed].
          batch: tokens and labels of entire samples.
          keys: dropout keys.
          options: of the cross-entropy.
        """
        (table, bias, _), reports, losses = self.output_head(), [], {}
        context = self._context(batch, keys, HiddenStates(hidden))
        for number in range(1, self.num_predictors + 1):
            predictor: Predictor = getattr(self, f"{PREFIX}{number}")
            own_keys = keys_of(predictor, keys)
            # XLA: else it would combine reductions of embeddings with those of the layer before.
            tokens, _ = jax.lax.optimization_barrier((batch["tokens"], jax.lax.stop_gradient(hidden)))
            embedded = self._embed_ahead({**batch, "tokens": tokens}, own_keys, number)
            own = dataclasses.replace(context, dropout_keys=own_keys, layer=predictor.layer_number)
            with jax.named_scope("layers"):
                run = partial(run_predictor, context=own)
                x, report = run_alone(run, self.predictor_recompute, hidden, predictor, embedded)
            hidden, labels = predictor.final_norm(x), ahead(batch["labels"], number)
            losses[loss_name(number)] = vocab_parallel_cross_entropy(hidden, table, labels, options, bias)
            reports.append({"experts": report} if report else None)
        return losses | {f"{PREFIX}{name}": value for name, value in router_reports(reports).items()}

    def _embed_ahead(self, batch: Batch, keys: Keys, places: int) -> Float[Array, "batch act_seq embed"]:
        """Embeds the tokens that are `places` ahead, with their positions."""
        tokens, ids = ahead(batch["tokens"], places), batch.get("position_ids")
        if ids is not None:
            return self._embed({"tokens": tokens, "position_ids": ahead(ids, places)}, keys, None).x
        # The last tokens have none ahead; nothing that counts reads what stands there.
        last = tokens.shape[1] - 1
        return self._embed({"tokens": tokens}, keys, None, jnp.minimum(jnp.arange(last + 1) + places, last)).x

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of next-token prediction.

        They include positions and segments where the data resets them at document ends, and a padding mask for the
        packed sequences of chats.
        """
        names = {"tokens": jnp.int32, "labels": jnp.int32, "loss_mask": jnp.float32}
        names |= {"position_ids": jnp.int32} if config.data.reset_position_ids else {}
        names |= {"segment_ids": jnp.int32} if config.data.reset_attention_mask else {}
        names |= {PADDING_MASK: jnp.int32} if config.finetuning.task == "chat" else {}
        return {name: jax.ShapeDtypeStruct((config.model.sequence_length,), kind) for name, kind in names.items()}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns a weight of 1 for each unmasked token."""
        return {"loss": batch["loss_mask"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Counts unmasked tokens."""
        return batch["loss_mask"].sum()
