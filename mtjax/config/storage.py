"""How generation stores weights and KV cache: options of `mtjax generate`, `serve` and `inspect --generate`."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import at_least
from mtjax.errors import UserError


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


SNAPSHOTS_PER_SEQUENCE = 2
"""Snapshots of recurrent states for each sequence of --batch, where --state-snapshots is not given: for the end of its
prompt, and for where that departs from another one."""
PLAIN = Storage()
"""Matrices in the compute dtype."""
