"""`python -m mtjax.data.commands.verify`: reads every byte of an indexed dataset, and says whether it is whole."""

import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from mtjax.cli import read, run_main
from mtjax.data.corpus.indexed import IndexedDataset, bin_path
from mtjax.data.corpus.meta import meta_path
from mtjax.data.progress import ProgressLine
from mtjax.data.samples.gpt import check_ids
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError

TOKENS_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class Options:
    """Checks indexed datasets: structure, checksums, tokens within the vocabulary. Exit code 2 on damage."""

    prefix: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Paths without .bin and .idx."""
    tokenizer: str | None = None
    """Whose vocabulary the tokens must be in; that of the tokenizer they were made with when not given, if known."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data verify")))


def run(options: Options) -> None:
    """Checks each dataset and prints a line for it.

    Raises:
      UserError: the first fault found.
    """
    vocab_size = open_tokenizer(options.tokenizer).vocab_size if options.tokenizer else None
    if not options.prefix:
        raise UserError("name at least one dataset")
    for prefix in options.prefix:
        dataset = IndexedDataset(prefix.removesuffix(".idx").removesuffix(".bin"))
        print(f"{dataset.prefix}: {verify(dataset, vocab_size)}")


def verify(dataset: IndexedDataset, vocab_size: int | None = None) -> str:
    """Reads all tokens of a dataset that was opened without error; returns what was checked.

    Raises:
      UserError: a token outside of the vocabulary, or a wrong checksum.
    """
    known = dataset.meta.vocab_size if dataset.meta else None
    vocab_size, crc, total = vocab_size or known, 0, dataset.num_tokens
    with ProgressLine(f"verifying {dataset.prefix.name}", total) as progress:
        for at in range(0, total, TOKENS_AT_A_TIME):
            tokens = dataset.flat(at, min(at + TOKENS_AT_A_TIME, total))
            crc = zlib.crc32(tokens.data, crc)
            if vocab_size is not None and dataset.dtype.kind != "f":
                check_ids(tokens, vocab_size, dataset.prefix)
            progress.update(at + len(tokens), (at + len(tokens)) * dataset.dtype.itemsize)
    if dataset.meta is not None and crc != dataset.meta.bin_crc32:
        raise UserError(
            f"{bin_path(dataset.prefix)} is damaged: its checksum is not the one in {meta_path(dataset.prefix)}"
        )
    checks = ["structure", *(["checksums"] if dataset.meta else []), *(["vocabulary"] if vocab_size else [])]
    return f"{total:,} tokens are whole ({', '.join(checks)} checked)"


if __name__ == "__main__":
    sys.exit(main())
