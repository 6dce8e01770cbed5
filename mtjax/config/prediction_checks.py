"""Checks of the settings of multi-token prediction."""

from mtjax.config.model import Model
from mtjax.config.run import Config
from mtjax.config.sizes import embedding_width
from mtjax.errors import UserError


def check_prediction(config: Config) -> None:
    """Checks what multi-token prediction is combined with.

    Raises:
      UserError: a setting has no effect without its layers, or cannot be combined with them.
    """
    model, layers = config.model, config.model.mtp_num_layers
    if not layers:
        if (factor := model.mtp_loss_scaling_factor) != Model().mtp_loss_scaling_factor:
            raise UserError(
                f"mtp_loss_scaling_factor is {factor:g}, and mtp_num_layers is 0: set mtp_num_layers, or remove "
                "mtp_loss_scaling_factor"
            )
        return
    if layers >= model.sequence_length:
        raise UserError(
            f"mtp_num_layers is {layers}, and a sample of sequence_length {model.sequence_length} has no tokens that "
            f"far ahead: use at most {model.sequence_length - 1}"
        )
    # The text of each problem, after "mtp_num_layers is N, and ".
    problems = {
        "norm_placement is post, and its layers read hidden states of a final norm": model.norm_placement == "post",
        f"embedding_size is {model.embedding_size} and hidden_size {model.hidden_size}, which its layers combine": (
            embedding_width(model) != model.hidden_size
        ),
        f"head is {model.head}, which predicts no tokens": model.head != "language",
        f"lora_rank is {model.lora_rank}, and its layers have no adapters": model.lora_rank > 0,
        f"teacher is {config.finetuning.teacher}, whose probabilities are of the next token only": (
            config.finetuning.teacher is not None
        ),
    }
    if wrong := next((text for text, holds in problems.items() if holds), None):
        raise UserError(f"mtp_num_layers is {layers}, and {wrong}: use --mtp-num-layers 0")
