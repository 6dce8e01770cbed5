"""How a command line names weights: KIND:DIR."""

from pathlib import Path

from mtjax.errors import UserError, nearest

KINDS = ("hf", "mtjax", "megatron")
ADAPTERS = "peft"
"""A kind that is written only."""


def parse_place(text: str, *, is_target: bool = False) -> tuple[str, Path]:
    """("hf", Path("DIR")) from "hf:DIR"; where something is to be written, also ("peft", Path("DIR")).

    Raises:
      UserError: it is not KIND:DIR, or the kind does not exist.
    """
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise UserError(f"{text!r} is not KIND:DIR; say {' or '.join(f'{kind}:{text}' for kind in KINDS)}")
    if kind == ADAPTERS and is_target:
        return kind, Path(rest).expanduser()
    if kind not in KINDS:
        raise UserError(f"no kind of weights is called {kind!r}{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    return kind, Path(rest).expanduser()


def parse_weights(text: str) -> tuple[str, Path]:
    """The same, where a path without a kind is mtjax's own: a run, a checkpoint or a converted folder.

    Raises:
      UserError: the kind does not exist.
    """
    has_kind = ":" in text and not Path(text).expanduser().exists()
    return parse_place(text if has_kind else f"mtjax:{text}")
