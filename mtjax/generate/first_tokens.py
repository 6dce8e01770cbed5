"""The tokens after which a text begins."""

from collections.abc import Mapping
from typing import Any

from mtjax.convert.saved_model import SavedModel
from mtjax.data.tokens.pretrained_settings import special_names_in
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.data.tokens.tokenizer import Tokenizer


def first_tokens(tokenizer: Tokenizer, names: Mapping[str, str], config: Mapping[str, Any]) -> list[int]:
    """Returns the ids that stand before a text of which every token is to be predicted.

    These are the tokens that the tokenizer puts in front of a text; else the `bos_token` that its settings name; else
    the `bos_token_id` of the model's config; else the token that ends documents, after which the next one begins.

    Args:
      tokenizer: encodes the text.
      names: of special tokens, such as `bos_token`, by the tokenizer's settings (`special_names_in`).
      config: Hugging Face's `config.json` of the model; empty where there is none.
    """
    if front := added_tokens(tokenizer).front:
        return front
    named = tokenizer.special(names["bos_token"]) if "bos_token" in names else None
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
    return first_tokens(tokenizer, special_names_in(origin.files), origin.hugging_face)


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """Tells special tokens from words: their names in a text are tokens only where the text is encoded as marked."""
    name = tokenizer.token(index)
    return tokenizer.encode_marked(name) == [index] != tokenizer.encode(name)
