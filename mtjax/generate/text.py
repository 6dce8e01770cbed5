"""From tokens to text as they come: entire characters only, and nothing beyond a stop string."""

from collections.abc import Sequence

from mtjax.data.tokens.tokenizer import Tokenizer

CONTEXT = 6
"""Tokens of the prompt that are decoded along: some decoders drop the space at the beginning of a text."""
BROKEN = "\ufffd"
"""What decoders write for bytes that are not a character, or not yet."""


class TextWriter:
    """The text of a sequence of tokens.

    Args:
      tokenizer: the model's.
      prompt: ids that come before; their text is not told.
      stops: strings that end the text.

    Attributes:
      text: what was told so far.
      is_stopped: whether a stop string has come; what follows is not told.
      new: the text that the last token has added, held back or not; "" for a token that leaves a character incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._start, self._decoded = 0, len(self._ids)
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.text, self.is_stopped, self.new = "", False, ""

    def add(self, token: int) -> str:
        """The text that a token makes certain, which may be empty: half a character, or the begin of a stop string."""
        self._ids.append(token)
        self.new = self._new(is_end=False)
        return self._release(self.new, is_end=False)

    def end(self) -> str:
        """What was held back; no token follows."""
        return self._release(self._new(is_end=True), is_end=True)

    def _new(self, is_end: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._decoded])
        now = self._tokenizer.decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(BROKEN) and not is_end):
            return ""
        self._start, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def _release(self, new: str, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        held = self._held + new
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            held, self._held, self.is_stopped = held[: min(found)], "", True
        elif is_end:
            self._held = ""
        else:
            held_back = max((overlap(held, stop) for stop in self._stops), default=0)
            held, self._held = held[: len(held) - held_back], held[len(held) - held_back :]
        self.text += held
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
