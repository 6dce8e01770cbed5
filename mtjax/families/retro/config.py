"""Retro (arXiv 2112.04426): a GPT that also reads neighbours, texts like the chunk before, which a search found."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtjax.config.families import Family
from mtjax.config.layer_loops import one_kind_only
from mtjax.errors import UserError
from mtjax.families.gpt.config import GPT

if TYPE_CHECKING:
    from mtjax.config.model import Model
    from mtjax.config.run import Config

RETRO = frozenset(
    {
        *("retro_chunk", "retro_num_neighbours", "retro_retrieved_chunks", "retro_encoder_layers", "retro_first"),
        *("retro_every", "retro_encoder_dropout", "retro_final_norm", "retro_frozen", "retro_reads"),
    }
)
"""Settings of Retro, which others refuse."""
SHALLOW = 15
"""Layers up to which chunked cross-attention begins in layer 6 instead of 9, as in Megatron."""


def first_retro_layer(model: "Model") -> int:
    """Returns the number, counted from 0, of the first layer with chunked cross-attention."""
    return (model.retro_first or (6 if model.num_layers <= SHALLOW else 9)) - 1


def later_retro_layers(model: "Model") -> tuple[int, ...]:
    """Returns the numbers, counted from 0, of the other layers with chunked cross-attention."""
    return tuple(range(first_retro_layer(model), model.num_layers, model.retro_every))[1:]


def plain_layers(model: "Model") -> tuple[int, ...]:
    """Returns the numbers of the layers without chunked cross-attention."""
    others = {first_retro_layer(model), *later_retro_layers(model)}
    return tuple(number for number in range(model.num_layers) if number not in others)


def letters_of_retro(model: "Model") -> str:
    """Returns each layer's letter: R for the first with chunked cross-attention, X for the others, P for the rest."""
    first, later = first_retro_layer(model), later_retro_layers(model)
    return "".join("R" if n == first else "X" if n in later else "P" for n in range(model.num_layers))


def neighbour_length(model: "Model") -> int:
    """Returns the tokens of a neighbour."""
    return model.retro_retrieved_chunks * model.retro_chunk


def num_chunks(model: "Model") -> int:
    """Returns the chunks of a sample."""
    return model.sequence_length // model.retro_chunk


def neighbour_tokens(model: "Model") -> int:
    """Returns the tokens of all neighbours of a sample."""
    return num_chunks(model) * model.retro_num_neighbours * neighbour_length(model)


def is_frozen_in_retro(model: "Model", modules: Sequence[str]) -> bool:
    """Returns whether a parameter, whose dotted name has these modules, is among those that `retro_frozen` names."""
    frozen = {"none": False, "encoder": _in_encoder(modules), "retrieval": is_added(modules)}
    return {**frozen, "decoder": not is_added(modules)}[model.retro_frozen]


def is_added(modules: Sequence[str]) -> bool:
    """Returns whether a GPT does not have the parameter whose dotted name has these modules."""
    return _in_encoder(modules) or modules[0] == "first_norm" or any(name.startswith("chunked") for name in modules)


def _in_encoder(modules: Sequence[str]) -> bool:
    return modules[0].startswith("encoder")


def text_step(model: "Model") -> int:
    """Returns what the length of a sample must be a multiple of, for chunks; 1 in other families."""
    return model.retro_chunk if model.family == "retro" else 1


def shortest_text(model: "Model") -> int:
    """Returns the least length of a sample, for the positions of a neighbour; 1 in other families."""
    return neighbour_length(model) if model.family == "retro" else 1


def check_retro(model: "Model") -> None:
    """Checks the sizes of chunks and neighbours, and where chunked cross-attention begins.

    Raises:
      UserError: they are inconsistent; names the settings and what fits.
    """
    length, chunk, neighbour = model.sequence_length, model.retro_chunk, neighbour_length(model)
    if length % chunk:
        raise UserError(
            f"sequence_length {length} is not a multiple of retro_chunk {chunk}, the tokens that read the same "
            "neighbours: change one of the two"
        )
    # Neighbours use the decoder's table of positions.
    if neighbour > length:
        raise UserError(
            f"a neighbour has {neighbour} tokens (retro_retrieved_chunks {model.retro_retrieved_chunks} x retro_chunk "
            f"{chunk}), and sequence_length, the number of learned positions, is {length}: use {neighbour} or more"
        )
    if first_retro_layer(model) >= model.num_layers:
        default = "" if model.retro_first else ", its default"
        raise UserError(
            f"retro_first is {first_retro_layer(model) + 1}{default}, and num_layers is {model.num_layers}: no layer "
            "would read neighbours; use --retro-first with a number up to num_layers"
        )
    if model.num_kv_heads not in (None, model.num_heads):
        raise UserError(
            f"num_kv_heads is {model.num_kv_heads}, and the family retro needs as many as num_heads ({model.num_heads})"
        )
    if not model.retro_reads and model.retro_frozen != "retrieval":
        raise UserError(
            f"retro_reads is false, and retro_frozen is {model.retro_frozen}: nothing would train the encoder and "
            "chunked cross-attention, which weight decay alone would change; add --retro-frozen retrieval"
        )
    if model.lora_rank:
        raise UserError(f"lora_rank is {model.lora_rank}, and the family retro has no adapters: remove lora_rank")


def check_retro_run(config: "Config") -> None:
    """Checks that a run of Retro has no settings that its layers do not support.

    Raises:
      UserError: it has one.
    """
    model, training, data, task = config.model, config.training, config.data, config.finetuning.task
    is_chat = task == "chat"
    refused = {
        **one_kind_only(config),
        f"fp8 {training.fp8}": training.fp8 != "none",
        f"attention {model.attention}": model.attention not in ("auto", "xla"),
        # Conversations are packed so that each begins with a chunk; documents are not.
        "reset_position_ids": data.reset_position_ids and not is_chat,
        "reset_attention_mask": data.reset_attention_mask and not is_chat,
        f"task {task}": task not in ("none", "chat"),
        "neighbours without retro_reads": data.neighbours is not None and not model.retro_reads and not is_chat,
        "neighbours in --task chat, whose rows have passages,": data.neighbours is not None and is_chat,
    }
    for setting in (name for name, is_set in refused.items() if is_set):
        raise UserError(f"{setting} does not support the family retro: remove it")


RETRO_FAMILY = Family(
    kind="retrieval",
    defaults=GPT.defaults,
    choices={"position": ("learned",), "norm_placement": ("pre",)},
    settings=RETRO,
    refused_elsewhere=RETRO,
    check=check_retro,
    check_run=check_retro_run,
)
