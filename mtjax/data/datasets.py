"""The datasets that a config asks for: samples of a split for the run's family, from text or token ids, blended."""

from collections.abc import Sequence

from mtjax.config import Config
from mtjax.data.samples.blend import BlendedDataset, normalize, samples_of_each
from mtjax.data.samples.family import samples_of
from mtjax.data.samples.order import NeighbourFile, SampleOrder, TrainingText, shifted
from mtjax.data.samples.sample import Dataset
from mtjax.data.samples.split import Split
from mtjax.data.split_opener import SplitOpener
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError


def open_in_order(config: Config, order: SampleOrder, tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens the training samples of a run in its order, numbered as the run consumes them.

    Raises:
      UserError: like `open_dataset`.
    """
    return _open_in_order(config, "train", order, tokenizer)


def open_samples(opener: SplitOpener, order: SampleOrder) -> Dataset:
    """Opens the samples of a split in an order, numbered as the run consumes them.

    Raises:
      UserError: like `open_dataset`.
    """
    *earlier, total = order.counts
    return shifted(_open(opener, total, earlier), order)


def describe_texts(
    config: Config, tokenizer: Tokenizer | None = None, split: Split = "train"
) -> tuple[TrainingText, ...]:
    """Describes the texts that the samples of a split are built from, without building the samples.

    Raises:
      UserError: the data can't be read.
    """
    opener = SplitOpener(config, split, tokenizer)
    return tuple(opener.describe(source) for source in opener.sources)


def describe_neighbours(config: Config, recorded: Sequence[NeighbourFile] = ()) -> tuple[NeighbourFile, ...]:
    """Describes the neighbours of a run's samples; none where the config names none.

    Args:
      config: of the run.
      recorded: describe as many samples as these have, of the same splits; all of those that the run reads if empty.

    Raises:
      UserError: a file is missing or damaged.
    """
    if config.data.neighbours is None:
        return ()
    from mtjax.data.neighbours.reader import digest_of_neighbours

    of_run = {"train": None, **({"valid": None} if config.output.valid_every else {})}
    # As many as were recorded, not as many as there are: see `digest_of_neighbours`.
    counts = {file.split: file.samples for file in recorded if file.split in of_run} or of_run
    return tuple(
        NeighbourFile(split, *digest_of_neighbours(config.data.neighbours, split, count))
        for split, count in counts.items()
    )


def open_dataset(config: Config, split: Split, num_samples: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens the samples of one split of a run's data, as its family of models reads them, in Megatron's order.

    Args:
      config: says where the text is and what samples look like.
      split: which share.
      num_samples: how many will be needed: decides how often the text is gone through. There may be more.
      tokenizer: the run's, which may have come with its weights; the one that the config names when None.

    Returns:
      Samples by number. What is in one, the family's dataset says: `samples.gpt.GPTDataset`,
      `samples.bert.BertDataset`, `samples.t5.T5Dataset`.

    Raises:
      UserError: the data can't be read, this split has none, or a blend without weights has too few.
    """
    return _open_in_order(config, split, SampleOrder(0, (num_samples,)), tokenizer)


def _open_in_order(config: Config, split: Split, order: SampleOrder, tokenizer: Tokenizer | None) -> Dataset:
    """Opens the samples of a split, with their neighbours where the config names them."""
    if config.data.neighbours is None and config.model.family == "retro" and config.model.retro_reads:
        raise UserError(
            "the family retro reads neighbours of the run's samples: make them with mtjax data neighbours, and name "
            "their prefix with --neighbours"
        )
    opener = SplitOpener(config, split, tokenizer)
    samples = open_samples(opener, order)
    if config.data.neighbours is None:
        return samples
    from mtjax.data.neighbours.samples import with_neighbours

    return with_neighbours(config, opener, samples, order)


def _open(opener: SplitOpener, num_samples: int, earlier: Sequence[int] = ()) -> Dataset:
    """Opens the samples of all sources, of which earlier starts of the run requested `earlier` numbers."""
    given = [source.weight for source in opener.sources if source.weight is not None]
    # Like Megatron, which opens a lone dataset with a weight as a blend when it is split, and directly when it isn't.
    if len(opener.sources) == 1 and not (given and opener.shares):
        return opener.open(opener.sources[0], max(num_samples, 1), earlier)
    if not given:
        return _unweighted(opener, num_samples)
    weights = normalize(given)
    *before, counts = [samples_of_each(weights, count) for count in (*earlier, num_samples)]
    # The order of each dataset depends on how many samples are requested of it, now and at earlier starts of the run.
    # That is its share, as in Megatron.
    parts = [
        opener.open(source, max(counts[i], 1), [max(each[i], 1) for each in before])
        for i, source in enumerate(opener.sources)
    ]
    return BlendedDataset(parts, weights, num_samples, opener.text.cache)


def vocabulary_size(config: Config, tokenizer: Tokenizer) -> int:
    """Returns the number of ids in a family's samples, with those it adds to the tokenizer's: T5 may add sentinels."""
    return samples_of(config.model.family).vocabulary_size(tokenizer)


def _unweighted(opener: SplitOpener, num_samples: int) -> BlendedDataset:
    """Blends all samples of one pass over each dataset, in proportion to their numbers.

    Raises:
      UserError: there are fewer than the run needs. Megatron's blend would end there, and its training with it.
    """
    # Megatron's blend without weights takes each dataset as it is: the lengths are its weights.
    parts = [opener.open(source, None) for source in opener.sources]
    blend = BlendedDataset(parts, None, num_samples, opener.text.cache)
    if len(blend) < num_samples:
        raise UserError(
            f"a blend without weights goes through its text once, which gives {len(blend):,} {opener.split} samples, "
            f"and the run asks for {num_samples:,}: put a weight before each dataset to go through it more often, or "
            "ask for fewer"
        )
    return blend
