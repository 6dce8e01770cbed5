"""GPT and Llama with a head for finetuning."""

import jax
from jax import Array
from jaxtyping import Float

from mtjax.config import Config
from mtjax.config.sizes import num_outputs
from mtjax.families.gpt.model import Decoder
from mtjax.models.finetuned import Finetuned, row_losses_of
from mtjax.models.heads import LastTokenHead
from mtjax.models.language_model import Batch, HiddenStates, Keys


class FinetunedDecoder(Finetuned, Decoder):
    """GPT or Llama with a linear layer on the last token."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        self.row_losses = row_losses_of(config.model)
        self.head = LastTokenHead(config.model, num_outputs(config.model), key=jax.random.fold_in(key, 1))

    def outputs(self, trunk_output: HiddenStates, batch: Batch, keys: Keys = None) -> Float[Array, "batch outputs"]:
        """See `GivesOutputs.outputs`."""
        return self.head(self.final_hidden(trunk_output.x), batch["padding_mask"])
