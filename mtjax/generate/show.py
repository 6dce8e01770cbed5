"""Prints generated text token by token, optionally colored by probability."""

import math
from typing import TextIO

from mtjax.generate.completion import Piece

COLORS = (160, 166, 172, 178, 184, 148, 112, 76, 40)
"""Color numbers of xterm's palette of 256, from red to green."""


class TextPrinter:
    """Prints pieces of text to a stream.

    Args:
      stream: standard output.
      with_logprobs: whether to color tokens by probability; if the stream is not a terminal, whether to print one token
        a line with its log-probability.
    """

    def __init__(self, stream: TextIO, with_logprobs: bool) -> None:
        self._stream, self._with_logprobs = stream, with_logprobs
        self._in_colors = with_logprobs and stream.isatty()

    def title(self, text: str) -> None:
        """Prints a title line."""
        self._write(f"--- {text}\n")

    def piece(self, piece: Piece) -> None:
        """Prints a piece of a text."""
        logprob = None if piece.token is None else piece.token.logprob
        if self._in_colors and logprob is not None:
            self._write(f"\x1b[38;5;{color(logprob)}m{piece.text}\x1b[0m")
        elif self._with_logprobs and not self._in_colors:
            number = "" if logprob is None else f"{logprob:.4f}"
            # repr: a line break within a token would end the line.
            self._write(f"{number}\t{piece.text!r}\n")
        else:
            self._write(piece.text)

    def end(self) -> None:
        """Ends a text."""
        self._write("" if self._with_logprobs and not self._in_colors else "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def color(logprob: float) -> int:
    """Returns the color number for a log-probability; the colors divide probabilities into equal intervals."""
    # Rounding can give a log-probability slightly above 0.
    return COLORS[min(int(math.exp(min(logprob, 0.0)) * len(COLORS)), len(COLORS) - 1)]
