"""Rows of a Retro with passages: laid out in chunks as `mtjax.data.neighbours.given` says, and packed so that each
begins with a chunk. A row without passages is a GPT's: its tokens read nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtjax.config import Model
from mtjax.data import Tokenizer
from mtjax.data.neighbours.given import ends_in_front, first_with_passages, tokens_of_texts
from mtjax.data.samples.sample import Sample
from mtjax.errors import UserError
from mtjax.families.retro.config import neighbour_length
from mtjax.families.retro.model import NEIGHBOURS, READS
from mtjax.finetune.chat_encoding import EncodedSample
from mtjax.finetune.chat_samples import PackedChats


@dataclass(frozen=True)
class PassageEncoder:
    """Lays out rows with passages for a model."""

    tokenizer: Tokenizer
    model: Model

    def __call__(self, sample: EncodedSample, passages: Sequence[str], remarks: set[str]) -> EncodedSample:
        """Returns a sample of a prompt and its completion with the passages that the completion reads.

        Args:
          sample: the prompt and its completion.
          passages: texts; at most as many as the model reads.
          remarks: a remark about truncated passages is added to it.

        Raises:
          UserError: there are more passages than the model reads, or the prompt has no tokens.
        """
        # The first trained token begins the completion.
        prompt = int(sample.trained.argmax())
        if not prompt:
            raise UserError("the prompt has no tokens, and reads passages: give it at least one")
        tokens, is_cut = tokens_of_texts(passages, self.model, self.tokenizer)
        if is_cut:
            remarks.add(f"have a passage of more than {tokens.shape[1]} tokens, which is truncated")
        front = ends_in_front(prompt, self.model.retro_chunk)
        # Padding in front lets the completion begin with a chunk: each chunk reads the neighbours of the one before it.
        ids = np.concatenate([np.full(front, self.tokenizer.eod, np.int32), sample.ids])
        return EncodedSample(ids, np.concatenate([np.zeros(front, bool), sample.trained]), tokens)


@dataclass(frozen=True)
class PackedPassages(PackedChats):
    """Packed rows with passages and without; attention, positions and neighbours do not cross rows.

    Attributes:
      step: tokens of a chunk; each row begins with one.
      shape: neighbours of a chunk, and their tokens.
    """

    shape: tuple[int, int] = (1, 1)

    def __getitem__(self, index: int) -> Sample:
        sample, chunk = super().__getitem__(index), self.step
        neighbours = np.full((self.length // chunk, *self.shape), self.pad, np.int32)
        reads, at = np.zeros(self.length, np.int32), 0
        for chat in (self.chats[number] for number in self.packs[index]):
            size = len(chat.ids) - 1
            if chat.passages is not None:
                first = at // chunk + first_with_passages(int(chat.trained.argmax()), chunk)
                neighbours[first : (at + self.tokens_taken(chat)) // chunk] = chat.passages
                # As in a sample of its own, the tokens before the end of its first chunk read nothing.
                reads[at + chunk - 1 : at + size] = 1
            at += self.tokens_taken(chat)
        return {**sample, NEIGHBOURS: neighbours, READS: reads}


def pack_rows(
    chats: Sequence[EncodedSample], model: Model, length: int, pad: int, *, with_passages: bool
) -> PackedChats:
    """Packs rows into sequences; truncates longer ones, and drops those that then have no trained tokens.

    Args:
      chats: the encoded rows.
      model: that reads them.
      length: of a sequence.
      pad: id of padding.
      with_passages: whether any of the rows of the run has passages.
    """
    if not with_passages:
        return PackedChats.of(chats, length, pad)
    together = PackedChats.of(chats, length, pad, step=model.retro_chunk)
    return PackedPassages(**vars(together), shape=(model.retro_num_neighbours, neighbour_length(model)))


def have_passages(samples: Sequence[EncodedSample]) -> bool:
    """Returns whether any of the samples has passages."""
    return any(sample.passages is not None for sample in samples)


def reading(model: Model, train: Sequence[EncodedSample], *, reads: bool) -> dict[str, bool]:
    """Returns the settings of a run whose rows are known.

    Args:
      model: of the run.
      train: the rows that it trains on.
      reads: whether any of its rows has passages, those of validation included.

    Raises:
      UserError: no row trains the encoder and chunked cross-attention of a Retro, and they are not frozen.
    """
    if model.family != "retro":
        return {}
    if not have_passages(train) and model.retro_frozen != "retrieval":
        raise UserError(
            f"no training row has passages, and retro_frozen is {model.retro_frozen}: nothing would train the encoder "
            "and chunked cross-attention, which weight decay alone would change; add --retro-frozen retrieval to train "
            "the decoder as a GPT, or give rows passages"
        )
    return {"retro_reads": reads}
