"""Choice of a run's attention kernel."""

from typing import Literal

from mtjax.config import Config
from mtjax.config.sizes import head_dim, windowed_layers

Kernel = Literal["cudnn", "xla"]


def choose_kernel(config: Config, platform: str) -> tuple[Kernel, str | None]:
    """Chooses the attention kernel of a run on devices of `platform`.

    Returns:
      The kernel, and if it is not the requested one, the reason.
    """
    requested, model = config.model.attention, config.model
    width = head_dim(model)
    obstacles = {
        "it runs on GPUs only": platform not in ("gpu", "cuda"),
        f"it has no dropout on probabilities, and attention_dropout is {model.attention_dropout}": (
            model.attention_dropout > 0
        ),
        f"it needs a 16-bit compute_dtype, and compute_dtype is {config.training.compute_dtype}": (
            config.training.compute_dtype == "float32"
        ),
        f"it needs head sizes up to 128 that are multiples of 8, and this one is {width}": (
            width % 8 != 0 or width > 128
        ),
        f"it has no cap of scores, and attention_softcap is {model.attention_softcap}": (
            model.attention_softcap is not None
        ),
        "it has no sinks (attention_sinks)": model.attention_sinks,
        "its backward pass is not reproducible, and deterministic is true": config.training.deterministic,
        "it has no mask at document boundaries (reset_attention_mask)": config.data.reset_attention_mask,
        "it has no sliding window here (attention_window)": any(windowed_layers(model)),
        f"it adds no bias to the scores, and position is {model.position}": model.position == "alibi",
        f"it is causal and does not mask padding, and family is {model.family}": model.family in ("bert", "t5"),
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), None)
    if requested == "xla" or reason:
        return "xla", reason if requested == "cudnn" else None
    return "cudnn", None
