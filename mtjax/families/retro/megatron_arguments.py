"""Translation between the arguments of a Retro in Megatron-LM and mtjax's model settings."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mtjax.config import Model
from mtjax.errors import UserError
from mtjax.families.retro.config import first_retro_layer, later_retro_layers

CROSS = "cross_attention"
"""Module of a layer that reads neighbours."""


def is_retro(tensors: Iterable[str]) -> bool:
    """Returns whether a checkpoint with tensors of these names is of a Retro."""
    return any(f".{CROSS}.encoder." in name for name in tensors)


def retro_settings(arguments: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Returns mtjax's settings of a Retro, from its arguments and the names of its tensors.

    Raises:
      UserError: the layers with chunked cross-attention are not every so many, or the encoder's dropouts differ.
    """
    tensors = tuple(tensors)
    encoded = _numbers(tensors, rf"decoder\.layers\.\d+\.{CROSS}\.encoder\.layers\.(\d+)\.")
    reading = _numbers(tensors, rf"decoder\.layers\.(\d+)\.{CROSS}\.attn\.")
    first = reading[0]
    # If a single layer reads neighbours, any step beyond the last layer will do.
    every = reading[1] - first if reading[1:] else int(arguments["num_layers"])
    if reading != list(range(first, int(arguments["num_layers"]), every)):
        raise UserError(f"layers {', '.join(str(n + 1) for n in reading)} read neighbours, which are not every so many")
    dropout, other = (arguments.get(f"retro_encoder_{of}_dropout", 0.1) for of in ("hidden", "attention"))
    if dropout != other:
        raise UserError(
            f"retro_encoder_hidden_dropout is {dropout} and retro_encoder_attention_dropout {other}: mtjax has one "
            "number for both, retro_encoder_dropout"
        )
    # The second is the older name of the argument.
    chunk = arguments.get("retro_chunk_length") or arguments.get("retro_gpt_chunk_length") or 64
    return {
        "family": "retro",
        "retro_first": first + 1,
        "retro_every": every,
        "retro_encoder_layers": encoded[-1] + 1,
        "retro_encoder_dropout": dropout,
        "retro_chunk": chunk,
        "retro_num_neighbours": arguments.get("retro_num_neighbors") or 2,
        "retro_retrieved_chunks": arguments.get("retro_num_retrieved_chunks") or 2,
        "retro_final_norm": any(name.startswith("decoder.final_layernorm.") for name in tensors),
    }


def retro_note(model: Model) -> str | None:
    """Returns in what a model is not the RetroModel of Megatron-Core 0.15; None where it is, and for other families."""
    if model.family != "retro":
        return None
    ours, theirs = (
        ", ".join(str(number + 1) for number in (first_retro_layer(each), *later_retro_layers(each)))
        for each in (model, dataclasses.replace(model, retro_first=None, retro_every=Model().retro_every))
    )
    different = ["has no final norm (retro_final_norm true)"] if model.retro_final_norm else []
    if ours != theirs:
        different.append(f"reads neighbours in the layers {theirs}, not {ours} (retro_first, retro_every)")
    what = " and ".join(different)
    return f"the RetroModel of Megatron-Core 0.15 {what}: it is another model than these weights" if what else None


def _numbers(tensors: Iterable[str], pattern: str) -> list[int]:
    return sorted({int(match[1]) for name in tensors if (match := re.match(pattern, name))})


def retro_arguments(model: Model) -> dict[str, Any]:
    """Returns Megatron's arguments of a Retro; none for other families."""
    if model.family != "retro":
        return {}
    return {
        "retro_add_retriever": True,
        "retro_chunk_length": model.retro_chunk,
        "retro_num_neighbors": model.retro_num_neighbours,
        "retro_num_retrieved_chunks": model.retro_retrieved_chunks,
        "retro_encoder_layers": model.retro_encoder_layers,
        "retro_encoder_hidden_dropout": model.retro_encoder_dropout,
        "retro_encoder_attention_dropout": model.retro_encoder_dropout,
    }
