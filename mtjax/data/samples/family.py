"""What a family of models says about its samples: one `FamilySamples` each."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from mtjax.config import Config
from mtjax.data.cache import Cache
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.sample import Bounds, Dataset, Sample
from mtjax.data.samples.split import Split
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.families.registry import FAMILIES, load_part

DOCUMENTS = EncodeOptions(append_eod=True)
SENTENCES = EncodeOptions(split_sentences=True)


@dataclass(frozen=True)
class Share:
    """The part of a corpus that a split's samples are built from.

    Attributes:
      corpus: token ids, encoded as the family asks.
      bounds: its first item and one past the last: documents where a sequence is a sentence, sequences otherwise.
      split: which of the run's splits this is.
      num_samples: samples that will be needed, at least 1; None goes through the text exactly once.
      tokenizer: what made the token ids.
      cache: where indices are cached; in memory when None.
      earlier: numbers of samples that earlier starts of the same run requested, ascending: their order is unchanged.
    """

    corpus: IndexedDataset
    bounds: Bounds
    split: Split
    num_samples: int | None
    tokenizer: Tokenizer
    cache: Cache | None = None
    earlier: tuple[int, ...] = ()


def _vocabulary(tokenizer: Tokenizer) -> int:
    return tokenizer.vocab_size


@dataclass(frozen=True)
class FamilySamples:
    """The samples of a family of models.

    Attributes:
      encoding: how its text becomes token ids.
      open: the samples of a share of a corpus, as the config describes them.
      render: a sample as coloured text, for `mtjax data show`.
      legend: (meaning, style) of the colours.
      vocabulary_size: ids that its samples are made of, given the tokenizer; ids are below it.
    """

    encoding: EncodeOptions
    open: Callable[[Config, Share], Dataset]
    render: Callable[[Sample, Tokenizer], Text]
    legend: tuple[tuple[str, str], ...] = ()
    vocabulary_size: Callable[[Tokenizer], int] = _vocabulary

    def items(self, corpus: IndexedDataset) -> int:
        """Returns the number of items to split: documents where a sequence is a sentence, sequences otherwise."""
        return corpus.num_documents if self.encoding.split_sentences else len(corpus)


def samples_of(family: str) -> FamilySamples:
    """Returns what the family of this name reads."""
    return load_part(FAMILIES[family].samples)
