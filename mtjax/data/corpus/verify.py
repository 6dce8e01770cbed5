"""Every byte of an indexed dataset read and checked: checksums, and tokens within the vocabulary."""

import zlib

from mtjax.data.corpus.indexed import IndexedDataset, bin_path, checked_ids
from mtjax.data.corpus.meta import meta_path
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError

TOKENS_AT_A_TIME = 1 << 22


def verify(dataset: IndexedDataset, vocab_size: int | None = None) -> str:
    """Reads all tokens of a dataset that was opened without error; returns what was checked.

    Raises:
      UserError: a token outside of the vocabulary, or a wrong checksum.
    """
    known = dataset.meta.vocab_size if dataset.meta else None
    vocab_size, crc, total = vocab_size or known, 0, dataset.num_tokens
    with BytesProgress(f"verifying {dataset.prefix.name}", total) as progress:
        for at in range(0, total, TOKENS_AT_A_TIME):
            tokens = dataset.flat(at, min(at + TOKENS_AT_A_TIME, total))
            crc = zlib.crc32(tokens.data, crc)
            if vocab_size is not None:
                checked_ids([tokens], vocab_size, dataset.prefix)
            progress.update(at + len(tokens), (at + len(tokens)) * dataset.dtype.itemsize)
    check_crc(dataset, crc)
    checks = ["structure", *(["checksums"] if dataset.meta else []), *(["vocabulary"] if vocab_size else [])]
    return f"{total:,} tokens are intact ({', '.join(checks)} checked)"


def check_crc(dataset: IndexedDataset, crc: int) -> None:
    """Compares the checksum of all tokens of a dataset with its record, if it has one.

    Raises:
      UserError: they differ.
    """
    if dataset.meta is not None and crc != dataset.meta.bin_crc32:
        raise UserError(
            f"{bin_path(dataset.prefix)} is corrupted: its checksum is not the one in {meta_path(dataset.prefix)}"
        )
