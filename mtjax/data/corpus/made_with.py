"""Which tokenizer made a corpus, by the record beside it, and whether a given one is the same."""

from collections.abc import Sequence
from pathlib import Path

from mtjax.data.corpus.meta import Meta
from mtjax.data.tokens.identity import content_digest, difference, same_path
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer, path_of
from mtjax.errors import UserError


def check_made_with(prefix: str | Path, meta: Meta | None, name: str, tokenizer: Tokenizer) -> str | None:
    """Checks that a corpus was made with a tokenizer: the same ids mean other text with another one.

    Args:
      prefix: of the corpus.
      meta: its record; None where there is none, as beside Megatron-LM's own files, which is believed.
      name: what the tokenizer is called.
      tokenizer: with which the corpus is about to be read.

    Returns:
      What could not be compared, or where documents end with another token, for the user; None when all is the same.

    Raises:
      UserError: it was made with another one; names both.
    """
    note = check_ids(prefix, meta, name, tokenizer)
    # A note, no error: the ids mean the same text, and only where documents end is read differently.
    return note or (None if meta is None else _other_end(prefix, meta, name, tokenizer))


def check_ids(
    prefix: str | Path,
    meta: Meta | None,
    name: str,
    tokenizer: Tokenizer,
    *,
    may_add: bool = False,
    remedy: str | None = None,
) -> str | None:
    """Checks that the ids of a corpus mean the same text as those of a tokenizer, wherever documents end.

    Args:
      prefix: as `check_made_with` takes it.
      meta: as `check_made_with` takes it.
      name: as `check_made_with` takes it.
      tokenizer: as `check_made_with` takes it.
      may_add: tokens that it has after all of those of the corpus do not count: the other ids mean the same.
      remedy: what the user can do about another tokenizer, as a clause; preprocessing's when None.

    Returns:
      What could not be compared, or was added, for the user; None where there is nothing.

    Raises:
      UserError: the corpus was made with another tokenizer; names both.
    """
    if meta is None:
        return None
    ours, theirs = tokenizer.vocab_size, meta.vocab_size
    added = None
    if may_add and theirs is not None and theirs < ours:
        added = f"{prefix} was made with {_described(meta)}; {name} has {ours - theirs:,} more, which are not in it"
    is_longer = added is not None
    if meta.tokenizer_digest is not None:
        if meta.tokenizer_digest != content_digest(tokenizer, theirs if is_longer else None):
            raise _other(prefix, meta, name, tokenizer, None, remedy)
        return added
    # A record of an earlier version has the tokenizer's path, its size and its end of document.
    if theirs not in (None, ours) and not is_longer:
        raise _other(prefix, meta, name, tokenizer, None, remedy)
    if meta.eod not in (None, tokenizer.eod):
        why = f"a document ends with token {meta.eod} there and {tokenizer.eod} here"
        raise _other(prefix, meta, name, tokenizer, why, remedy)
    recorded = _recorded_tokenizer(meta)
    if recorded is not None:
        if why := difference(recorded, tokenizer, may_add=may_add):
            raise _other(prefix, meta, name, tokenizer, why, remedy)
        return added
    if is_longer:
        raise _other(prefix, meta, name, tokenizer, None, remedy)
    if meta.tokenizer is None:
        return None
    return (
        f"{prefix} was made with the tokenizer {meta.tokenizer}, which is not there any more: {name} is taken for the "
        f"same, because it also has {ours:,} tokens"
    )


def _other_end(prefix: str | Path, meta: Meta, name: str, tokenizer: Tokenizer) -> str | None:
    """Returns a note where the documents of a corpus end with another token than the tokenizer ends them with."""
    if meta.eod in (None, tokenizer.eod):
        return None
    theirs, ours = tokenizer.token(meta.eod), tokenizer.token(tokenizer.eod)
    return (
        f"{prefix} was made with {theirs} at the end of documents, and {name} ends them with {ours}: --eod-token "
        f"'{theirs}' reads it as it was made"
    )


def check_same_maker(corpora: Sequence[tuple[str | Path, Meta]]) -> str | None:
    """Checks that corpora were made with the same tokenizer, as far as their records and the files named there say.

    Args:
      corpora: prefixes and their records.

    Returns:
      Which two could not be compared, and why, as a clause; None when all were.

    Raises:
      UserError: two were made with different tokenizers; names both.
    """
    doubt = None
    (first, one), *others = corpora
    # A lone corpus has nothing to be compared with: its tokenizer need not be opened.
    digest = digest_in(one) if others else None
    for prefix, other in others:
        digests = (digest, digest_in(other))
        sizes = [(a, b) for a, b in ((one.vocab_size, other.vocab_size), (one.eod, other.eod)) if None not in (a, b)]
        both = f"{first} with {_described(one)} and {prefix} with {_described(other)}"
        if (None not in digests and digests[0] != digests[1]) or any(a != b for a, b in sizes):
            raise UserError(
                f"the corpora were made with different tokenizers, {both}: preprocess the text of one of them again "
                "with the tokenizer of the other"
            )
        if None in digests and one.tokenizer != other.tokenizer:
            doubt = (
                f"the corpora were made, as their records say, {both}, and whether these are the same can't be "
                "compared: a file is gone, and its record is of an earlier version, without a digest"
            )
    return doubt


def digest_in(meta: Meta) -> str | None:
    """Returns the recorded digest of a corpus's tokenizer, else that of the file at its path; None when unknown."""
    if meta.tokenizer_digest is not None:
        return meta.tokenizer_digest
    recorded = _recorded_tokenizer(meta)
    return None if recorded is None else content_digest(recorded)


def _recorded_tokenizer(meta: Meta) -> Tokenizer | None:
    """Opens the tokenizer that a record without a digest names; None when its file is gone, or now has another size.

    Raises:
      UserError: the file is there, and can't be read.
    """
    if meta.tokenizer is None or not path_of(meta.tokenizer).exists():
        return None
    tokenizer = open_tokenizer(meta.tokenizer)
    # A tokenizer of another size has replaced the one that made the corpus.
    return tokenizer if meta.vocab_size in (None, tokenizer.vocab_size) else None


def _other(
    prefix: str | Path, meta: Meta, name: str, tokenizer: Tokenizer, why: str | None, remedy: str | None
) -> UserError:
    """Builds the error of a corpus that was tokenized with another tokenizer."""
    ours = f"{tokenizer.vocab_size:,} tokens"
    because = f" ({why})" if why else ""
    if meta.tokenizer is not None and same_path(meta.tokenizer, name):
        return UserError(
            f"the tokenizer {name} has changed since {prefix} was made with it, when it had {_size(meta)}; now it has "
            f"{ours}{because}: bring the old one back, or preprocess the text again"
        )
    return UserError(
        f"{prefix} was made with {_described(meta)}, and {name} ({ours}) is another tokenizer{because}: "
        + (remedy or f"use the one that made it, or preprocess the text again with {name}")
    )


def _described(meta: Meta) -> str:
    return f"{meta.tokenizer or 'a tokenizer that is not named'} ({_size(meta)})"


def _size(meta: Meta) -> str:
    return "an unknown number of tokens" if meta.vocab_size is None else f"{meta.vocab_size:,} tokens"
