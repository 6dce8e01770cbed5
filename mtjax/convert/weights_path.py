"""Parsing of KIND:DIR, with which a command line names weights."""

from pathlib import Path

from mtjax.convert.hub import local_folder
from mtjax.errors import UserError, nearest

READ = ("torchtitan",)
"""Kinds that can be read, and not written."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "peft"
"""Low-rank adapters; read together with the weights below them, and written alone."""
KINDS = ("hf", "mtjax", "megatron", ADAPTERS, *READ)


def parse_weights_path(text: str, *, is_target: bool = False) -> tuple[str, Path]:
    """Parses "hf:DIR" to ("hf", Path("DIR")).

    The DIR of a source of kind hf may be a model on the hub, `owner/name[@revision]`, which is downloaded.

    Raises:
      UserError: the text is not KIND:DIR, the kind is unknown, or the model can't be downloaded.
    """
    kind, colon, folder = text.partition(":")
    if not colon or not folder:
        named = [kind for kind in KINDS if kind != ADAPTERS and not (is_target and kind in READ)]
        raise UserError(f"{text!r} is not KIND:DIR; use {' or '.join(f'{kind}:{text}' for kind in named)}")
    if kind not in KINDS:
        raise UserError(f"unknown kind of weights {kind!r}{nearest(kind, KINDS)}; the kinds are {', '.join(KINDS)}")
    if is_target and kind in READ:
        raise UserError(f"{kind} can be read, and not written: write {' or '.join(k for k in KINDS if k not in READ)}")
    path = Path(folder).expanduser()
    return kind, local_folder(path) if kind in ("hf", ADAPTERS) and not is_target else path


def parse_weights(text: str) -> tuple[str, Path]:
    """Parses KIND:DIR, or a path without a kind, which is of kind mtjax: a run, a checkpoint or a converted folder.

    Raises:
      UserError: the kind is unknown, or a model can't be downloaded.
    """
    # A folder's name may have a colon.
    has_kind = ":" in text and not Path(text).expanduser().exists()
    return parse_weights_path(text if has_kind else f"mtjax:{text}")
