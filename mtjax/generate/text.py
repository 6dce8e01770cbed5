"""Incremental detokenization: complete characters only, and nothing beyond a stop sequence."""

from collections.abc import Sequence

from mtjax.data.tokens.tokenizer import Tokenizer

CONTEXT = 6
"""Prompt tokens that are decoded together with the text: some tokenizers drop a space at the start of a text."""
BROKEN = "\ufffd"
"""Replacement character, to which tokenizers decode the bytes of an incomplete character."""


class TextWriter:
    """Decodes a sequence of tokens one by one.

    Args:
      tokenizer: the model's tokenizer.
      prompt: ids before the text; they are not part of it.
      stops: stop sequences.

    Attributes:
      text: the final text so far.
      is_stopped: whether a stop sequence was found; further tokens are ignored.
      new: the text that the last token has added, held back or not; "" for a token that leaves a character incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._start, self._decoded = 0, len(self._ids)
        # An empty stop sequence is found in every text, and would end it before its first token.
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.text, self.is_stopped, self.new = "", False, ""

    def add(self, token: int) -> str:
        """Adds a token; returns text that became final: "" within a character or a possible stop sequence."""
        self._ids.append(token)
        self.new = self._new(is_end=False)
        return self._release(self.new, is_end=False)

    def end(self) -> str:
        """Ends the text; returns what was held back."""
        return self._release(self._new(is_end=True), is_end=True)

    def _new(self, is_end: bool) -> str:
        """Decodes the text of the tokens since the last complete character."""
        # Tokens are decoded together with those before them: a token alone may decode to a different text.
        before = self._tokenizer.decode(self._ids[self._start : self._decoded])
        now = self._tokenizer.decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(BROKEN) and not is_end):
            return ""
        # Only tokens of the last complete piece are decoded again: the cost per token does not grow with the text.
        self._start, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def _release(self, new: str, is_end: bool) -> str:
        """Appends new text; returns what can no longer become part of a stop sequence."""
        if self.is_stopped:
            return ""
        held = self._held + new
        # What is no longer held can't be part of a stop sequence, so the search need not begin earlier.
        found = [index for stop in self._stops if (index := held.find(stop)) >= 0]
        if found:
            # The first one in the text, whichever was named first.
            held, self._held, self.is_stopped = held[: min(found)], "", True
        elif is_end:
            self._held = ""
        else:
            held_back = max((overlap(held, stop) for stop in self._stops), default=0)
            held, self._held = held[: len(held) - held_back], held[len(held) - held_back :]
        self.text += held
        return held


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
