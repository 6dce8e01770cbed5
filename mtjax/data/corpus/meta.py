"""`PREFIX.meta.json`: what Megatron's two files don't say: tokenizer and checksums. Optional; Megatron ignores it."""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtjax.errors import UserError

CHUNK = 1 << 24


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made an indexed dataset.

    Attributes:
      tokenizer: its name as in `--tokenizer`, when the dataset was made by preprocessing.
      vocab_size: ids are below this.
      eod: the id that ends a document.
      tokenizer_digest: the content of that tokenizer (`tokens.identity.content_digest`): the file at its path may be
        replaced. None in records of earlier versions.
    """

    tokenizer: str | None
    vocab_size: int | None
    eod: int | None
    tokenizer_digest: str | None = None


UNKNOWN = TokenizerRecord(None, None, None)


@dataclass(frozen=True, kw_only=True)
class Meta(TokenizerRecord):
    """What is known about an indexed dataset besides what its two files say.

    Attributes:
      idx_crc32: checksum of `.idx`.
      bin_crc32: checksum of `.bin`.
      part: of which run it is a part (`parts.PartRecord`); None for a whole dataset.
    """

    idx_crc32: int
    bin_crc32: int
    part: dict[str, Any] | None = None


def meta_path(prefix: str | Path) -> Path:
    """Returns the path of the record of `prefix`."""
    return Path(f"{prefix}.meta.json")


def read_meta(prefix: str | Path) -> Meta | None:
    """Reads the record of a dataset; None when the file does not exist (Megatron does not write it).

    Raises:
      UserError: the file exists, but is corrupted.
    """
    path = meta_path(prefix)
    if not path.is_file():
        return None
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        # An unknown key is an error: it may be of a version that means something else by it.
        meta = Meta(**fields)
        if not all(isinstance(value, int) for value in (meta.idx_crc32, meta.bin_crc32)):
            raise TypeError("a checksum is not a number")
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"{path} is corrupted ({e}); delete it to use the dataset without its checksums") from e
    return meta


def write_meta(path: Path, meta: Meta) -> None:
    """Writes the facts about a dataset to `path`."""
    # Earlier versions refuse the key, which most datasets don't need.
    facts = {name: value for name, value in asdict(meta).items() if name != "part" or value is not None}
    path.write_text(json.dumps(facts, indent=1) + "\n")


def file_crc32(path: Path) -> int:
    """Returns the CRC-32 of a file, read in blocks."""
    value = 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            value = zlib.crc32(data, value)
    return value
