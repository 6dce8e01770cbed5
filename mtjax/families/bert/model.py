"""BERT: bidirectional attention over two sentences, masked-LM head and sentence-order head (section 5 of the paper).

Depending on its settings, with the paper's pre-LN layers and a final norm (Figure 7b), or with the original's post-LN
layers and a norm on the embeddings (Figure 7a); with learned positions, or with rotary ones and sliding windows
(ModernBERT, arXiv 2412.13663).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Config
from mtjax.layout.stacks import stacks_of
from mtjax.layout.weights import embedding_weights
from mtjax.models.heads import MaskedLMHead, MaskedPositions, PoolerHead, class_losses
from mtjax.models.language_model import (
    EMBEDDING_SITE,
    Batch,
    HiddenStates,
    Keys,
    Section,
    WithVocabulary,
    embed_tokens,
    position_table,
    run_sections,
    vocabulary_table,
)
from mtjax.models.layer import Stack
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.models.logits import full_logits
from mtjax.models.ops import draw_normal, dropout, make_norm
from mtjax.models.project import reshard_sequence
from mtjax.models.rotary import Rotary
from mtjax.sharding.axes import local_positions, num_shards, spec
from mtjax.sharding.context.ring_attention import Method
from mtjax.sharding.context.zigzag import from_first_context_rank
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy

KEYS = 7
"""Number of random keys from which an encoder and its heads draw parameters."""


class Encoder(nnx.Module):
    """An encoder without its head: embedding and layers."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        # The heads of `BERT` take the other three, so that an encoder draws the same with any head.
        table_key, position_key, type_key, stack_key = jax.random.split(key, KEYS)[:4]
        types = embedding_weights(model.hidden_size, token_types=model.num_token_types)
        loop_settings = LayerLoopSettings.of(config.training)
        self.embedding = vocabulary_table(model, table_key)
        self.positions = position_table(model, model.sequence_length, position_key)
        self.token_types = draw_normal(type_key, types["token_types"], model.init_std) if types else None
        (layer_stack,) = stacks_of(model)
        self.stack = Stack(
            model, dtype, layer_stack=layer_stack, loop_settings=loop_settings, parallel=config.parallel, key=stack_key
        )
        # Pre-LN has a norm after the last layer, post-LN one on the embeddings.
        is_normed = model.norm_placement == "post" or model.embedding_norm
        self.embedding_norm = make_norm(model, dtype) if is_normed else _unchanged
        self.final_norm = make_norm(model, dtype) if model.norm_placement == "pre" else _unchanged
        self.rotary = Rotary(model) if model.position == "rope" else None
        self.rate = model.hidden_dropout
        self.method: Method = config.parallel.context_method
        self.dtype = dtype

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        token_types: Int[Array, "batch seq"] | None = None,
        padding_mask: Int[Array, "batch seq"] | None = None,
        keys: Keys = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the final hidden states.

        Args:
          tokens: ids.
          token_types: 0 in the first sentence, 1 in the second; all 0 when None.
          padding_mask: 1 on tokens, 0 on padding, which no token sees; no padding when None.
          keys: one dropout key per sample; None turns dropout off.
        """
        batch = {"tokens": tokens, "token_types": token_types, "padding_mask": padding_mask}
        return self.final_norm(run_sections(self, batch, keys)[0].x)

    @property
    def sections(self) -> dict[str, Section]:
        """One stack."""
        return {"stack": Section(self.stack, self._embed, self._context)}

    def _embed(self, batch: Batch, keys: Keys, before: HiddenStates | None) -> HiddenStates:
        """Embeds tokens, positions and token types: [batch, act_seq, embed]."""
        tokens, types = batch["tokens"], batch["token_types"]
        with jax.named_scope("embedding"):
            positions = local_positions(tokens.shape[1])
            x = embed_tokens(self.embedding, self.positions, tokens, self.dtype, local_positions=positions)
            if self.token_types is not None:
                # With a single type, as in RoBERTa, all tokens have it, also those of a second text.
                has_one = self.token_types.shape[0] == 1
                types = jnp.zeros_like(tokens) if types is None or has_one else types
                x = x + _embed_types(self.token_types, types, self.dtype)
            return HiddenStates(
                dropout(self.embedding_norm(x), self.rate, keys, EMBEDDING_SITE, RESIDUAL, positions=positions)
            )

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Computes what every layer reads: keys, the padding mask [batch, seq], and the rotation of positions."""
        length = batch["tokens"].shape[1]
        positions, rotation = local_positions(length), None
        if self.rotary is not None:
            ids = (jnp.arange(length) if positions is None else positions)[None]
            rotation = self.rotary(ids, length * num_shards("seq"))
        return LayerContext(
            keys,
            # Tokens attend within their segment: padding is one of its own.
            batch["padding_mask"],
            rotation=rotation,
            is_causal=False,
            positions=positions,
            context_method=self.method,
        )


class BERT(Encoder, WithVocabulary):
    """An encoder with the two heads of pretraining.

    Parameters count those of a GPT of the same size, `h (h + 3) + V` of the masked-LM head, `h (h + 1) + 2 (h + 1)` of
    the sentence-order head and `h` for each token type.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        model, (head_key, order_key, output_key) = config.model, jax.random.split(key, KEYS)[4:]
        self.head = MaskedLMHead(model, self.dtype, key=head_key)
        self.order = PoolerHead(model, 2, key=order_key) if model.sentence_order else None
        self.output = None if model.tie_embeddings else vocabulary_table(model, output_key)

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of masked tokens, [batch, seq], 0 at unmasked ones, and of sentence order,
        [batch]."""
        hidden = self.final_norm(trunk_output.x)
        with jax.named_scope("loss"):
            masked = MaskedPositions.of(batch["loss_mask"])
            # The head runs on the masked tokens alone, about 15% of all, [batch, masked, embed].
            features, labels = self.head(masked.take(hidden)), masked.take_labels(batch["labels"])
            table, bias = self.output_table[...], self.head.bias[...]
            losses = vocab_parallel_cross_entropy(features, table, labels, options, bias, sequence="seq")
            # Back to [batch, seq], as loss weights are given for all tokens.
            by_name = {"masked_lm": masked.put(losses)}
            if self.order is not None:
                losses = class_losses(self.order(hidden), batch["sentence_order"])
                # Only the first context rank has the first token, on which this head depends.
                by_name["sentence_order"] = from_first_context_rank(losses, hidden.shape[1])
            return by_name

    def logits(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Computes float32 logits over the padded vocabulary, which is sharded, from final hidden states."""
        features = self.head(reshard_sequence(hidden, "seq"))
        return full_logits(self, features) + self.head.bias[...]

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of masked sentence pairs, or of masked text without the sentence-order loss.

        See `mtjax.families.bert.samples`.
        """
        names = {"tokens": jnp.int32, "token_types": jnp.int32, "padding_mask": jnp.int32}
        names |= {"labels": jnp.int32, "loss_mask": jnp.float32}
        arrays = {name: jax.ShapeDtypeStruct((config.model.sequence_length,), kind) for name, kind in names.items()}
        order = {"sentence_order": jax.ShapeDtypeStruct((), jnp.int32)} if config.model.sentence_order else {}
        return arrays | order

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns a weight of 1 for each masked token, and for each sample in the sentence-order loss if there is
        one."""
        weights = {"masked_lm": batch["loss_mask"]}
        if "sentence_order" in batch:
            weights["sentence_order"] = jnp.ones_like(batch["sentence_order"], jnp.float32)
        return weights

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Counts tokens that are not padding."""
        # BERT reads all tokens and learns from masked ones: throughput counts what is read.
        return batch["padding_mask"].sum().astype(jnp.float32)


def _unchanged(x: Array) -> Array:
    return x


def _embed_types(
    table: nnx.Param, token_types: Int[Array, "batch seq"], dtype: jax.typing.DTypeLike
) -> Float[Array, "batch act_seq embed"]:
    """Returns the vector of each token's type."""
    # A product in float32 instead of a lookup, so that the table's gradient is accumulated in float32.
    chosen = reshard(jax.nn.one_hot(token_types, len(table[...])), spec("batch", "act_seq", None))
    return jnp.einsum("bst,th->bsh", chosen, table[...], out_sharding=spec(*RESIDUAL)).astype(dtype)
