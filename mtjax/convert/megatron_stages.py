"""The layers that Megatron-LM gives to each pipeline stage and its chunks, by its arguments."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from mtjax.errors import UserError
from mtjax.migrate.megatron import SAVED_AS

LAYOUT = "pipeline_model_parallel_layout"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
_ENDS = tuple(
    (name, SAVED_AS[name]) for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
)
"""Layers of the first and of the last stage: as Megatron-LM's command line calls them, and as Megatron-Core does."""
_MOST = 1 << 16
"""Characters of a layout without its factors."""


def uneven_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arguments that give stages other than equal shares of the layers."""
    names = [LAYOUT, EMBEDDING, LOSS, *(name for names in _ENDS for name in names)]
    return [name for name in names if arguments.get(name) not in (None, False)]


def stage_layers(arguments: Mapping[str, Any], num_layers: int, source: str) -> list[list[range]]:
    """Returns the layers of each chunk of each pipeline stage (`get_num_layers_to_build` in Megatron-Core).

    Args:
      arguments: Megatron's, as it saves them.
      num_layers: of the model.
      source: for messages.

    Raises:
      UserError: the arguments do not divide the layers over the stages.
    """
    stages, chunks = (
        int(arguments.get(f"{kind}_model_parallel_size") or 1) for kind in ("pipeline", "virtual_pipeline")
    )
    if stages == 1:
        return [[range(num_layers)]]
    counts = _counts(arguments, num_layers, stages, chunks)
    if sum(map(sum, counts)) != num_layers or len(counts) != stages or any(n < 0 for row in counts for n in row):
        named = ", ".join(f"{name} {arguments[name]}" for name in uneven_arguments(arguments))
        raise UserError(
            f"{source} has {num_layers} layers, and {named or 'equal shares'} of {stages} pipeline stages"
            f"{f' x {chunks} chunks' if chunks > 1 else ''} do not add up to these"
        )
    # Layers are counted over the stages, then over the chunks.
    ends = list(accumulate(counts[stage][chunk] for chunk in range(len(counts[0])) for stage in range(stages)))
    return [
        [range(ends[i := chunk * stages + stage] - count, ends[i]) for chunk, count in enumerate(row)]
        for stage, row in enumerate(counts)
    ]


def _counts(arguments: Mapping[str, Any], num_layers: int, stages: int, chunks: int) -> list[list[int]]:
    """Returns the number of layers of each stage's chunks, which need not add up to those of the model."""
    if (layout := arguments.get(LAYOUT)) is not None:
        return _by_layout(layout, stages)
    first, last = (next((n for name in names if (n := arguments.get(name)) is not None), None) for names in _ENDS)
    # Megatron asserts that neither embedding nor loss is counted then.
    if first is not None or last is not None:
        ends = (first is not None) + (last is not None)
        middle, left = stages - ends, num_layers - (first or 0) - (last or 0)
        if middle < 0 or (middle and left % middle):
            return []
        totals = [*([first] * (first is not None)), *[left // max(middle, 1)] * middle, *([last] * (last is not None))]
        # No counts: the caller reports that they do not add up.
        return [] if any(n % chunks for n in totals) else [[n // chunks] * chunks for n in totals]
    # The embedding and the loss count as a layer each.
    ahead, behind = bool(arguments.get(EMBEDDING)), bool(arguments.get(LOSS))
    share, odd = divmod(num_layers + ahead + behind, stages * chunks)
    if odd:
        return []
    counts = [[share] * chunks for _ in range(stages)]
    counts[0][0] -= ahead
    counts[-1][-1] -= behind
    return counts


def _by_layout(layout: Any, stages: int) -> list[list[int]]:
    """Returns the same of a layout such as `Et*3|(tt|)*29,m|L`, chunk by chunk over the stages."""
    rows: Sequence[Any] = unrolled(layout).split("|") if isinstance(layout, str) else layout
    if not isinstance(rows, list | tuple) or len(rows) % stages:
        return []
    # Megatron saves a layout as text or as lists of names.
    counts = [sum(one in ("t", "decoder") for one in row) for row in rows]
    return [counts[stage::stages] for stage in range(stages)]


def unrolled(layout: str) -> str:
    """Returns a layout without its factors, `(...)*N` and `x*N`; "" for one that is not a layout."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        sizes = [len(match[1]) * int(match[2]) for match in re.finditer(pattern, text)]
        if sum(sizes) > _MOST:
            return ""
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text if re.fullmatch(r"[EtmL|]*", text) else ""
