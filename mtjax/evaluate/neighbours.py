"""Perplexity of a Retro on its run's validation samples: with their neighbours, without any, and with those of others.

The gain from neighbours counts where they share little with what is predicted: tokens are also counted by the share of
13-grams of a chunk that the neighbours read with it have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from mtjax.config import Config, replace
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.data.datasets import open_dataset
from mtjax.data.neighbours.overlap import shared_runs
from mtjax.data.neighbours.reader import WithNeighbours
from mtjax.data.neighbours.samples import orders_of
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError
from mtjax.evaluate.options import NONE, SHUFFLED, Options
from mtjax.evaluate.run import check_files, parallel_of, print_header, shown, write_facts
from mtjax.evaluate.tasks.task import Results, perplexity_of
from mtjax.families.retro.model import NEIGHBOURS
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.compile_cache import CompileCache
from mtjax.runtime.devices import attach_devices
from mtjax.runtime.processes.coordination import this_process
from mtjax.runtime.processes.peers import Peers
from mtjax.sharding.axes import use_rules
from mtjax.sharding.global_batch import global_batch, process_rows
from mtjax.sharding.param_specs import replicated
from mtjax.sharding.vocab_scores import vocab_parallel_scores

GRAM = 13
"""Tokens in a row that a chunk and its neighbours may have in common."""
SHARES = (0.0, 0.1, 0.5, 1.0)
"""Largest share of each bin: none, up to a tenth, up to a half, more."""
NAMES = ("none", "up to 10%", "up to 50%", "more", "too short")
"""Of each bin; the last one has what is predicted in fewer than `GRAM` tokens, which are compared with nothing."""


def evaluate_neighbours(options: Options) -> Results:
    """Evaluates a run of Retro on its validation samples and prints the results (in process 0).

    Raises:
      UserError: weights, neighbours and mesh are incompatible, or can't be read.
    """
    check_files(options)
    shape, parallel = parallel_of(options)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        mesh = attach_devices(shape, peers.count)
        saved = SavedModel.open(options.source, Hints(vocab_multiple_for(shape)))
        text = open_text(options, saved)
        settings = {"attention": options.attention, "compute_dtype": options.compute_dtype}
        sharded_model = ShardedModel(for_rows(saved.config, parallel, options.rows, **settings), mesh)
        print_header(sharded_model, f"{text.count:,} validation samples, neighbours {options.neighbours}")
        scorer = NeighbourScorer(sharded_model)
        parameters = saved.parameters(sharded_model)
        modes = (options.neighbours, NONE) if options.neighbours not in (NONE, SHUFFLED) else (options.neighbours,)
        losses = {mode: scorer.losses(parameters, text.samples(mode), text.count) for mode in modes if mode}
        results = results_of(text, losses, options.neighbours or NONE)
        if this_process() == 0:
            width = max(map(len, results))
            print("\n" + "\n".join(f"{name:{width}}  {shown(value)}" for name, value in results.items()))
            facts = {"task": options.task, "neighbours": options.neighbours, "weights": options.source}
            write_facts(options, facts | {"samples": text.count, "results": results})
    return results


@dataclass(frozen=True)
class NeighbourText:
    """Validation samples with their neighbours."""

    dataset: WithNeighbours
    count: int
    chunk: int

    def samples(self, mode: str) -> Iterator[dict[str, np.ndarray]]:
        """Yields the samples with their own neighbours, without any, or with those of other chunks."""
        for number in range(self.count):
            sample = dict(self.dataset[number])
            if mode == NONE:
                del sample[NEIGHBOURS]
            elif mode == SHUFFLED:
                chunks = len(sample[NEIGHBOURS])
                chunk_numbers = self._others[number * chunks : (number + 1) * chunks]
                rows = [self.dataset.neighbours[of // chunks][of % chunks] for of in chunk_numbers.tolist()]
                sample[NEIGHBOURS] = np.stack(rows)
            yield sample

    @cached_property
    def _others(self) -> np.ndarray:
        """The chunk whose neighbours each chunk gets: another one, the same in every evaluation."""
        order = np.random.default_rng(0).permutation(self.count * self.dataset.neighbours.chunks)
        others = np.empty_like(order)
        # A single cycle through all chunks in random order: no chunk gets its own neighbours.
        others[order] = np.roll(order, 1)
        return others

    def bins(self) -> np.ndarray:
        """Returns the bin of each token, int8[samples, tokens]: -1 for those that read no neighbours."""
        found = []
        for number in range(self.count):
            sample = self.dataset[number]
            labels, read = sample["labels"], sample[NEIGHBOURS]
            # Of the first chunk only the last token reads neighbours.
            bins = np.full(len(labels), -1, np.int8)
            for chunk, neighbours in enumerate(read):
                # What the tokens from the last of a chunk on predict, while they read its neighbours.
                begin = (chunk + 1) * self.chunk - 1
                predicted = labels[begin : begin + self.chunk]
                common = np.zeros(max(len(predicted) - GRAM + 1, 0), bool)
                for neighbour in neighbours:
                    common |= shared_runs(predicted, neighbour, GRAM)
                label = np.searchsorted(SHARES, common.mean()) if common.size else len(SHARES)
                bins[begin : begin + self.chunk] = label
            found.append(bins)
        return np.stack(found)

    def weights(self) -> np.ndarray:
        """Returns the loss masks, float64[samples, tokens]."""
        return np.stack([self.dataset[number]["loss_mask"] for number in range(self.count)]).astype(np.float64)


def open_text(options: Options, saved: SavedModel) -> NeighbourText:
    """Opens the validation samples of a run, with the neighbours that are evaluated: its own, or those of a prefix.

    Raises:
      UserError: the weights are not a run's of Retro, or the neighbours are not of its samples.
    """
    config: Config = saved.config
    if config.model.family != "retro":
        raise UserError(
            f"--neighbours is for the family retro, and {options.source} is a {config.model.family}: remove it"
        )
    trained_with = config.data.neighbours
    prefix = trained_with if options.neighbours in (NONE, SHUFFLED) else options.neighbours
    if prefix is None:
        raise UserError(
            f"{options.source} was not trained with neighbours, so --neighbours {options.neighbours} has no samples to "
            "score: name a run of mtjax train --family retro"
        )
    orders = orders_of(config)
    if "valid" not in orders:
        raise UserError(f"{options.source} has no validation samples (valid_every 0): nothing to evaluate")
    config = replace(config, neighbours=prefix)
    dataset = open_dataset(config, "valid", orders["valid"].counts[-1], saved.tokenizer(options.tokenizer)[1])
    assert isinstance(dataset, WithNeighbours)  # the config names a prefix
    return NeighbourText(dataset, orders["valid"].counts[-1], config.model.retro_chunk)


class NeighbourScorer:
    """Scores whole samples with a Retro: the loss of every token."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.sharded_model = sharded_model
        self.batch = sharded_model.config.training.global_batch_size
        self._mine = process_rows(sharded_model.batch_sharding, self.batch)

    def losses(self, parameters: Any, samples: Iterator[dict[str, np.ndarray]], count: int) -> np.ndarray:
        """Returns the loss of each token, float32[samples, tokens]."""
        found, names = [], ("tokens", "labels", NEIGHBOURS)
        with BytesProgress("evaluating", count) as progress:
            for batch in _batches(samples, self.batch):
                rows = [batch[min(i, len(batch) - 1)] for i in range(self.batch)]  # the last batch is filled up
                # Without neighbours the array is missing, and the model runs as a GPT.
                arrays = {name: np.stack([row[name] for row in rows]) for name in names if name in rows[0]}
                local = {name: array[self._mine].astype(np.int32) for name, array in arrays.items()}
                batch_on_mesh = global_batch(self.sharded_model.batch_sharding, local, self.batch)
                out = self.sharded_model.on_mesh(self._compiled, parameters, batch_on_mesh)
                found.append(-np.asarray(out)[: len(batch)])
                progress.update(sum(map(len, found)))
        return np.concatenate(found)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._score, out_shardings=replicated(self.sharded_model.mesh))

    def _score(self, parameters: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """Returns the log-probability of each label, [batch, seq]."""
        sharded_model = self.sharded_model
        with use_rules(sharded_model.layout.rules):
            model: Any = sharded_model.inference_model(parameters)
            read = {name: batch[name] for name in ("tokens", NEIGHBOURS) if name in batch}
            hidden = model.final_hidden(final_hidden_states(sharded_model, parameters, read))
            table, bias, _ = model.output_head()
            return vocab_parallel_scores(hidden, table, batch["labels"], sharded_model.loss_options, bias)[0]


def _batches(samples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def results_of(text: NeighbourText, losses: dict[str, np.ndarray], mode: str) -> Results:
    """Returns perplexities of all tokens, of those that read neighbours, and of these by the share of 13-grams that
    their own neighbours have; with own neighbours also how much lower the loss is than without."""
    weights, bins = text.weights(), text.bins()

    def loss(which: np.ndarray, of: str) -> float:
        # Weighted by the loss mask: padding and ends of documents that training does not predict count nowhere.
        return float((losses[of].astype(np.float64) * weights * which).sum() / max((weights * which).sum(), 1.0))

    results: dict[str, float | int] = {
        "perplexity": perplexity_of(loss(bins >= -1, mode)),
        "loss": loss(bins >= -1, mode),
    }
    rows: Sequence[tuple[str, np.ndarray]] = [("read", bins >= 0)]
    rows = [*rows, *((f"shared {name}", bins == number) for number, name in enumerate(NAMES))]
    results["tokens"] = int(weights.sum())
    for name, which in rows:
        if count := int((weights * which).sum()):
            results[f"{name}: tokens"] = count
            results[f"{name}: perplexity"] = perplexity_of(loss(which, mode))
            if mode != NONE and NONE in losses:
                results[f"{name}: perplexity without"] = perplexity_of(loss(which, NONE))
                results[f"{name}: gain"] = loss(which, NONE) - loss(which, mode)
    return results
