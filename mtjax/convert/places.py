"""Places that hold weights, KIND:DIR, and how each kind is read."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mtjax.errors import UserError, nearest

if TYPE_CHECKING:
    from mtjax.convert.stream import Source

KINDS = ("hf", "mtjax", "megatron")


def place(text: str) -> tuple[str, Path]:
    """("hf", Path("DIR")) from "hf:DIR".

    Raises:
      UserError: it is not KIND:DIR, or the kind does not exist.
    """
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise UserError(f"{text!r} is not KIND:DIR; say {' or '.join(f'{kind}:{text}' for kind in KINDS)}")
    if kind not in KINDS:
        raise UserError(f"no kind of weights is called {kind!r}{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    return kind, Path(rest).expanduser()


def open_source(
    kind: str,
    folder: Path,
    *,
    vocab_size: int | None = None,
    vocab_multiple: int | None = None,
    config: str | None = None,
) -> "Source":
    """The weights in a folder.

    Args:
      kind: of `KINDS`.
      folder: to read.
      vocab_size: tokens of the vocabulary, for a megatron folder, which may only know the padded number.
      vocab_multiple: what the vocabulary is padded to; not for kind mtjax, whose weights are padded.
      config: describes the model in a megatron folder, if the folder does not.

    Raises:
      UserError: there are no such weights, or they are not of a model that mtjax has.
    """
    from mtjax.convert.hugging_face import HuggingFaceSource
    from mtjax.convert.megatron import MegatronSource
    from mtjax.convert.mtjax_folder import MtjaxSource

    openers: dict[str, Callable[[], Source]] = {
        "hf": lambda: HuggingFaceSource(folder, vocab_multiple),
        "mtjax": lambda: MtjaxSource(folder),
        "megatron": lambda: MegatronSource(folder, vocab_size, vocab_multiple, config),
    }
    return openers[kind]()
