"""Texts that are not text: half of a surrogate pair has no encoding, and so no tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

from mtjax.errors import UserError, lone_surrogate


@contextmanager
def whole_characters(*texts: str) -> Iterator[None]:
    """Encloses the encoding of texts.

    Raises:
      UserError: a text has half of a surrogate pair, which the libraries refuse with errors that don't say so.
    """
    try:
        yield
    except (TypeError, RuntimeError, UnicodeEncodeError):
        if half := next(filter(None, map(lone_surrogate, texts)), None):
            raise UserError(f"a text has {half}: write it in UTF-8") from None
        raise
