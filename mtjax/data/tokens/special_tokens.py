"""Special tokens of an opened tokenizer: those that it adds to a text, and those that its folder names."""

from pathlib import Path
from typing import NamedTuple

from mtjax.data.tokens.pretrained_settings import special_names_in
from mtjax.data.tokens.tokenizer import Tokenizer

PROBE = "a"
"""A text that every vocabulary can encode."""


class Added(NamedTuple):
    """Ids that a tokenizer adds to a text, such as Llama's `<s>` in front."""

    front: list[int]
    back: list[int]


def added_tokens(tokenizer: Tokenizer) -> Added:
    """Returns the ids that `encode_prompt` adds to those of `encode`."""
    plain, prompt = tokenizer.encode(PROBE), tokenizer.encode_prompt(PROBE)
    for at in range(len(prompt) - len(plain) + 1):
        if prompt[at : at + len(plain)] == plain:
            return Added(prompt[:at], prompt[at + len(plain) :])
    return Added([], [])


def named_token(tokenizer: Tokenizer, folder: Path, name: str) -> int | None:
    """Returns the id of the token that the settings in a folder call `bos_token` or the like; None without one.

    Raises:
      UserError: a file of settings is not a JSON object.
    """
    text = special_names_in(folder).get(name)
    return None if text is None else tokenizer.special(text)
