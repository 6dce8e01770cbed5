"""How generation stores weights and KV cache: options of `mtjax generate`, `serve` and `inspect --generate`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mtjax.config.field_metadata import at_least
from mtjax.config.sizes import attention_windows, longest_text, named
from mtjax.config.ssm import has_state_space
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.config.model import Model


@dataclass(frozen=True)
class Storage:
    """Types of stored matrices."""

    weights_dtype: Literal["int8", "fp8", "int4"] | None = None
    """Quantize matrices: int8 and fp8 (E4M3) those of the layers and of the output logits, with a scale for each output
    channel; int4 those of the layers, with a scale for each group of --weights-group inputs of an output channel.
    Matrix products are still computed in --dtype."""
    weights_group: int = at_least(2, 128, most=2**16)
    """With --weights-dtype int4: inputs that share a scale; divides the inputs of each matrix on a device."""
    weights_zero_point: bool = False
    """With --weights-dtype int4: a zero point for each scale, for weights that are not symmetric around 0."""
    cache_dtype: Literal["int8", "fp8"] | None = None
    """Store the KV cache in 8 bits, with a scale for each token and head. Default: --dtype."""

    def check(self) -> None:
        """Checks that every given setting has an effect.

        Raises:
          UserError: one has none.
        """
        if self.weights_dtype == "int4":
            return
        for name in ("weights_group", "weights_zero_point"):
            if getattr(self, name) != getattr(PLAIN, name):
                raise UserError(f"--{name.replace('_', '-')} needs --weights-dtype int4: add that, or remove it")


def check_storage(model: "Model", storage: Storage) -> None:
    """Checks that a model's matrices and KV caches can be stored as they are to be.

    Raises:
      UserError: it has experts or latent attention, or other caches than those of whole contexts.
    """
    without = {"experts": "num_experts", "latent attention": "kv_lora_rank", "a pattern": "layer_pattern"}
    for what, name in without.items():
        if storage.weights_dtype and (size := getattr(model, name)):
            why = f"needs a model without {what}, and {name} is {size}: remove the option"
            raise UserError(f"weights_dtype {storage.weights_dtype} {why}")
    windows = attention_windows(model) or ()
    # Caches in 8 bits exist for keys and values of whole contexts only.
    reasons = {
        "a t5": model.family == "t5",
        "a model with a layer_pattern": model.layer_pattern,
        f"a model with latent attention (kv_lora_rank {model.kv_lora_rank})": model.kv_lora_rank,
        f"a model with windows of {min(windows, default=0)} tokens": any(w < longest_text(model) for w in windows),
    }
    if storage.cache_dtype and (name := next((name for name, holds in reasons.items() if holds), None)):
        raise UserError(f"cache_dtype {storage.cache_dtype} does not support {name}: remove it")


def is_supported(model: "Model", storage: Storage) -> bool:
    """Returns whether a model's matrices and KV caches can be stored so (`check_storage`)."""
    try:
        check_storage(model, storage)
    except UserError:
        return False
    return True


def check_snapshots(model: "Model", most_snapshots: int | None) -> None:
    """Checks that a given number of snapshots has an effect.

    Raises:
      UserError: the model has no recurrent states.
    """
    if most_snapshots is not None and not has_state_space(model):
        raise UserError(
            f"--state-snapshots {most_snapshots} needs a model with recurrent states (Mamba-2, gated delta nets), and "
            f"a {named(model)} has none: remove it"
        )


SNAPSHOTS_PER_SEQUENCE = 2
"""Snapshots of recurrent states for each sequence of --batch, where --state-snapshots is not given: for the end of its
prompt, and for where that departs from another one."""
PLAIN = Storage()
"""Matrices in the compute dtype."""
