"""Defaults that follow from settings that the user gave."""

import math
from collections.abc import Mapping
from typing import Any

from mtjax.config.run import Config, replace

SHARE = 0.1
"""Fraction of the peak learning rate that becomes the minimum, where the given or default minimum is above the peak."""


def with_min_learning_rate(
    config: Config, tables: Mapping[str, Any], source: str, *, typed: bool
) -> tuple[Config, str | None]:
    """Returns the config with a `min_learning_rate` that is not above `learning_rate`, and a note if it was changed.

    A default, or a value from a file whose learning rate was overridden by a lower one, was not chosen by the user: it
    becomes a tenth of the learning rate.

    Args:
      config: the run's; its `min_learning_rate` was not typed.
      tables: contents of the config file.
      source: name of the file for messages.
      typed: whether `learning_rate` was typed, and so overrides that of the file.
    """
    peak, lowest = config.optimizer.learning_rate, config.optimizer.min_learning_rate
    in_file = "min_learning_rate" in tables.get("optimizer", {})
    # NaN and infinity are rejected by `validate`.
    if lowest <= peak or not math.isfinite(peak) or (in_file and not typed):
        return config, None
    follows = peak * SHARE
    origin = f"from {source}" if in_file else "the default"
    note = (
        f"note    min_learning_rate {lowest:g} ({origin}) is above learning_rate {peak:g}: this run uses {follows:g}, "
        "a tenth of it (--min-learning-rate sets another)"
    )
    return replace(config, min_learning_rate=follows), note
