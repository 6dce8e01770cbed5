"""`mtjax data info`: counts, lengths and a decoded sample of an indexed dataset; damage, if there is any."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from mtjax.cli import read, run_main
from mtjax.data.commands.dataset_summary import counts_table, excerpt, histogram, tokenizer_of
from mtjax.data.corpus.indexed import IndexedDataset, prefix_of
from mtjax.data.corpus.verify import verify


@dataclass(frozen=True)
class Options:
    """Says what an indexed dataset holds, and checks every byte of it. Damage is named, and the exit code is 2."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """Path without .bin and .idx."""
    tokenizer: str | None = None
    """What to decode with; the one the dataset was made with when not given, if it is known."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data info")))


def run(options: Options) -> None:
    """Prints what the dataset holds.

    Raises:
      UserError: a check or checksum fails, or the tokenizer can't be read.
    """
    dataset = IndexedDataset(prefix_of(options.prefix))
    tokenizer = tokenizer_of(dataset, options.tokenizer)
    console = Console(highlight=False)
    console.print(counts_table(dataset))
    if len(dataset):
        console.print(histogram(dataset.lengths, "sequence lengths in tokens"))
        console.print("the first sequence begins", style="bold")
        console.print(excerpt(dataset[0], tokenizer), markup=False)
    if tokenizer is None:
        console.print("(--tokenizer KIND:PATH shows it as text)", style="dim")
    console.print(verify(dataset), style="dim")
