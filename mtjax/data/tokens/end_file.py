"""The end of document that was chosen for a tokenizer, saved next to its file: a vocabulary does not have it."""

import json
from pathlib import Path

from mtjax.data.tokens.pretrained_settings import read_object
from mtjax.errors import UserError

TOKENIZER_JSON, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
"""What a run's tokenizer is saved as."""
END_FILE = "end_of_document.json"


def save_end(folder: Path, token: str | None) -> None:
    """Writes the end of document that was chosen next to a tokenizer; removes an earlier one where none was."""
    if token is None:
        (folder / END_FILE).unlink(missing_ok=True)
        return
    temporary = folder / f".{END_FILE}.tmp"
    temporary.write_bytes(end_content(token))
    # A rename, so that no other process reads a half.
    temporary.replace(folder / END_FILE)


def end_content(token: str) -> bytes:
    """Returns the content of `END_FILE`."""
    return (json.dumps({"eod_token": token}) + "\n").encode()


def saved_end(path: Path) -> str | None:
    """Reads the end of document that was saved with a tokenizer's file; None where it was not chosen.

    Raises:
      UserError: the file is not a JSON object with a token.
    """
    # The file is about the tokenizer that mtjax saved, not about others in that folder.
    if path.name not in (TOKENIZER_JSON, SENTENCEPIECE_FILE):
        return None
    found = read_object(path.parent / END_FILE).get("eod_token")
    if found is not None and not isinstance(found, str):
        raise UserError(f"{path.parent / END_FILE}: eod_token is {found!r}, and must be a token")
    return found
