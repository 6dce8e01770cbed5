"""Pretrained trunks with the head of another task: logits or a number for each text.

The heads are transformers' `...ForSequenceClassification`: BERT's pooler, dropout and a linear layer on the first
token, for decoders a linear layer without bias on the last one.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Config
from mtjax.config.sizes import num_outputs
from mtjax.models.families.bert import Encoder
from mtjax.models.families.gpt import Decoder
from mtjax.models.heads import LastTokenHead, PoolerHead, class_losses
from mtjax.models.trunk import Batch, Keys, Stream
from mtjax.sharding.vocab import LossOptions


class GivesOutputs(Protocol):
    """A model that gives numbers for a text."""

    def outputs(self, stream: Stream, batch: Batch, keys: Keys = None) -> Float[Array, "batch outputs"]:
        """float32 logits, or the number that a regression predicts, from the output of the last section."""
        ...


class _Finetuned:
    """What the loss of a text is, whatever the trunk."""

    def losses(self: GivesOutputs, stream: Stream, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Cross-entropy of each text's class, or the square of the error of its number."""
        with jax.named_scope("loss"):
            outputs, labels = self.outputs(stream, batch, keys), batch["label"]
            if jnp.issubdtype(labels.dtype, jnp.integer):
                return {"loss": class_losses(outputs, labels)}
            return {"loss": jnp.square(outputs[:, 0] - labels)}

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Texts, their labels and the weights of these: `mtjax.finetune.samples`."""
        length, kind = (config.model.sequence_length,), config.model.head
        names = ["tokens", "padding_mask", *(["token_types"] if config.model.family == "bert" else [])]
        arrays = {name: jax.ShapeDtypeStruct(length, jnp.int32) for name in names}
        label = jax.ShapeDtypeStruct((), jnp.int32 if kind == "classification" else jnp.float32)
        return arrays | {"label": label, "weight": jax.ShapeDtypeStruct((), jnp.float32)}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Each text counts by the weight of its class."""
        return {"loss": batch["weight"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Tokens that are not padding."""
        return batch["padding_mask"].sum().astype(jnp.float32)


class FinetunedEncoder(_Finetuned, Encoder):
    """BERT with a pooler, dropout and a linear layer on the first token."""

    def __init__(self, config: Config, *, key: Array) -> None:
        super().__init__(config, key=key)
        model, head_key = config.model, jax.random.fold_in(key, 1)
        self.head = PoolerHead(model, num_outputs(model), rate=model.hidden_dropout, key=head_key)

    def outputs(self, stream: Stream, batch: Batch, keys: Keys = None) -> Float[Array, "batch outputs"]:
        """float32 logits, or the number that a regression predicts."""
        return self.head(self.final_norm(stream.x), keys)


class FinetunedDecoder(_Finetuned, Decoder):
    """GPT or Llama with a linear layer on the last token."""

    def __init__(self, config: Config, *, key: Array) -> None:
        super().__init__(config, key=key)
        self.head = LastTokenHead(config.model, num_outputs(config.model), key=jax.random.fold_in(key, 1))

    def outputs(self, stream: Stream, batch: Batch, keys: Keys = None) -> Float[Array, "batch outputs"]:
        """float32 logits, or the number that a regression predicts."""
        return self.head(self.final_norm(stream.x), batch["padding_mask"])
