"""Parsing of KIND:DIR, with which a command line names weights."""

from pathlib import Path

from mtjax.errors import UserError, nearest

KINDS = ("hf", "mtjax", "megatron")
ADAPTERS = "peft"
"""A kind that can be written, and not read."""


def parse_weights_path(text: str, *, is_target: bool = False) -> tuple[str, Path]:
    """Parses "hf:DIR" to ("hf", Path("DIR")); a target may also be "peft:DIR".

    Raises:
      UserError: the text is not KIND:DIR, or the kind is unknown.
    """
    kind, colon, folder = text.partition(":")
    if not colon or not folder:
        raise UserError(f"{text!r} is not KIND:DIR; use {' or '.join(f'{kind}:{text}' for kind in KINDS)}")
    if kind == ADAPTERS and is_target:
        return kind, Path(folder).expanduser()
    if kind not in KINDS:
        raise UserError(f"unknown kind of weights {kind!r}{nearest(kind, KINDS)}; the kinds are {', '.join(KINDS)}")
    return kind, Path(folder).expanduser()


def parse_weights(text: str) -> tuple[str, Path]:
    """Parses KIND:DIR, or a path without a kind, which is of kind mtjax: a run, a checkpoint or a converted folder.

    Raises:
      UserError: the kind is unknown.
    """
    has_kind = ":" in text and not Path(text).expanduser().exists()
    return parse_weights_path(text if has_kind else f"mtjax:{text}")
