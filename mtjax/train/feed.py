"""Batches on the mesh of a program, starting at a position in the data."""

import jax

from mtjax import data
from mtjax.config import Config
from mtjax.data import BatchSchedule, Dataset, Loader
from mtjax.errors import UserError
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.global_batch import global_batch, process_rows


def open_batches(
    sharded_model: ShardedModel, config: Config, dataset: Dataset, consumed: int, batch_schedule: BatchSchedule
) -> Loader:
    """Opens this process's rows of every batch, starting at sample `consumed`."""
    return data.open_loader(
        config,
        dataset,
        # A function of the size of a batch, which a ramp-up changes.
        rows=lambda size: process_rows(sharded_model.batch_sharding, size),
        start_sample=consumed,
        batch_schedule=batch_schedule,
    )


def next_batch(sharded_model: ShardedModel, batches: Loader, size: int) -> dict[str, jax.Array]:
    """Returns the next global batch, with the arrays that the program reads.

    Raises:
      UserError: the data have no full batch left.
    """
    try:
        local = next(batches)
    except StopIteration:
        raise UserError(f"the training data end before the run: no batch of {size} samples is left") from None
    return global_batch(sharded_model.batch_sharding, {name: local[name] for name in sharded_model.batch_names}, size)
