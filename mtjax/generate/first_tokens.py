"""The special tokens that a tokenizer adds to a text, and the token after which a text begins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtjax.convert.saved_model import SavedModel
from mtjax.data.tokens.pretrained_settings import CONFIG, SPECIAL, read_object
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.generate.chat import special_names

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


def first_tokens(tokenizer: Tokenizer, folder: Path | None, config: Mapping[str, Any]) -> list[int]:
    """Returns the ids that stand before a text of which every token is to be predicted.

    These are the tokens that the tokenizer puts in front of a text; else the `bos_token` that its settings name; else
    the `bos_token_id` of the model's config; else the token that ends documents, after which the next one begins.

    Args:
      tokenizer: encodes the text.
      folder: has the tokenizer's settings, if there are any.
      config: Hugging Face's `config.json` of the model; empty where there is none.

    Raises:
      UserError: a file of settings is not a JSON object.
    """
    if front := added_tokens(tokenizer).front:
        return front
    named = None if folder is None else named_token(tokenizer, folder, "bos_token")
    if named is not None:
        return [named]
    given = config.get("bos_token_id")
    # transformers writes a default id into configs of models whose tokenizer has an ordinary token there.
    if type(given) is int and 0 <= given < tokenizer.vocab_size and is_special(tokenizer, given):
        return [given]
    return [tokenizer.eod]


def first_tokens_of(saved: SavedModel, tokenizer: Tokenizer) -> list[int]:
    """Returns `first_tokens` for saved weights.

    Raises:
      UserError: a file of settings is not a JSON object.
    """
    origin = saved.source.origin
    return first_tokens(tokenizer, origin.files, origin.hugging_face)


def named_token(tokenizer: Tokenizer, folder: Path, name: str) -> int | None:
    """Returns the id of the token that the tokenizer's settings call `bos_token` or the like; None without one.

    Raises:
      UserError: a file of settings is not a JSON object.
    """
    names = special_names(read_object(folder / CONFIG), read_object(folder / SPECIAL))
    return tokenizer.special(names[name]) if name in names else None


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """Tells special tokens from words: their names in a text are tokens only where the text is encoded as marked."""
    name = tokenizer.token(index)
    return tokenizer.encode_marked(name) == [index] != tokenizer.encode(name)
