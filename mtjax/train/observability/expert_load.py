"""Load balance of experts: how evenly the tokens of a step are distributed in each layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_NAMED = 3
"""Maximum number of dead experts that a line names."""


def load_entries(counts: np.ndarray, lost: np.ndarray | None, dense: Sequence[int] = ()) -> dict[str, Any]:
    """Computes the metrics of a step's expert load.

    They are expert_load, each expert's load over the mean, by layer (empty for dense layers); expert_load_max, the
    maximum; dead_experts, the number of experts without tokens; and lost_share, the fraction of expert choices that
    were dropped for lack of capacity.

    Args:
      counts: tokens, [layers, experts].
      lost: expert choices of each layer that were dropped, [layers]; None without a capacity limit.
      dense: indices of the dense layers.
    """
    # load[layer, expert] = tokens of the expert / mean tokens per expert of the layer
    # A step of padding alone has no tokens: its loads are 0. Other means may be below 1, with few tokens.
    mean = counts.mean(-1, keepdims=True)
    load = counts / np.where(mean > 0, mean, 1)
    dead = int((counts == 0).sum())
    rows, layers = iter(load.round(4).tolist()), len(load) + len(dense)
    found = {
        "expert_load": [[] if number in dense else next(rows) for number in range(layers)],
        "expert_load_max": float(load.max()),
        "dead_experts": dead,
    }
    return found if lost is None else found | {"lost_share": float(lost.sum() / max(counts.sum(), 1))}


def describe_load(entry: dict[str, Any]) -> str | None:
    """Describes the load: "busiest expert 1.84x, no tokens for expert 3 of layer 0"; None without experts."""
    if "expert_load" not in entry:
        return None
    text = f"busiest expert {entry['expert_load_max']:.2f}x"
    unused = [(i, e) for i, layer in enumerate(entry["expert_load"]) for e, load in enumerate(layer) if load == 0]
    text += f", {entry['lost_share']:.1%} lost" if "lost_share" in entry else ""
    if not unused:
        return text
    named = ", ".join(f"expert {e} of layer {i}" for i, e in unused[:MOST_NAMED])
    more = f" and {len(unused) - MOST_NAMED} others" if len(unused) > MOST_NAMED else ""
    return f"{text}, no tokens for {named}{more}"
