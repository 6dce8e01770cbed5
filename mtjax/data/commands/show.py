"""`mtjax data show`: training samples as a model sees them, decoded, with masks and labels in colour."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from mtjax import config as configs
from mtjax.cli import read, run_main
from mtjax.config import Config
from mtjax.config.field_metadata import SAMPLES, TOKENS, at_least
from mtjax.data.commands.dataset_summary import histogram, tokenizer_of
from mtjax.data.corpus.indexed import IndexedDataset, prefix_of
from mtjax.data.samples.family import Share, samples_of
from mtjax.data.samples.sample import Dataset
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError, nearest
from mtjax.families.registry import FAMILIES


@dataclass(frozen=True)
class Options:
    """Prints decoded samples of an indexed dataset and a histogram of its lengths."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """Path without .bin and .idx."""
    tokenizer: str | None = None
    """What to decode with; the one the dataset was made with when not given, if it is known."""
    kind: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(FAMILIES) + "}")] = "gpt"
    """Whose samples: bert and t5 need a dataset made with --split-sentences."""
    samples: int = at_least(0, 3, most=SAMPLES)
    """How many."""
    first: int = at_least(0, 0, most=SAMPLES)
    """Number of the first."""
    sequence_length: int = at_least(1, 128, most=TOKENS)
    """Tokens in a sample."""
    seed: int = at_least(0, 1234, most=2**32 - 1)
    """Seed of the order, as in training."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data show")))


def run(options: Options) -> None:
    """Prints the samples.

    Raises:
      UserError: the dataset is corrupted or has no such samples, or no tokenizer is known.
    """
    if options.kind not in FAMILIES:
        raise UserError(f"no kind of samples is called {options.kind!r}{nearest(options.kind, FAMILIES)}")
    dataset = IndexedDataset(prefix_of(options.prefix))
    tokenizer = tokenizer_of(dataset, options.tokenizer)
    if tokenizer is None:
        raise UserError(f"{dataset.prefix} doesn't say which tokenizer made it; name it with --tokenizer")
    console = Console(highlight=False)
    family = samples_of(options.kind)
    samples = _open(dataset, tokenizer, options)
    console.print(Text("colours: ") + Text(", ").join(Text(name, style) for name, style in family.legend))
    for number in range(options.first, min(options.first + options.samples, len(samples))):
        console.rule(f"{options.kind} sample {number:,} of {len(samples):,}", align="left")
        console.print(family.render(samples[number], tokenizer))
    console.print(histogram(dataset.lengths, "sequence lengths in tokens"))


def _open(corpus: IndexedDataset, tokenizer: Tokenizer, options: Options) -> Dataset:
    config = configs.replace(
        Config(),
        family=options.kind,
        sequence_length=options.sequence_length,
        decoder_sequence_length=None,
        seed=options.seed,
        eod_mask_loss=options.eod_mask_loss,
    )
    family = samples_of(options.kind)
    # One sample is requested, so that the text is gone through once; no cache, as nothing is worth keeping.
    share = Share(corpus, (0, family.items(corpus)), "train", 1, tokenizer)
    return family.open(config, share)
