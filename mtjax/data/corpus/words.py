"""The words of `--data`: datasets between spaces, and files of one dataset between commas, quoted as in a shell."""

from pathlib import Path
from typing import NamedTuple

from mtjax.config.repeated import SPACES, quoted
from mtjax.errors import UserError


class Word(NamedTuple):
    """A word of `--data`: what is between its commas, except quoted ones."""

    pieces: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.pieces)

    def quoted(self) -> str:
        """Returns the word as `split_words` reads it."""
        return ",".join(quoted(piece) for piece in self.pieces)


def split_words(text: str) -> list[Word]:
    """Splits text at spaces, and each word at commas.

    A word that is the path of a file as it is has one piece, whatever commas it has.

    Raises:
      UserError: a quote has no end.
    """
    words: list[list[str]] = []
    inside, quote, escaped = False, "", False
    for character in text:
        if not inside and character in SPACES:
            continue
        if not inside:
            words.append([""])
            inside = True
        if escaped:
            # As in a shell: between double quotes a backslash escapes only these.
            words[-1][-1] += character if not quote or character in '"\\' else f"\\{character}"
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif character == quote:
            quote = ""
        elif quote:
            words[-1][-1] += character
        elif character in "'\"":
            quote = character
        elif character in SPACES:
            inside = False
        elif character == ",":
            words[-1].append("")
        else:
            words[-1][-1] += character
    if quote or escaped:
        raise UserError(f"data {text!r} has {'a quote' if quote else 'a backslash'} without its end")
    return [_word(pieces) for pieces in words]


def _word(pieces: list[str]) -> Word:
    path = ",".join(pieces)
    return Word((path,)) if len(pieces) > 1 and Path(path).expanduser().exists() else Word(tuple(pieces))
