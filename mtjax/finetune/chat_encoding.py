"""Conversations as tokens: prompts as the model is given them, and the tokens of answers that are trained on."""

import re
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.finetune.chat_rows import ASSISTANT, Chat
from mtjax.generate.chat import REASONING, ChatTemplate, Message
from mtjax.generate.chat_environment import Spans
from mtjax.generate.first_tokens import is_special

PROBES = ("ANSWER", "ZEBRA")
"""Answers that stand in where only the text around an answer matters; they begin with different letters."""
ANCHORS = ("", "\n", ".")
"""Text before a continuation, so that a tokenizer that marks beginnings of words does not see one there."""
DATE = (
    "have the current date in them, which the chat template writes: resumed on another day, the run reads another date"
)
MERGED = (
    "have a token with the end of the prompt and the beginning of the completion, which the prompt alone does not "
    "have: begin completions with the space between the two"
)
SEVERAL = (
    "become several samples, usually one for each answer, because the chat template writes an answer differently once "
    "later turns follow"
)
NO_END = "mark answers by {% generation %} without the token that ends them: the model does not learn to stop"
NO_THOUGHT = "have answers without thoughts, though the generation prompt begins one: the answers follow it directly"


@dataclass(frozen=True)
class EncodedSample:
    """A sample's tokens.

    Attributes:
      ids: int32 [tokens].
      trained: bool [tokens]: those that are trained on.
    """

    ids: np.ndarray
    trained: np.ndarray

    def begins(self, other: "EncodedSample") -> bool:
        """Whether the other sample begins with this one up to its last trained token."""
        size = int(np.flatnonzero(self.trained).max(initial=-1)) + 1
        return np.array_equal(self.ids[:size], other.ids[:size])

    def merged_into(self, other: "EncodedSample") -> "EncodedSample":
        """The other sample, which this one `begins`, trained on the tokens of both."""
        trained, size = other.trained.copy(), min(len(self.ids), len(other.ids))
        trained[:size] |= self.trained[:size]
        return EncodedSample(other.ids, trained)


class ChatEncoder:
    """Encodes conversations as a model is given them when it answers.

    Args:
      tokenizer: the model's.
      template: its chat template; None where there is none.

    Attributes:
      end: the token with which the template ends an answer; None where it has none for that.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.end = None if template is None else self._end_of_answer(template)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer or a completion."""
        return sorted({self._tokenizer.eod, *([] if self.end is None else [self.end])})

    def samples(self, chat: Chat) -> tuple[list[EncodedSample], set[str]]:
        """Encodes a conversation.

        Each answer is trained on behind exactly the tokens that the model is given when it is asked for it. Where these
        and the answer begin the sample of the next answer, both are one sample: with most templates, all of them are.

        Returns:
          The samples, and remarks about them (constants of this module, each to follow a number of conversations).

        Raises:
          UserError: there is no template, or it refuses the conversation.
        """
        remarks: set[str] = set()
        if not chat.messages:
            return [self._completion(chat, remarks)], remarks
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat_template to write messages out with: name a Jinja file with "
                "--chat-template, or give rows with a prompt and its completion"
            )
        self._template.check(chat.inputs)
        samples: list[EncodedSample] = []
        for place in chat.trained:
            sample = self._answer(self._template, chat, place, remarks)
            if samples and samples[-1].begins(sample):
                sample = samples.pop().merged_into(sample)
            samples.append(sample)
        if len(samples) > 1:
            remarks.add(SEVERAL)
        return samples, remarks

    def _completion(self, chat: Chat, remarks: set[str]) -> EncodedSample:
        """The tokens of the joined text, of which those that hold a part of the completion are trained on."""
        tokenizer, border = self._tokenizer, len(chat.prompt)
        ids, offsets = tokenizer.encode_offsets(chat.prompt + chat.completion, marked=False)
        first = next((place for place, (_, end) in enumerate(offsets) if end > border), None)
        if first is None:
            raise UserError("the tokenizer makes no tokens of the completion")
        if offsets[first][0] < border or ids[:first] != tokenizer.encode_prompt(chat.prompt)[:first]:
            remarks.add(MERGED)
        if ids[-1] != tokenizer.eod:  # some tokenizers end every text with it
            ids = [*ids, tokenizer.eod]
        return EncodedSample(np.array(ids, np.int32), np.arange(len(ids)) >= first)

    def _answer(self, template: ChatTemplate, chat: Chat, place: int, remarks: set[str]) -> EncodedSample:
        """The sample of one answer."""
        asked = template.render(chat.messages[:place], chat.inputs)
        answered = template.render_tracked(chat.messages[: place + 1], chat.inputs, to_be_answered=False)
        begin, thought = len(asked), ""
        if not answered.text.startswith(asked):
            begin, thought = self._begin_of_answer(template, chat, place, asked, answered.text, remarks)
        if answered.wrote_date:
            remarks.add(DATE)
        ids, offsets, size = self._continued(asked, thought + answered.text[begin:])
        if template.has_generation(chat.inputs):
            moved = len(asked) + len(thought) - begin
            spans = [(start + moved, end + moved) for start, end in answered.generated if end > begin]
            if thought and spans:  # which the template has not written, and so not marked
                spans[0] = (len(asked), spans[0][1])
            trained = _inside(offsets, spans)
            if spans and self.end not in [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]:
                remarks.add(NO_END)
            return EncodedSample(np.array(ids, np.int32), np.array(trained))
        trained = [False] * size + self._up_to_end(ids[size:])
        if self.end is None:  # or the model would never stop
            ids, trained = [*ids, self._tokenizer.eod], [*trained, True]
        return EncodedSample(np.array(ids, np.int32), np.array(trained))

    def _begin_of_answer(
        self, template: ChatTemplate, chat: Chat, place: int, asked: str, answered: str, remarks: set[str]
    ) -> tuple[int, str]:
        """Finds where an answer begins in a text that does not begin with the prompt, and the thoughts missing there.

        Either the text lacks the end of the generation prompt, such as `<think>`, or the template renders the prompt
        differently once the answer is there, such as templates that put the system's message into the last turn.

        Raises:
          UserError: the beginning is not certain.
        """
        message, history = chat.messages[place], chat.messages[:place]
        others = [{"role": ASSISTANT, "content": probe} for probe in PROBES]
        texts = [template.render([*history, other], chat.inputs, to_be_answered=False) for other in others]
        header = _common_prefix(answered, *texts)
        if asked.startswith(header):
            skipped, thought = _thoughts(message, answered[len(header) :], asked[len(header) :], remarks)
            return len(header) + skipped, thought
        generation_prompt = asked.removeprefix(template.render(history, chat.inputs, to_be_answered=False))
        if generation_prompt.strip() and generation_prompt != asked and generation_prompt in header:
            return header.rindex(generation_prompt) + len(generation_prompt), ""
        begin = max(
            range(len(header.rstrip()), len(header) + 1), key=lambda end: len(_common_suffix(asked, header[:end]))
        )
        if not _common_suffix(asked, header[:begin]).strip():
            raise UserError(
                "the chat_template writes the question in one way when it asks for an answer and in another way when "
                "the answer is there, so that it can't be told where the answer begins"
            )
        return begin, ""

    def _continued(self, asked: str, answer: str) -> tuple[list[int], Spans, int]:
        """Encodes a prompt and its answer.

        Returns:
          The tokens of both, the characters of each token, and the number of tokens of the prompt.

        Raises:
          UserError: the tokenizer has no tokens for the answer that go on from there.
        """
        tokenizer = self._tokenizer
        prompt = tokenizer.encode_marked(asked)
        ids, offsets = tokenizer.encode_offsets(asked + answer, marked=True)
        if ids[: len(prompt)] == prompt:
            return ids, offsets, len(prompt)
        # A token holds the end of what is asked and the beginning of the answer; a model that answers can't write it.
        text, before = tokenizer.decode(ids), tokenizer.encode_offsets(asked, marked=True)[1]
        for anchor in ANCHORS:
            lead = len(tokenizer.encode_marked(anchor)) if anchor else 0
            rest, places = tokenizer.encode_offsets(anchor + answer, marked=True)
            if tokenizer.decode([*prompt, *rest[lead:]]) == text:
                moved = len(asked) - len(anchor)
                after = [(max(start, len(anchor)) + moved, end + moved) for start, end in places[lead:]]
                return [*prompt, *rest[lead:]], [*before, *after], len(prompt)
        raise UserError("the tokenizer can't encode an answer apart from what is before it")

    def _up_to_end(self, answer: list[int]) -> list[bool]:
        """True up to the token that ends the answer: a line break behind it is the template's, not the model's."""
        last = max((place for place, token in enumerate(answer) if token == self.end), default=len(answer) - 1)
        return [place <= last for place in range(len(answer))]

    def _end_of_answer(self, template: ChatTemplate) -> int | None:
        """The first special token behind an answer."""
        messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": PROBES[0]}]
        behind = template.render(messages, to_be_answered=False).rpartition(PROBES[0])[2]
        tokens = self._tokenizer.encode_marked(behind)
        return next((token for token in tokens if is_special(self._tokenizer, token)), None)


def _thoughts(message: Message, answer: str, opened: str, remarks: set[str]) -> tuple[int, str]:
    """What to skip of an answer, and what to put before it, behind a generation prompt that has `opened` a thought.

    Args:
      message: the answer's.
      answer: as the template writes it, from the generation prompt's unopened part on.
      opened: the rest of the generation prompt, such as `<think>` and a line break.
      remarks: remarks are added to it.
    """
    tag = re.search(r"<(\w+)>\s*$", opened)
    if tag is None:
        return 0, ""
    begin, end = f"<{tag[1]}>", f"</{tag[1]}>"
    if answer.lstrip().startswith(begin):
        return len(answer) - len(answer.lstrip()[len(begin) :].lstrip("\n")), ""
    content = message.get("content") or ""
    reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), None)
    if end in content:
        thought, _, visible = content.rpartition(end)
        space = "" if answer.startswith(visible) else visible[: len(visible) - len(visible.lstrip())]
        return 0, thought.lstrip().removeprefix(begin).lstrip("\n") + end + space
    if reasoning:
        return 0, reasoning.strip("\n") + f"\n{end}\n\n"
    remarks.add(NO_THOUGHT)
    return 0, ""


def _inside(offsets: Spans, spans: Spans) -> list[bool]:
    """Which tokens hold a character of a span."""
    return [any(begin < stop and start < end for start, stop in spans) for begin, end in offsets]


def _common_prefix(*texts: str) -> str:
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in alike)


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]
