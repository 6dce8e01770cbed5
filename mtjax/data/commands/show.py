"""`python -m mtjax.data.commands.show`: training samples as a model sees them, decoded, with masks and labels in colour."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.text import Text

from mtjax.cli import read, run_main
from mtjax.data.commands.dataset_summary import histogram, tokenizer_of
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.bert import IGNORED, BertDataset, BertOptions
from mtjax.data.samples.gpt import GPTDataset, GPTOptions, Sample
from mtjax.data.samples.t5 import T5Dataset, T5Options
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

SPECIAL, MASKED, NO_LOSS, PLAIN, SECOND = "bold magenta", "bold yellow", "dim", "default", "green"
LEGEND = {
    "gpt": (("end of document", SPECIAL), ("no loss", NO_LOSS)),
    "bert": (("special", SPECIAL), ("hidden:to guess", MASKED), ("first run", PLAIN), ("second run", SECOND)),
    "t5": (("special and sentinels", SPECIAL),),
}


@dataclass(frozen=True)
class Options:
    """Prints decoded samples of an indexed dataset and a histogram of its lengths."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """Path without .bin and .idx."""
    tokenizer: str | None = None
    """What to decode with; the one the dataset was made with when not given, if it is known."""
    kind: Literal["gpt", "bert", "t5"] = "gpt"
    """Whose samples: bert and t5 need a dataset made with --split-sentences."""
    samples: int = 3
    """How many."""
    first: int = 0
    """Number of the first."""
    sequence_length: int = 128
    """Tokens in a sample."""
    seed: int = 1234
    """Seed of the order, as in training."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data show")))


def run(options: Options) -> None:
    """Prints the samples.

    Raises:
      UserError: the dataset is damaged or has no such samples, or no tokenizer is known.
    """
    dataset = IndexedDataset(options.prefix.removesuffix(".idx").removesuffix(".bin"))
    tokenizer = tokenizer_of(dataset, options.tokenizer)
    if tokenizer is None:
        raise UserError(f"{dataset.prefix} doesn't say which tokenizer made it; name it with --tokenizer")
    if options.samples < 0 or options.first < 0:
        raise UserError(f"--samples {options.samples} and --first {options.first} must be 0 or more")
    console = Console(highlight=False)
    samples = _open(dataset, tokenizer, options)
    console.print(Text("colours: ") + Text(", ").join(Text(name, style) for name, style in LEGEND[options.kind]))
    for number in range(options.first, min(options.first + options.samples, len(samples))):
        console.rule(f"{options.kind} sample {number:,} of {len(samples):,}", align="left")
        console.print(_RENDER[options.kind](samples[number], tokenizer))
    console.print(histogram(dataset.lengths, "sequence lengths in tokens"))


def _open(dataset: IndexedDataset, tokenizer: Tokenizer, options: Options) -> GPTDataset | BertDataset | T5Dataset:
    length, seed, count = options.sequence_length, options.seed, 1
    if options.kind == "gpt":
        gpt = GPTOptions(length, tokenizer.eod, tokenizer.vocab_size, seed, eod_mask_loss=options.eod_mask_loss)
        return GPTDataset(dataset, (0, len(dataset)), count, gpt, None)
    bounds = (0, dataset.num_documents)
    if options.kind == "bert":
        return BertDataset(dataset, bounds, count, tokenizer, BertOptions(length, seed))
    return T5Dataset(dataset, bounds, count, tokenizer, T5Options(length, length, seed))


def _gpt(sample: Sample, tokenizer: Tokenizer) -> Text:
    special = sample["tokens"] == tokenizer.eod
    styles = np.where(sample["loss_mask"] == 0, NO_LOSS, np.where(special, SPECIAL, PLAIN))
    return styled(sample["tokens"], styles, tokenizer)


def _bert(sample: Sample, tokenizer: Tokenizer) -> Text:
    specials = [i for name in ("[CLS]", "[SEP]", "[PAD]") if (i := tokenizer.special(name)) is not None]
    used = int(sample["padding_mask"].sum())
    text = Text("the second run came first in the text\n" if sample["sentence_order"] else "in the order of the text\n")
    tokens, labels, types = (sample[name][:used].tolist() for name in ("tokens", "labels", "token_types"))
    for token, label, kind in zip(tokens, labels, types, strict=True):
        if label != IGNORED:
            text.append(f" {tokenizer.token(token)}:{tokenizer.token(label)}", MASKED)
        else:
            style = SPECIAL if token in specials else SECOND if kind else PLAIN
            name = tokenizer.token(token)
            text.append(name[2:] if name.startswith("##") else f" {name}", style)
    return text


def _t5(sample: Sample, tokenizer: Tokenizer) -> Text:
    text = Text()
    for name, mask in (("encoder_tokens", "encoder_mask"), ("decoder_tokens", "loss_mask"), ("labels", "loss_mask")):
        tokens = sample[name][: int(sample[mask].sum())]
        styles = np.where([_is_special(int(t), tokenizer) for t in tokens], SPECIAL, PLAIN)
        text.append(f"{name}: ", "bold")
        text += styled(tokens, styles, tokenizer)
        text.append("\n")
    return text


def _is_special(token: int, tokenizer: Tokenizer) -> bool:
    return token >= tokenizer.vocab_size or tokenizer.token(token)[:1] + tokenizer.token(token)[-1:] in ("[]", "<>")


_RENDER = {"gpt": _gpt, "bert": _bert, "t5": _t5}


def styled(tokens: np.ndarray, styles: np.ndarray, tokenizer: Tokenizer) -> Text:
    """Decoded tokens, each stretch of one style decoded together, so that characters of several tokens stay whole."""
    text, at = Text(), 0
    for end in [*(np.flatnonzero(styles[1:] != styles[:-1]) + 1).tolist(), len(tokens)]:
        stretch = [int(t) for t in tokens[at:end]]
        part = decode(stretch, tokenizer)
        apart = part.startswith(("[", "<"))  # special tokens decode without the spaces around them
        text.append(f" {part} " if apart else part, str(styles[at]) if len(styles) else PLAIN)
        at = end
    return text


def decode(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of `tokens`; ids beyond the vocabulary are T5's sentinels."""
    size = tokenizer.vocab_size
    if all(token < size for token in tokens):
        return tokenizer.decode(tokens)
    return " ".join(f"<sentinel {t - size}>" if t >= size else tokenizer.decode([t]) for t in tokens)


if __name__ == "__main__":
    sys.exit(main())
