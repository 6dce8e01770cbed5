"""How evenly the tokens of a step went to the experts of each layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_NAMED = 3
"""Dead experts that are named in a line."""


def load_entries(counts: np.ndarray, lost: np.ndarray | None, dense: Sequence[int] = ()) -> dict[str, Any]:
    """What metrics say of a step's load.

    They are expert_load, each expert's load over the mean, layer by layer, nothing of one without experts;
    expert_load_max, the highest of them;
    dead_experts, how many had no token; and lost_share, the share of choices for which experts had no place.

    Args:
      counts: tokens, [layers, experts].
      lost: choices of each layer that were lost, [layers]; None where experts take all tokens.
      dense: numbers of the layers without experts.
    """
    load = counts / np.maximum(counts.mean(-1, keepdims=True), 1)
    dead = int((counts == 0).sum())
    rows, layers = iter(load.round(4).tolist()), len(load) + len(dense)
    found = {
        "expert_load": [[] if number in dense else next(rows) for number in range(layers)],
        "expert_load_max": float(load.max()),
        "dead_experts": dead,
    }
    return found if lost is None else found | {"lost_share": float(lost.sum() / counts.sum())}


def load_in_words(entry: dict[str, Any]) -> str | None:
    """The load for people: "busiest expert 1.84x, none for expert 3 of layer 0"; None without experts."""
    if "expert_load" not in entry:
        return None
    words = f"busiest expert {entry['expert_load_max']:.2f}x"
    places = [(i, e) for i, layer in enumerate(entry["expert_load"]) for e, load in enumerate(layer) if load == 0]
    words += f", {entry['lost_share']:.1%} lost" if "lost_share" in entry else ""
    if not places:
        return words
    named = ", ".join(f"expert {e} of layer {i}" for i, e in places[:MOST_NAMED])
    more = f" and {len(places) - MOST_NAMED} others" if len(places) > MOST_NAMED else ""
    return f"{words}, none for {named}{more}"
