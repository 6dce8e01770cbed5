"""Conversations as samples: tokens by the chat template, the answers' marked, several packed into each sequence."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.samples.sample import Sample
from mtjax.errors import UserError
from mtjax.finetune.chat_rows import ASSISTANT, Chat
from mtjax.generate.chat import ChatTemplate

PROBE = "ANSWER"
"""What an assistant says where only the words around it matter."""


@dataclass(frozen=True)
class Written:
    """A conversation's tokens.

    Attributes:
      ids: int32 [tokens].
      learnt: bool [tokens]: those of answers, up to the token that ends each.
    """

    ids: np.ndarray
    learnt: np.ndarray


class ChatEncoder:
    """Writes conversations out as a model is given them when it answers.

    Args:
      tokenizer: the model's.
      template: its chat template; None where there is none.

    Attributes:
      end: the token with which the template ends an answer; None where it has none for that.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.end = None if template is None else _end_of_answer(tokenizer, template)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer or a completion."""
        return sorted({self._tokenizer.eod, *([] if self.end is None else [self.end])})

    def __call__(self, chat: Chat) -> Written:
        """A conversation's tokens.

        Raises:
          UserError: there is no template, or it refuses the conversation.
        """
        if not chat.messages:
            return self._continued(chat)
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat_template to write messages out with: name a Jinja file with "
                "--chat-template, or give rows with a prompt and its completion"
            )
        ids: list[int] = []
        learnt: list[bool] = []
        before = ""
        for place in [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]:
            asked = self._template.render(chat.messages[:place])
            answered = self._template.render(chat.messages[: place + 1], to_be_answered=False)
            if not (asked.startswith(before) and answered.startswith(asked)):
                raise UserError(
                    "the chat_template renders earlier turns differently once later turns are added (say, without "
                    "their <think> parts), so the assistant's tokens can't be located: use another --chat-template"
                )
            question, answer = self._split(ids, before, asked, answered)
            ids += [*question, *answer]
            learnt += [False] * len(question) + self._up_to_end(answer)
            before = answered
        if self.end is None:  # or the model would never stop
            ids, learnt = [*ids, self._tokenizer.eod], [*learnt, True]
        return Written(np.array(ids, np.int32), np.array(learnt))

    def _continued(self, chat: Chat) -> Written:
        """A prompt as `mtjax generate` reads it, the completion, and the end of a document."""
        prompt = self._tokenizer.encode_prompt(chat.prompt)
        whole = self._tokenizer.encode_prompt(chat.prompt + chat.completion)
        is_begun = whole[: len(prompt)] == prompt
        completion = whole[len(prompt) :] if is_begun else self._tokenizer.encode(chat.completion)
        ids = np.array([*prompt, *completion, self._tokenizer.eod], np.int32)
        return Written(ids, np.arange(len(ids)) >= len(prompt))

    def _split(self, ids: list[int], before: str, asked: str, answered: str) -> tuple[list[int], list[int]]:
        """Tokens of the words up to an answer, which follow `ids`, and of the answer.

        As the model will see them: the words up to the answer are encoded as a whole, and the answer goes on from
        there. Where its first letters would be one token with the last before it, each part is encoded by itself.
        """
        encode = self._tokenizer.encode_marked
        prompt, whole = encode(asked), encode(answered)
        if prompt[: len(ids)] == ids and whole[: len(prompt)] == prompt:
            return prompt[len(ids) :], whole[len(prompt) :]
        return encode(asked[len(before) :]), encode(answered[len(asked) :])

    def _up_to_end(self, answer: list[int]) -> list[bool]:
        """True up to the token that ends the answer: a line break behind it is the template's, not the model's."""
        if self.end not in answer:
            return [True] * len(answer)
        last = len(answer) - 1 - answer[::-1].index(self.end)
        return [place <= last for place in range(len(answer))]


def _end_of_answer(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The first special token behind an answer."""
    messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": PROBE}]
    behind = template.render(messages, to_be_answered=False).rpartition(PROBE)[2]
    plain = set(tokenizer.encode(behind))
    return next((index for index in tokenizer.encode_marked(behind) if index not in plain), None)


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

    chats: Sequence[Written]
    packs: list[list[int]]
    length: int
    pad: int
    group: int = 1

    @classmethod
    def of(cls, chats: Sequence[Written], length: int, pad: int) -> "PackedChats":
        """Packs conversations; longer ones are cut at their end, and those are left out that have no answer then."""
        cut = [Written(chat.ids[: length + 1], chat.learnt[: length + 1]) for chat in chats]
        cut = [chat for chat in cut if chat.learnt[1:].any()]
        return cls(cut, pack([len(chat.ids) - 1 for chat in cut], length), length, pad)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Sample:
        packed = self.packs[index]
        names = {"tokens": self.pad, "labels": self.pad, "position_ids": 0, "segment_ids": len(packed)}
        arrays = {name: np.full(self.length, fill, np.int32) for name, fill in names.items()}
        mask, at = np.zeros(self.length, np.float32), 0
        for segment, number in enumerate(packed):
            chat = self.chats[number]
            size = len(chat.ids) - 1  # the last token is only a label
            place = slice(at, at + size)
            arrays["tokens"][place], arrays["labels"][place] = chat.ids[:-1], chat.ids[1:]
            arrays["position_ids"][place], arrays["segment_ids"][place] = np.arange(size), segment
            mask[place] = chat.learnt[1:]
            at += size
        return {**arrays, "loss_mask": mask}
