"""The sources of one split of a run: their token ids, and which of their documents belong to the split."""

from collections.abc import Sequence

from mtjax.config import Config, Data
from mtjax.data.cache import digest
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.source import Source, parse_sources
from mtjax.data.run_text import RunText
from mtjax.data.samples.family import FamilySamples, Share, samples_of
from mtjax.data.samples.order import TrainingText
from mtjax.data.samples.sample import Bounds, Dataset
from mtjax.data.samples.split import Split, split_bounds
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError


class SplitOpener:
    """Opens the sources of one split of a run.

    Attributes:
      split: which one.
      text: the run's text, with its tokenizer.
      sources: the split's datasets.
      shares: how each is divided into splits; None where the split has its own datasets.
    """

    def __init__(self, config: Config, split: Split, tokenizer: Tokenizer | None) -> None:
        self.split: Split = split
        self.text = RunText(config.data, tokenizer)
        # Of `text.data`, in which addresses in object stores are local copies.
        self.sources, self.shares = _sources_of(self.text.data, split)
        self._config = config
        self._family: FamilySamples = samples_of(config.model.family)

    def open(self, source: Source, num_samples: int | None, earlier: Sequence[int] = ()) -> Dataset:
        """Opens the samples of one source, at least `num_samples` of them; those of one pass when None."""
        corpus = self.corpus(source)
        bounds = self._bounds(source, corpus)
        share = Share(corpus, bounds, self.split, num_samples, self.text.tokenizer, self.text.cache, tuple(earlier))
        return self._family.open(self._config, share)

    def corpus(self, source: Source) -> IndexedDataset:
        """Opens the token ids of a source."""
        return self.text.indexed(source, self._family.encoding)

    def describe(self, source: Source) -> TrainingText:
        """Describes the content of a source, and which of its documents belong to this split."""
        corpus = self.corpus(source)
        begin, end = self._bounds(source, corpus)
        # Text files too: `content` samples tokens, and a changed word may be none of them.
        content = digest({"tokens": corpus.content(), "files": self.text.file_digests(source)})
        return TrainingText(source.name, content, end - begin, begin, source.weight)

    def _bounds(self, source: Source, corpus: IndexedDataset) -> Bounds:
        return _bounds(source, self.shares, self.split, self._family.items(corpus))


def _sources_of(data: Data, split: Split) -> tuple[list[Source], str | None]:
    """Returns the sources of a split, and the shares they are cut into; None when all of each belongs to the split.

    Raises:
      UserError: both kinds of options are given, or none for this split.
    """
    by_split = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    # As in Megatron: either one dataset, which is divided, or one for each split.
    if not any(by_split.values()):
        return parse_sources(data.data or ""), data.split
    if data.data:
        raise UserError("give either --data, which is split, or --train-data, --valid-data and --test-data")
    if not by_split[split]:
        raise UserError(f"there is no --{split}-data, and the run asks for {split} samples")
    return parse_sources(by_split[split] or ""), None


def _bounds(source: Source, shares: str | None, split: Split, items: int) -> Bounds:
    if shares is None:
        return 0, items
    bounds = split_bounds(shares, items)[split]
    if bounds is None:
        raise UserError(f"split {shares} leaves nothing for {split}; give it a share")
    # Too few documents for the share: an error here, not a validation without samples.
    if bounds[0] == bounds[1]:
        without = ", or train without with --valid-every 0" if split == "valid" else ""
        raise UserError(
            f"split {shares} leaves none of the {items} documents of {source.name} for {split}; give it a larger "
            f"share{without}"
        )
    return bounds
