"""Packs several conversations into each sequence."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtjax.data.samples.sample import Sample
from mtjax.finetune.chat_encoding import EncodedSample


def truncation_notes(samples: Sequence[EncodedSample], length: int, unit: str) -> list[str]:
    """Returns notes on samples that are truncated to the sequence length, and on those without trained tokens.

    Args:
      samples: the encoded samples.
      length: sequence length.
      unit: plural noun for the samples.
    """
    # A sequence of `length` tokens has `length + 1` ids: the last is a label only.
    longer = [sample for sample in samples if len(sample.ids) - 1 > length]
    lost = sum(bool(sample.trained[1:].any() and not sample.trained[1 : length + 1].any()) for sample in longer)
    empty = sum(not sample.trained[1:].any() for sample in samples)
    notes = []
    if longer:
        dropped = f"; {lost:,} of these have no trained tokens left and are dropped" if lost else ""
        notes.append(
            f"{len(longer):,} of {len(samples):,} {unit} are longer than {length} tokens and are truncated{dropped}"
        )
    if empty:
        notes.append(f"{empty:,} of {len(samples):,} {unit} have no trained tokens and are dropped")
    return notes


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into sequences with best-fit decreasing, without splitting any; returns their indices.

    Args:
      lengths: lengths of the items, at most `capacity` each.
      capacity: length of a sequence.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens in a pack, the pack's index), ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The pack with the fewest free tokens in which the item fits.
        best = bisect.bisect_left(free, (lengths[item], -1))
        if best == len(free):
            packs.append([])
            remaining, number = capacity, len(packs) - 1
        else:
            remaining, number = free.pop(best)
        packs[number].append(item)
        bisect.insort(free, (remaining - lengths[item], number))
    return packs


@dataclass(frozen=True)
class PackedChats:
    """Packed conversations as a `Dataset`; attention and positions do not cross conversations.

    Attributes:
      chats: the conversations, at most `length + 1` tokens each.
      packs: indices of the conversations in each sequence.
      length: sequence length.
      pad: id of padding.
      group: samples that stay adjacent when shuffled: 1, as each sequence is independent.
      step: each conversation begins at a multiple of it.
    """

    chats: Sequence[EncodedSample]
    packs: list[list[int]]
    length: int
    pad: int
    group: int = 1
    step: int = 1

    @classmethod
    def of(cls, chats: Sequence[EncodedSample], length: int, pad: int, step: int = 1) -> "PackedChats":
        """Packs conversations; truncates longer ones, and drops those that then have no trained tokens.

        Args:
          chats: the conversations.
          length: of a sequence, a multiple of `step`.
          pad: id of padding.
          step: each conversation begins at a multiple of it.
        """
        cut = [replace(chat, ids=chat.ids[: length + 1], trained=chat.trained[: length + 1]) for chat in chats]
        # The first token is never a label.
        cut = [chat for chat in cut if chat.trained[1:].any()]
        return cls(cut, pack([_tokens_taken(chat, step) for chat in cut], length), length, pad, step=step)

    def tokens_taken(self, chat: EncodedSample) -> int:
        """Returns the tokens of a sequence that a conversation takes, up to where the next may begin."""
        return _tokens_taken(chat, self.step)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, up to where another row could begin."""
        return max((sum(self.tokens_taken(self.chats[i]) for i in pack) for pack in self.packs), default=0)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Sample:
        packed = self.packs[index]
        names = {
            "tokens": self.pad,
            "labels": self.pad,
            "position_ids": 0,
            # Padding is a segment of its own, so that no token of a conversation attends to it.
            "segment_ids": len(packed),
            "padding_mask": 0,
        }
        arrays = {name: np.full(self.length, fill, np.int32) for name, fill in names.items()}
        mask, at = np.zeros(self.length, np.float32), 0
        for segment, number in enumerate(packed):
            chat = self.chats[number]
            # Next-token prediction: tokens are ids[:-1], labels ids[1:].
            size = len(chat.ids) - 1  # the last token is only a label
            tokens = slice(at, at + size)
            arrays["tokens"][tokens], arrays["labels"][tokens] = chat.ids[:-1], chat.ids[1:]
            arrays["position_ids"][tokens], arrays["segment_ids"][tokens] = np.arange(size), segment
            arrays["padding_mask"][tokens] = 1
            # The loss mask is by label, and `trained` says which tokens are to be predicted.
            mask[tokens] = chat.trained[1:]
            at += self.tokens_taken(chat)
        return {**arrays, "loss_mask": mask}


def _tokens_taken(chat: EncodedSample, step: int) -> int:
    return -(-(len(chat.ids) - 1) // step) * step
