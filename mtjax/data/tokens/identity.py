"""Whether two tokenizers are the same: judged by their vocabulary and by what they make of text, not by their files.

The same tokenizer has many files: GPT-2's `encoder.json` and `vocab.bpe` or a `tokenizer.json`, written by one version
of a library or another. What matters for token ids, and for the rows of an embedding, is which token each id is
and how text is cut into tokens.
"""

import hashlib
import json
from functools import lru_cache

from mtjax.data.tokens.tokenizer import Tokenizer, path_of

PROBES = (
    "The quick brown fox's 12 words; it's 3.14159 and 2,048 - isn't IT?",
    "  two  spaces,\ttabs\nand\n\nlines \r\n ending here ",
    "def f(x): return {'a': [x ** 2, -1]} != None  # under_score camelCase <s> </s> [MASK] <|endoftext|>",
    "Z\u00fcrich, na\u00efve e\u0301 Stra\u00dfe \ufb01ne \u00a0\u2028 \u4e2d\u6587\u5b57 \U0001f600",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u65e5\u672c\u8a9e",
)
"""Texts whose ids distinguish normalization, pre-tokenization and merges. Never change them: recorded digests depend on
them."""


@lru_cache(maxsize=8)
def content_digest(tokenizer: Tokenizer, size: int | None = None) -> str:
    """Returns a hash of the vocabulary and of the ids of some texts: equal for equal tokenizers in any file format.

    Args:
      tokenizer: whose content it is.
      size: only so many tokens count, from the first on: the digest of a tokenizer that has none of those added later.
    """
    # Without the end of document, which a corpus records on its own.
    content = [_tokens(tokenizer)[:size], [tokenizer.encode(text) for text in PROBES]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def difference(theirs: Tokenizer, ours: Tokenizer, *, may_add: bool = False) -> str | None:
    """Returns how two tokenizers differ, called "there" and "here"; None when they are the same.

    Args:
      theirs: the one "there".
      ours: the one "here".
      may_add: tokens that `ours` has after all of `theirs` do not count: the ids of the others mean the same.
    """
    there, here = _tokens(theirs), _tokens(ours)
    # The first different token is what tells a user which tokenizer it is.
    for index, (one, other) in enumerate(zip(there, here, strict=False)):
        if one != other:
            return f"token {index} is {one!r} there and {other!r} here"
    if len(there) > len(here) or (len(there) < len(here) and not may_add):
        return f"{len(there):,} tokens there and {len(here):,} here"
    if theirs.eod != ours.eod:
        return f"a document ends with token {theirs.eod} there and {ours.eod} here"
    different = next((text for text in PROBES if theirs.encode(text) != ours.encode(text)), None)
    return None if different is None else f"they cut {different!r} into different tokens"


def prompt_difference(theirs: Tokenizer, ours: Tokenizer) -> str | None:
    """Returns how two tokenizers differ as `difference` does, or that they put different tokens around a prompt."""
    if why := difference(theirs, ours):
        return why
    same = theirs.encode_prompt(PROBES[0]) == ours.encode_prompt(PROBES[0])
    return None if same else "they add different tokens to a prompt"


def same_path(one: str, other: str) -> bool:
    """Returns whether two names of tokenizers have the same path."""
    return path_of(one).absolute() == path_of(other).absolute()


@lru_cache(maxsize=8)
def _tokens(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token(index) for index in range(tokenizer.vocab_size)]
