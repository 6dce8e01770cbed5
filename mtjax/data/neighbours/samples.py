"""What neighbours have to know of a run's samples: what shapes them, and which documents each of them reads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.data.batches.batch_schedule import train_samples
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.neighbours.header import SampleSettings
from mtjax.data.neighbours.reader import Neighbours, WithNeighbours
from mtjax.data.samples.blend import BlendedDataset
from mtjax.data.samples.order import Concatenated, SampleOrder, Shifted, TrainingText
from mtjax.data.samples.sample import Dataset
from mtjax.data.samples.split import Split
from mtjax.data.split_opener import SplitOpener
from mtjax.data.tokens.identity import content_digest
from mtjax.errors import UserError
from mtjax.families.gpt.samples import GPTDataset


@dataclass(frozen=True)
class DatabaseText:
    """The training text of a run: the database in which neighbours are searched.

    Attributes:
      corpora: each once, in the order of the run's sources.
      bounds: its training documents, first and one past the last.
      texts: as the run describes them.
    """

    corpora: list[IndexedDataset]
    bounds: list[tuple[int, int]]
    texts: list[TrainingText]

    def described(self) -> list[dict[str, Any]]:
        """Returns the records of the corpora for the header."""
        return [
            {"name": str(corpus.prefix), "content": corpus.content(), "first": first, "documents": end - first}
            for corpus, (first, end) in zip(self.corpora, self.bounds, strict=True)
        ]


def training_text(opener: SplitOpener) -> DatabaseText:
    """Opens the corpora of a run's training text; one that is named twice is in it once."""
    found: dict[str, tuple[IndexedDataset, tuple[int, int], TrainingText]] = {}
    for source in opener.sources:
        corpus, text = opener.corpus(source), opener.describe(source)
        # A corpus that is named twice is searched once: its chunks would take two places each among the neighbours.
        found.setdefault(corpus.content(), (corpus, (text.first, text.first + text.documents), text))
    corpora, bounds, texts = zip(*found.values(), strict=True)
    return DatabaseText(list(corpora), list(bounds), list(texts))


def settings_of(
    config: Config, opener: SplitOpener, dataset: Dataset, order: SampleOrder, chunk: int
) -> SampleSettings:
    """Returns what shapes the samples of a split.

    Raises:
      UserError: chunks don't divide a sample, or the samples are not those of a GPT.
    """
    length = config.model.sequence_length
    if length % chunk:
        raise UserError(f"sequence_length {length} must be a multiple of retro_chunk {chunk}")
    texts = [asdict(opener.describe(source)) for source in opener.sources]
    return SampleSettings(
        retro_chunk=chunk,
        sequence_length=length,
        seed=config.training.seed,
        split=opener.shares,
        add_extra_token_to_sequence=config.data.add_extra_token_to_sequence,
        drop_last_partial_validation_sequence=(
            config.data.drop_last_partial_validation_sequence if opener.split == "valid" else None
        ),
        tokenizer=content_digest(opener.text.tokenizer),
        texts=texts,
        order=order_of(dataset),
        requested=list(order.counts),
    )


def order_of(dataset: Dataset) -> Any:
    """Returns the numbers from which the order of samples follows, as JSON values: passes, and where they are cut.

    Raises:
      UserError: they are not samples of a GPT.
    """
    if isinstance(dataset, GPTDataset):
        return {**asdict(dataset.plan), "seed": dataset.options.seed}
    if isinstance(dataset, Concatenated):
        return [order_of(part) for part in dataset.parts]
    if isinstance(dataset, BlendedDataset):
        return {"blend": [order_of(part) for part in dataset.datasets]}
    if isinstance(dataset, Shifted):
        return {"begins": dataset.begins, "of": order_of(dataset.dataset)}
    raise UserError("neighbours are of the samples of a decoder: bert and t5 have none")


def documents_of(dataset: Dataset, index: int) -> tuple[IndexedDataset, np.ndarray]:
    """Returns the corpus of a sample, and the numbers of the sequences in it that the sample reads."""
    if isinstance(dataset, Shifted):
        return documents_of(dataset.dataset, index - dataset.begins)
    if isinstance(dataset, Concatenated):
        return documents_of(*dataset.part_of(index))
    if isinstance(dataset, BlendedDataset):
        return documents_of(dataset.datasets[int(dataset.dataset_index[index])], int(dataset.sample_index[index]))
    assert isinstance(dataset, GPTDataset)  # `order_of` refuses others
    number = int(dataset.shuffle_index[index])
    first, last = int(dataset.sample_index[number][0]), int(dataset.sample_index[number + 1][0])
    # A sample may begin in one document and end in another, and a short document may come twice.
    return dataset.tokens, np.unique(dataset.document_index[first : last + 1])


def with_neighbours(config: Config, opener: SplitOpener, dataset: Dataset, order: SampleOrder) -> WithNeighbours:
    """Adds the array `neighbours` to the samples of a split: int32[chunks, k, retrieved_chunks x chunk].

    Args:
      config: names the prefix of the files that `mtjax data neighbours` wrote; see also `datasets.open_dataset`.
      opener: of the split, train or valid.
      dataset: its samples.
      order: how many samples the run needs, and needed before.

    Raises:
      UserError: the neighbours are of other samples, missing or damaged.
    """
    model, prefix, split, text = config.model, str(config.data.neighbours), opener.split, opener.text
    if model.family != "retro":
        raise UserError(f"--neighbours {prefix} is for the family retro, and the run's is {model.family}: remove it")
    # The database is the training text also for validation samples.
    training = training_text(opener if split == "train" else SplitOpener(config, "train", text.tokenizer))
    neighbours = Neighbours.open(
        prefix,
        split,
        settings_of(config, opener, dataset, order, model.retro_chunk),
        training.corpora,
        eod=text.tokenizer.eod,
        vocab_size=text.tokenizer.vocab_size,
        num_neighbours=model.retro_num_neighbours,
        retrieved_chunks=model.retro_retrieved_chunks,
    )
    _check_bounds(neighbours, training)
    return WithNeighbours(dataset, neighbours, order.counts[-1])


def _check_bounds(neighbours: Neighbours, training: DatabaseText) -> None:
    """Refuses a database of other documents: they may be the run's validation text."""
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]] = list(
        zip(neighbours.header.database, training.described(), strict=True)
    )
    for made, run in pairs:
        theirs, ours = ((each["first"], each["first"] + each["documents"]) for each in (made, run))
        if theirs != ours:
            raise UserError(
                f"the neighbours {neighbours.prefix} were searched in the documents {theirs[0]} to {theirs[1]} of "
                f"{made['name']}, and the run trains on {ours[0]} to {ours[1]}: make them anew with mtjax data "
                "neighbours"
            )


def orders_of(config: Config, earlier: Sequence[int] = ()) -> dict[Split, SampleOrder]:
    """Returns the orders of a run's training and validation samples; none of validation where it has none.

    Args:
      config: of the run.
      earlier: numbers of training samples that it asked for before it was made longer, ascending.

    Raises:
      UserError: they don't ascend up to the run's own.
    """
    totals = (*earlier, train_samples(config.training))
    if list(totals) != sorted(set(totals)) or totals[0] < 1:
        numbers = ", ".join(map(str, totals))
        raise UserError(
            f"--earlier and the run's samples are {numbers}, and must ascend: give the numbers before the last"
        )
    orders: dict[Split, SampleOrder] = {"train": SampleOrder(0, totals)}
    if config.output.valid_every:
        count = config.output.valid_batches * config.training.global_batch_size
        orders["valid"] = SampleOrder(0, (count,))
    return orders
