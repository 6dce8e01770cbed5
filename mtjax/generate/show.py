"""Text on a terminal or in a pipe, as it comes; in colours by probability where that is asked for."""

import math
from typing import TextIO

from mtjax.generate.completion import Piece

COLOURS = (160, 166, 172, 178, 184, 148, 112, 76, 40)
"""Of xterm's 256, from red to green."""


class TextPrinter:
    """Writes pieces to a stream.

    Args:
      stream: standard output.
      with_logprobs: on a terminal, in colours; elsewhere a token and its log-probability a line.
    """

    def __init__(self, stream: TextIO, with_logprobs: bool) -> None:
        self._stream, self._with_logprobs = stream, with_logprobs
        self._in_colours = with_logprobs and stream.isatty()

    def title(self, text: str) -> None:
        """A line above a text."""
        self._write(f"--- {text}\n")

    def piece(self, piece: Piece) -> None:
        """A piece of a text."""
        logprob = None if piece.token is None else piece.token.logprob
        if self._in_colours and logprob is not None:
            self._write(f"\x1b[38;5;{colour(logprob)}m{piece.text}\x1b[0m")
        elif self._with_logprobs and not self._in_colours:
            number = "" if logprob is None else f"{logprob:.4f}"
            self._write(f"{number}\t{piece.text!r}\n")
        else:
            self._write(piece.text)

    def end(self) -> None:
        """Ends a text."""
        self._write("" if self._with_logprobs and not self._in_colours else "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def colour(logprob: float) -> int:
    """The colour of a token of this log-probability: in equal steps of probability."""
    return COLOURS[min(int(math.exp(min(logprob, 0.0)) * len(COLOURS)), len(COLOURS) - 1)]
