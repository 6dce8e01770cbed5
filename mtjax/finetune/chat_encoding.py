"""Encodes conversations: prompts with the tokens that the model gets at inference, and a mask of trained tokens."""

import re
from collections.abc import Callable, Sequence
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
"""Placeholder answers, to find the text around an answer; they begin with different letters."""
ANCHORS = ("", "\n", ".")
"""Texts to put before a continuation, so that a tokenizer that marks beginnings of words does not mark its first."""
DATE = "contain the current date, from the chat template: resumed on another day, the run is trained on another date"
MERGED = (
    "have a token that spans the end of the prompt and the beginning of the completion, which differs from the tokens "
    "of the prompt alone: begin completions with the space between the two"
)
SEVERAL = (
    "are split into several samples, usually one per answer, because the chat template renders an answer differently "
    "when later messages follow"
)
NO_END = "have {% generation %} blocks without the token that ends an answer: the model is not trained to stop"
NO_THOUGHT = "have answers without reasoning, though the generation prompt opens it: answers follow it directly"


@dataclass(frozen=True)
class EncodedSample:
    """A sample's tokens.

    Attributes:
      ids: int32 [tokens].
      trained: bool [tokens]: whether the loss includes the token.
      passages: of a Retro: their tokens, int32 [neighbours, tokens], which `mtjax.finetune.passages` lays out.
    """

    ids: np.ndarray
    trained: np.ndarray
    passages: np.ndarray | None = None

    def begins(self, other: "EncodedSample") -> bool:
        """Returns whether the other sample begins with this one, up to its last trained token."""
        # What follows the last trained token, such as a line break of the template, may differ.
        size = int(np.flatnonzero(self.trained).max(initial=-1)) + 1
        return np.array_equal(self.ids[:size], other.ids[:size])

    def merged_into(self, other: "EncodedSample") -> "EncodedSample":
        """Returns the other sample, which this one `begins`, with the trained tokens of both."""
        trained, size = other.trained.copy(), min(len(self.ids), len(other.ids))
        trained[:size] |= self.trained[:size]
        return EncodedSample(other.ids, trained)


WithPassages = Callable[[EncodedSample, Sequence[str], set[str]], EncodedSample]
"""Lays out a sample with the passages that its completion reads, and adds remarks."""


class ChatEncoder:
    """Encodes conversations with the same tokens as at inference.

    Args:
      tokenizer: the model's tokenizer.
      template: its chat template, if any.
      with_passages: lays out samples with passages, of a Retro.

    Attributes:
      end: the token with which the template ends an answer, if any.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, with_passages: "WithPassages | None" = None
    ) -> None:
        self._tokenizer, self._template, self._with_passages = tokenizer, template, with_passages
        self.end = None if template is None else self._end_of_answer(template)

    @property
    def ends(self) -> list[int]:
        """Ids of tokens that end an answer or a completion."""
        return sorted({self._tokenizer.eod, *([] if self.end is None else [self.end])})

    def samples(self, chat: Chat) -> tuple[list[EncodedSample], set[str]]:
        """Encodes a conversation.

        Each answer is trained on after exactly the tokens that the model gets at inference. If prompt and answer are a
        prefix of the next answer's sample, the two are merged; with most templates, a conversation is one sample.

        Returns:
          The samples, and remarks about them (constants of this module, to be printed after a number of conversations).

        Raises:
          UserError: there is no template, or it raises an error.
        """
        remarks: set[str] = set()
        if not chat.messages:
            sample = self._completion(chat, remarks)
            if chat.passages is not None:
                assert self._with_passages is not None  # only rows of a Retro have passages
                sample = self._with_passages(sample, chat.passages, remarks)
            return [sample], remarks
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat_template to render messages: add --chat-template FILE (Jinja), or use rows "
                "with prompt and completion"
            )
        self._template.check(chat.inputs)
        samples: list[EncodedSample] = []
        for number in chat.trained:
            sample = self._answer(self._template, chat, number, remarks)
            # With most templates, each prompt begins with the previous one and its answer.
            if samples and samples[-1].begins(sample):
                sample = samples.pop().merged_into(sample)
            samples.append(sample)
        if len(samples) > 1:
            remarks.add(SEVERAL)
        return samples, remarks

    def _completion(self, chat: Chat, remarks: set[str]) -> EncodedSample:
        """Encodes prompt and completion as one text; tokens that contain characters of the completion are trained."""
        tokenizer, border = self._tokenizer, len(chat.prompt)
        # Together: alone, the completion would get the space with which some tokenizers begin a text.
        ids, offsets = tokenizer.encode_offsets(chat.prompt + chat.completion, marked=False)
        first = next((index for index, (_, end) in enumerate(offsets) if end > border), None)
        if first is None:
            raise UserError("the tokenizer encodes the completion to no tokens")
        if offsets[first][0] < border or ids[:first] != tokenizer.encode_prompt(chat.prompt)[:first]:
            remarks.add(MERGED)
        if ids[-1] != tokenizer.eod:  # some tokenizers append it to every text
            ids = [*ids, tokenizer.eod]
        return EncodedSample(np.array(ids, np.int32), np.arange(len(ids)) >= first)

    def _answer(self, template: ChatTemplate, chat: Chat, number: int, remarks: set[str]) -> EncodedSample:
        """Encodes the sample of one answer, the message with index `number`."""
        # As the server renders it when it is asked for this answer.
        prompt = template.render(chat.messages[:number], chat.inputs)
        answered = template.render_tracked(chat.messages[: number + 1], chat.inputs, to_be_answered=False)
        begin, thought = len(prompt), ""
        # Most templates render an answer after the generation prompt; some change what is before it.
        if not answered.text.startswith(prompt):
            begin, thought = self._begin_of_answer(template, chat, number, prompt, answered.text, remarks)
        if answered.wrote_date:
            remarks.add(DATE)
        ids, offsets, size = self._continued(prompt, thought + answered.text[begin:])
        if template.has_generation(chat.inputs):
            shift = len(prompt) + len(thought) - begin
            # Blocks of earlier answers end before this one begins: these are trained on in samples of their own.
            spans = [(start + shift, end + shift) for start, end in answered.generated if end > begin]
            if thought and spans:  # the template has not rendered the reasoning, and therefore not marked it
                spans[0] = (len(prompt), spans[0][1])
            trained = _inside(offsets, spans)
            if spans and self.end not in [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]:
                remarks.add(NO_END)
            return EncodedSample(np.array(ids, np.int32), np.array(trained))
        trained = [False] * size + self._up_to_end(ids[size:])
        if self.end is None:  # otherwise the model would not be trained to stop
            ids, trained = [*ids, self._tokenizer.eod], [*trained, True]
        return EncodedSample(np.array(ids, np.int32), np.array(trained))

    def _begin_of_answer(
        self, template: ChatTemplate, chat: Chat, number: int, prompt: str, answered: str, remarks: set[str]
    ) -> tuple[int, str]:
        """Finds where an answer begins in a text that does not begin with the prompt, and the reasoning missing there.

        Raises:
          UserError: the beginning is ambiguous.
        """
        message, history = chat.messages[number], chat.messages[:number]
        probes = [{"role": ASSISTANT, "content": probe} for probe in PROBES]
        texts = [template.render([*history, probe], chat.inputs, to_be_answered=False) for probe in probes]
        # What is the same for any answer is the text before it.
        header = _common_prefix(answered, *texts)
        # The text lacks the end of the generation prompt, such as `<think>`.
        if prompt.startswith(header):
            skipped, thought = _thoughts(message, answered[len(header) :], prompt[len(header) :], remarks)
            return len(header) + skipped, thought
        # The template renders the prompt differently when an answer follows: some put the system message into the last
        # user message.
        generation_prompt = prompt.removeprefix(template.render(history, chat.inputs, to_be_answered=False))
        if generation_prompt.strip() and generation_prompt != prompt and generation_prompt in header:
            return header.rindex(generation_prompt) + len(generation_prompt), ""
        # The header may end with white space that belongs to the answer: prefer the end that matches the prompt best.
        begin = max(
            range(len(header.rstrip()), len(header) + 1), key=lambda end: len(_common_suffix(prompt, header[:end]))
        )
        if not _common_suffix(prompt, header[:begin]).strip():
            raise UserError(
                "the chat_template renders the conversation differently with and without the answer, so the beginning "
                "of the answer can't be found"
            )
        return begin, ""

    def _continued(self, prompt: str, answer: str) -> tuple[list[int], Spans, int]:
        """Encodes a prompt and its answer.

        Returns:
          The tokens of both, the characters of each token, and the number of tokens of the prompt.

        Raises:
          UserError: the tokenizer can't encode the answer after the tokens of the prompt.
        """
        tokenizer = self._tokenizer
        prompt_ids = tokenizer.encode_marked(prompt)
        ids, offsets = tokenizer.encode_offsets(prompt + answer, marked=True)
        if ids[: len(prompt_ids)] == prompt_ids:
            return ids, offsets, len(prompt_ids)
        # A token spans the end of the prompt and the beginning of the answer, which the model can't generate after the
        # prompt: encode the answer separately.
        text, prompt_offsets = tokenizer.decode(ids), tokenizer.encode_offsets(prompt, marked=True)[1]
        # An anchor is right if prompt and answer decode to the whole text: neither a space is added nor one lost.
        for anchor in ANCHORS:
            lead = len(tokenizer.encode_marked(anchor)) if anchor else 0
            anchored_ids, anchored_offsets = tokenizer.encode_offsets(anchor + answer, marked=True)
            if tokenizer.decode([*prompt_ids, *anchored_ids[lead:]]) == text:
                shift = len(prompt) - len(anchor)
                after = [(max(start, len(anchor)) + shift, end + shift) for start, end in anchored_offsets[lead:]]
                return [*prompt_ids, *anchored_ids[lead:]], [*prompt_offsets, *after], len(prompt_ids)
        raise UserError("the tokenizer can't encode the answer separately from the prompt")

    def _up_to_end(self, answer: list[int]) -> list[bool]:
        """Returns True up to the token that ends the answer; a line break after it is part of the template."""
        last = max((index for index, token in enumerate(answer) if token == self.end), default=len(answer) - 1)
        return [index <= last for index in range(len(answer))]

    def _end_of_answer(self, template: ChatTemplate) -> int | None:
        """Returns the first special token after an answer, if any."""
        messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": PROBES[0]}]
        # From a separate conversation: whether an answer ends with a token depends on the template alone.
        after_answer = template.render(messages, to_be_answered=False).rpartition(PROBES[0])[2]
        tokens = self._tokenizer.encode_marked(after_answer)
        return next((token for token in tokens if is_special(self._tokenizer, token)), None)


def _thoughts(message: Message, answer: str, opened: str, remarks: set[str]) -> tuple[int, str]:
    """Finds the reasoning of an answer after a generation prompt that ends with a tag such as `<think>`.

    Args:
      message: the answer.
      answer: the answer as rendered, from the end of the text that it has in common with the prompt.
      opened: the end of the generation prompt, such as `<think>` and a line break.
      remarks: remarks are added to it.

    Returns:
      The number of characters of `answer` to skip, and the reasoning to insert before it.
    """
    tag = re.search(r"<(\w+)>\s*$", opened)
    if tag is None:
        return 0, ""
    begin, end = f"<{tag[1]}>", f"</{tag[1]}>"
    # The prompt has the tag already, so the one that the template renders again is skipped.
    if answer.lstrip().startswith(begin):
        return len(answer) - len(answer.lstrip()[len(begin) :].lstrip("\n")), ""
    content = message.get("content") or ""
    reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), None)
    if end in content:
        # The last end: reasoning may mention the tag.
        thought, _, visible = content.rpartition(end)
        space = "" if answer.startswith(visible) else visible[: len(visible) - len(visible.lstrip())]
        return 0, thought.lstrip().removeprefix(begin).lstrip("\n") + end + space
    if reasoning:
        # As Qwen3's template renders reasoning.
        return 0, reasoning.strip("\n") + f"\n{end}\n\n"
    remarks.add(NO_THOUGHT)
    return 0, ""


def _inside(offsets: Spans, spans: Spans) -> list[bool]:
    """Returns for each token whether it contains a character of a span."""
    return [any(begin < stop and start < end for start, stop in spans) for begin, end in offsets]


def _common_prefix(*texts: str) -> str:
    common = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in common)


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]
