"""From raw text to batches: Megatron's corpus format and sample order, prepared once, resumable anywhere."""

from typing import TYPE_CHECKING

from mtjax.data.batches.batch_schedule import BatchSchedule, batch_schedule, constant, train_samples, train_steps
from mtjax.data.datasets import describe_neighbours, describe_texts, open_dataset, open_in_order, vocabulary_size
from mtjax.data.run_text import load_tokenizer
from mtjax.data.samples.order import DataPosition, NeighbourFile, SampleOrder, TrainingText
from mtjax.data.samples.sample import Dataset
from mtjax.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mtjax.data.batches.loader import Loader, open_loader

__all__ = [
    "BatchSchedule",
    "DataPosition",
    "Dataset",
    "Loader",
    "NeighbourFile",
    "SampleOrder",
    "Tokenizer",
    "TrainingText",
    "batch_schedule",
    "constant",
    "describe_neighbours",
    "describe_texts",
    "load_tokenizer",
    "open_dataset",
    "open_in_order",
    "open_loader",
    "train_samples",
    "train_steps",
    "vocabulary_size",
]


def __getattr__(name: str) -> object:
    """Imports `Loader` and `open_loader` on first use: importing grain takes a second, which only training needs."""
    if name in ("Loader", "open_loader"):
        from mtjax.data.batches import loader

        return getattr(loader, name)
    raise AttributeError(name)
