"""Conversations as samples of the trainer: several of them packed into each sequence."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtjax.data.samples.sample import Sample
from mtjax.finetune.chat_encoding import EncodedSample


def truncation_notes(samples: Sequence[EncodedSample], length: int, unit: str) -> list[str]:
    """Returns notes on samples that are cut to the length of a sequence, and on those without trained tokens.

    Args:
      samples: as they are encoded.
      length: of a sequence.
      unit: what the samples are called.
    """
    longer = [sample for sample in samples if len(sample.ids) - 1 > length]
    lost = sum(bool(sample.trained[1:].any() and not sample.trained[1 : length + 1].any()) for sample in longer)
    empty = sum(not sample.trained[1:].any() for sample in samples)
    notes = []
    if longer:
        dropped = f"; {lost:,} of these have nothing left to train on, and are dropped" if lost else ""
        notes.append(f"{len(longer):,} of {len(samples):,} {unit} are longer than {length} tokens and are cut{dropped}")
    if empty:
        notes.append(f"{empty:,} of {len(samples):,} {unit} have nothing to train on, and are dropped")
    return notes


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the items that share a sequence, best fit, the longest first; none is divided.

    Args:
      lengths: at most `room` each.
      room: of a sequence.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left in a pack, and the pack; ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(free, (lengths[item], -1))
        if place == len(free):
            packs.append([])
            left, number = room, len(packs) - 1
        else:
            left, number = free.pop(place)
        packs[number].append(item)
        bisect.insort(free, (left - lengths[item], number))
    return packs


@dataclass(frozen=True)
class PackedChats:
    """Conversations in sequences of one length, as a `Dataset`; attention and positions are each one's own.

    Attributes:
      chats: their tokens, at most `length + 1`.
      packs: numbers of those that share a sequence.
      length: of the sequences.
      pad: id of padding.
      group: sequences that stay together: each stands alone.
    """

    chats: Sequence[EncodedSample]
    packs: list[list[int]]
    length: int
    pad: int
    group: int = 1

    @classmethod
    def of(cls, chats: Sequence[EncodedSample], length: int, pad: int) -> "PackedChats":
        """Packs conversations; longer ones are cut at their end, and those are left out that have no answer then."""
        cut = [EncodedSample(chat.ids[: length + 1], chat.trained[: length + 1]) for chat in chats]
        cut = [chat for chat in cut if chat.trained[1:].any()]
        return cls(cut, pack([len(chat.ids) - 1 for chat in cut], length), length, pad)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Sample:
        packed = self.packs[index]
        names = {
            "tokens": self.pad,
            "labels": self.pad,
            "position_ids": 0,
            "segment_ids": len(packed),
            "padding_mask": 0,
        }
        arrays = {name: np.full(self.length, fill, np.int32) for name, fill in names.items()}
        mask, at = np.zeros(self.length, np.float32), 0
        for segment, number in enumerate(packed):
            chat = self.chats[number]
            size = len(chat.ids) - 1  # the last token is only a label
            place = slice(at, at + size)
            arrays["tokens"][place], arrays["labels"][place] = chat.ids[:-1], chat.ids[1:]
            arrays["position_ids"][place], arrays["segment_ids"][place] = np.arange(size), segment
            arrays["padding_mask"][place] = 1
            mask[place] = chat.trained[1:]
            at += size
        return {**arrays, "loss_mask": mask}
