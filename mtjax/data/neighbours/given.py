"""Texts that are given as neighbours, and the layout of a prompt whose answer reads them: of finetuning and generation.

The layout (arXiv 2310.07713 has the same, with two long chunks): ends of documents fill the prompt up in front until
its last chunk is complete, so the answer begins with a chunk. The last chunk of the prompt and all after it have the
passages as neighbours, the chunks before it neighbours of padding.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from mtjax.config import Model
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.families.retro.config import neighbour_length


def ends_in_front(prompt: int, chunk: int) -> int:
    """Returns how many ends of documents complete the last chunk of a prompt of so many tokens."""
    return -prompt % chunk


def first_with_passages(prompt: int, chunk: int) -> int:
    """Returns the number of the first chunk that has the passages: the last of a prompt of so many tokens."""
    return -(-prompt // chunk) - 1


def tokens_of_texts(
    texts: Sequence[str], model: Model, tokenizer: Tokenizer
) -> tuple[Int[np.ndarray, "neighbours tokens"], bool]:
    """Returns what a model reads of a chunk's texts, and whether one of them is truncated.

    Args:
      texts: at most as many as the model reads; ends of documents stand for the others.
      model: has the number of neighbours and their length.
      tokenizer: of the model.

    Raises:
      UserError: there are more than the model reads.
    """
    most, length = model.retro_num_neighbours, neighbour_length(model)
    if len(texts) > most:
        raise UserError(
            f"there are {len(texts)} texts for a chunk, and the model reads {most} (retro_num_neighbours): give at "
            "most as many"
        )
    out, is_cut = np.full((most, length), tokenizer.eod, np.int32), False
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text)
        is_cut |= len(ids) > length
        out[number, : min(len(ids), length)] = ids[:length]
    return out, is_cut
