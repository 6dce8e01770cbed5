"""What loops over layers of one kind alone support."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtjax.config.run import Config


def one_kind_only(config: "Config") -> Mapping[str, bool | None]:
    """Returns settings that need layers of one kind, as they are shown -> whether a run has them."""
    training = config.training
    return {
        f"recompute_method {training.recompute_method}": training.recompute_method != "uniform",
        f"recompute_num_layers {training.recompute_num_layers}": training.recompute_num_layers > 1,
        "recompute_offload": training.recompute_offload,
        "unroll_layers": training.unroll_layers,
        "a teacher": config.finetuning.teacher is not None,
    }
