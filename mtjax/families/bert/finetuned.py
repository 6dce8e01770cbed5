"""BERT with a head for finetuning."""

import jax
from jax import Array
from jaxtyping import Float

from mtjax.config import Config
from mtjax.config.sizes import num_outputs
from mtjax.families.bert.model import Encoder
from mtjax.models.finetuned import Finetuned, row_losses_of
from mtjax.models.heads import PoolerHead, SpanHead
from mtjax.models.language_model import Batch, HiddenStates, Keys


class FinetunedEncoder(Finetuned, Encoder):
    """BERT with a pooler, dropout and a linear layer on the first token, or with a linear layer on every token."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        model, head_key = config.model, jax.random.fold_in(key, 1)
        self.row_losses = row_losses_of(model)
        if model.head == "spans":
            self.head = SpanHead(model, key=head_key)
        else:
            settings = {"rate": model.hidden_dropout, "activation": model.pooler_activation}
            self.head = PoolerHead(model, num_outputs(model), **settings, key=head_key)

    def outputs(self, trunk_output: HiddenStates, batch: Batch, keys: Keys = None) -> Float[Array, "batch ..."]:
        """See `GivesOutputs.outputs`."""
        hidden = self.final_norm(trunk_output.x)
        return self.head(hidden, batch["padding_mask"]) if isinstance(self.head, SpanHead) else self.head(hidden, keys)
