"""GPT-2: learned positions, pre-LN layers, output projection tied to the embedding (section 4.2 of the paper).

By its settings also with rotary positions, other norms and activations, grouped-query attention, an untied output.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int, Key

from mtjax.config import Config, Model
from mtjax.config.sizes import padded_vocab_size
from mtjax.models.attention import Context
from mtjax.models.layers import dropout, make_norm, normal
from mtjax.models.recompute import Recompute
from mtjax.models.rotary import Rotary
from mtjax.models.transformer import EMBEDDING_SITE, RESIDUAL, Stack
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy, vocab_parallel_embedding


class GPT(nnx.Module):
    """A decoder-only language model.

    Parameters count `V h + s h + l (12 h^2 + 13 h) + 2 h` for V padded vocabulary rows.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, stack_key = jax.random.split(key, 3)
        rows = padded_vocab_size(model)
        self.embedding = normal(table_key, {"vocab": rows, "embed": model.hidden_size}, model.init_std)
        self.positions = _position_table(model, position_key)
        self.rotary = Rotary(model) if model.position == "rope" else None
        self.stack = Stack(model, dtype, recompute=Recompute.of(config.training), key=stack_key)
        self.final_norm = make_norm(model, dtype)
        output = {"vocab": rows, "embed": model.hidden_size}
        self.output = None if model.tie_embeddings else normal(jax.random.fold_in(key, 1), output, model.init_std)
        self.rate = model.hidden_dropout
        self.vocab_size = model.vocab_size
        self.dtype = dtype

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        position_ids: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        keys: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Final hidden states, normalised.

        Args:
          tokens: ids.
          position_ids: of each token in its document; 0, 1, ... when None.
          segment_ids: when given, tokens attend within their own segment only.
          keys: one dropout key per sample; None turns dropout off.
        """
        with jax.named_scope("embedding"):
            x = vocab_parallel_embedding(self.embedding[...], tokens, self.dtype)
            x = self._add_positions(x, position_ids)
            x = dropout(x, self.rate, keys, EMBEDDING_SITE, RESIDUAL)
        ids = jnp.arange(tokens.shape[1])[None] if position_ids is None else position_ids
        context = Context(segment_ids, None if self.rotary is None else self.rotary(ids))
        return self.final_norm(self.stack(x, context, keys))

    def _add_positions(self, x: Array, position_ids: Array | None) -> Array:
        """The residual stream [batch, act_seq, embed] with each token's position embedding, if there are any."""
        if self.positions is None:
            return x
        positions = self.positions[...].astype(self.dtype)
        if position_ids is None:
            return x + reshard(positions[: x.shape[1]], spec("act_seq", "embed"))
        return x + positions.at[position_ids].get(out_sharding=spec(*RESIDUAL))

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Next-token batches; positions and segments where the data resets them at document ends."""
        names = {"tokens": jnp.int32, "labels": jnp.int32, "loss_mask": jnp.float32}
        names |= {"position_ids": jnp.int32} if config.data.reset_position_ids else {}
        names |= {"segment_ids": jnp.int32} if config.data.reset_attention_mask else {}
        return {name: jax.ShapeDtypeStruct((config.model.sequence_length,), kind) for name, kind in names.items()}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Each unmasked token counts once."""
        return {"loss": batch["loss_mask"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Unmasked tokens."""
        return batch["loss_mask"].sum()

    def batch_losses(
        self, batch: Mapping[str, Array], keys: Key[Array, " batch"] | None, options: LossOptions
    ) -> dict[str, Array]:
        """Cross-entropy of each next token; `keys`, one per sample, turn dropout on."""
        hidden = self(batch["tokens"], batch.get("position_ids"), batch.get("segment_ids"), keys)
        return {"loss": self.losses(hidden, batch["labels"], options)}

    def losses(
        self, hidden: Float[Array, "batch act_seq embed"], labels: Int[Array, "batch seq"], options: LossOptions
    ) -> Float[Array, "batch seq"]:
        """Cross-entropy of each next token."""
        return vocab_parallel_cross_entropy(hidden, self._output_table, labels, options)

    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """float32 logits over the padded vocabulary, split over the mesh; training never makes them."""
        table = self._output_table.astype(self.dtype)
        place = spec("batch", "seq", "vocab")
        return jnp.einsum("bsh,vh->bsv", hidden, table, preferred_element_type=jnp.float32, out_sharding=place)

    @property
    def _output_table(self) -> Array:
        return (self.embedding if self.output is None else self.output)[...]


def _position_table(model: Model, key: Array) -> nnx.Param | None:
    if model.position != "learned":
        return None
    return normal(key, {"seq": model.sequence_length, "embed": model.hidden_size}, model.init_std)
