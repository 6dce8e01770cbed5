"""`mtjax data verify`: reads every byte of an indexed dataset, and says whether it is intact."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from mtjax.cli import read, run_main
from mtjax.data.commands.dataset_summary import check_tokenizer
from mtjax.data.corpus.indexed import IndexedDataset, prefix_of
from mtjax.data.corpus.verify import verify
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Checks indexed datasets: structure, checksums, tokens within the vocabulary. Exit code 2 on damage."""

    prefix: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Paths without .bin and .idx."""
    tokenizer: str | None = None
    """Whose vocabulary the tokens must be in; that of the tokenizer they were made with when not given, if known."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data verify")))


def run(options: Options) -> None:
    """Checks each dataset and prints a line for it.

    Raises:
      UserError: the first fault found.
    """
    if not options.prefix:
        raise UserError("name at least one dataset")
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    for prefix in options.prefix:
        dataset = IndexedDataset(prefix_of(prefix))
        if options.tokenizer and tokenizer:
            check_tokenizer(dataset, options.tokenizer, tokenizer)
        print(f"{dataset.prefix}: {verify(dataset, tokenizer.vocab_size if tokenizer else None)}")
