"""T5 (arXiv 1910.10683): an encoder and a decoder with relative positions."""

from typing import TYPE_CHECKING

from mtjax.config.families import Family
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.config.model import Model


def check(model: "Model") -> None:
    """Checks for settings that T5 does not support.

    Raises:
      UserError: num_kv_heads is set, or relative_bias_layers without relative positions.
    """
    if model.num_kv_heads not in (None, model.num_heads):
        raise UserError(
            f"num_kv_heads is {model.num_kv_heads}, and the family t5 needs as many as num_heads ({model.num_heads})"
        )
    if model.relative_bias_layers != "first" and model.position != "relative":
        raise UserError(
            f"relative_bias_layers is {model.relative_bias_layers} and position {model.position}: use --position "
            "relative or remove relative_bias_layers"
        )


T5 = Family(
    kind="encoder-decoder",
    defaults={
        "norm": "rmsnorm",
        # From here on the defaults are those of Google's T5, not of Megatron-LM's.
        "norm_epsilon": 1e-6,
        "position": "relative",
        "activation": "relu",
        "bias": False,
        "tie_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    choices={"position": ("relative", "learned"), "norm_placement": ("pre",)},
    settings=frozenset({"num_decoder_layers", "decoder_sequence_length", "relative_bias_layers", "output_scale"}),
    refused_elsewhere=frozenset({"relative_bias_layers"}),
    check=check,
)
