"""The tokens before a text: BOS, or what a model uses in its place."""

from collections.abc import Mapping
from typing import Any

from mtjax.convert.saved_model import SavedModel
from mtjax.data.tokens.pretrained_settings import special_names_in
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.data.tokens.tokenizer import Tokenizer


def first_tokens(tokenizer: Tokenizer, names: Mapping[str, str], config: Mapping[str, Any]) -> list[int]:
    """Returns the ids to put before a text so that all of its tokens, including the first, can be scored.

    These are the tokens that the tokenizer adds before a text; else the `bos_token` of its settings; else the
    `bos_token_id` of the model's config; else the end-of-document token, after which documents start in training.

    Args:
      tokenizer: the tokenizer that encodes the text.
      names: special tokens by their role, such as `bos_token`, from the tokenizer's settings (`special_names_in`).
      config: Hugging Face's `config.json` of the model; empty if there is none.
    """
    # What the tokenizer does in fact precedes what its settings name: Llama's adds BOS, GPT-2's names one and adds
    # none.
    if front := added_tokens(tokenizer).front:
        return front
    named = tokenizer.special(names["bos_token"]) if "bos_token" in names else None
    if named is not None:
        return [named]
    given = config.get("bos_token_id")
    # Transformers writes a default id into configs even if that id is an ordinary token of the model's tokenizer.
    if type(given) is int and 0 <= given < tokenizer.vocab_size and is_special(tokenizer, given):
        return [given]
    return [tokenizer.eod]


def first_tokens_of(saved: SavedModel, tokenizer: Tokenizer) -> list[int]:
    """Returns `first_tokens` for saved weights.

    Raises:
      UserError: a settings file is not a JSON object.
    """
    origin = saved.source.origin
    return first_tokens(tokenizer, special_names_in(origin.files), origin.hugging_face)


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """Returns whether a token is special: its name encodes to it only if special tokens in the text are enabled."""
    name = tokenizer.token(index)
    return tokenizer.encode_marked(name) == [index] != tokenizer.encode(name)
