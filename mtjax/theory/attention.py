"""Which attention kernel a run uses, and why not another."""

from typing import Literal

from mtjax.config import Config
from mtjax.config.sizes import head_dim

Kernel = Literal["cudnn", "xla"]


def choose_kernel(config: Config, platform: str) -> tuple[Kernel, str | None]:
    """The attention kernel of a run on devices of `platform`, and why it is not the one that was asked for, if so."""
    wanted, model = config.model.attention, config.model
    width = head_dim(model)
    obstacles = {
        "it runs on GPUs only": platform not in ("gpu", "cuda"),
        f"it has no dropout on probabilities, and attention_dropout is {model.attention_dropout}": (
            model.attention_dropout > 0
        ),
        f"it computes in 16 bits, and compute_dtype is {config.training.compute_dtype}": (
            config.training.compute_dtype == "float32"
        ),
        f"it takes head sizes up to 128 that are multiples of 8, and this one is {width}": (
            width % 8 != 0 or width > 128
        ),
        "its backward pass adds up in no fixed order (deterministic)": config.training.deterministic,
        "it does not keep documents apart (reset_attention_mask)": config.data.reset_attention_mask,
        f"it is causal and sees padding, which the family {model.family} can't use": model.family in ("bert", "t5"),
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), None)
    if wanted == "xla" or reason:
        return "xla", reason if wanted == "cudnn" else None
    return "cudnn", None
