"""Runs an evaluation, from its options to its results."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax import __version__
from mtjax.config import Config, Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.data import Tokenizer
from mtjax.data.progress import BytesProgress
from mtjax.data.tokens.tokenizer import digest_of
from mtjax.errors import UserError
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.options import Options
from mtjax.evaluate.rows import ScoredRow, scores_of
from mtjax.evaluate.score import Scorer, score_all
from mtjax.evaluate.tasks.registry import KINDS, check_data
from mtjax.evaluate.tasks.task import EvaluationTask, NamedTokenizer, Results, RowSettings
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.layout.mesh import MeshShape, check_no_sharding_groups, parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.compile_cache import CompileCache
from mtjax.runtime.devices import attach_devices
from mtjax.runtime.processes.coordination import all_gather_text, this_process
from mtjax.runtime.processes.peers import Peers
from mtjax.storage import write_whole
from mtjax.waiting import waiting


@dataclass(frozen=True)
class LoadedWeights:
    """Weights on a mesh, with their scorer and tokenizer."""

    saved: SavedModel
    sharded_model: ShardedModel
    scorer: Scorer
    tokenizer_name: str
    tokenizer: Tokenizer

    @property
    def length(self) -> int:
        """Most tokens per row."""
        return self.scorer.longest


def evaluate(options: Options) -> Results:
    """Evaluates weights on a task and prints the results (in process 0).

    Raises:
      UserError: weights, data, tokenizer and mesh are incompatible, or can't be read.
    """
    start = time.monotonic()
    assert options.task is not None and options.data is not None  # checked by Options.check
    check_files(options)
    with open_weights(options) as weights:
        first = tuple(first_tokens_of(weights.saved, weights.tokenizer))
        settings = RowSettings(weights.length, min(options.overlap or weights.length, weights.length), first)
        task = KINDS[options.task].open(
            options.data, NamedTokenizer(weights.tokenizer_name, weights.tokenizer), settings
        )
        identity = AnswersIdentity(
            options, settings, weights.tokenizer_name, digest(options.data), weights.saved.identity
        )
        with shared_answers(options.out, identity.digest) as saved_answers:
            print_header(weights.sharded_model, data_summary(task, saved_answers))
            score_rows(task.rows, weights.scorer, weights.saved.parameters(weights.sharded_model), saved_answers)
            results = task.results(scores_of(saved_answers.answers))
            # All processes have all scores (the outputs are replicated); one writes.
            if this_process() == 0:
                width = max(map(len, results))
                print("\n" + "\n".join(f"{name:{width}}  {shown(value)}" for name, value in results.items()))
                task_facts = {
                    "task": options.task,
                    "data": {"file": str(options.data), "sha256": identity.data},
                    "overlap": settings.overlap,
                }
                write(options, weights, task_facts, results, time.monotonic() - start)
                # After the result is written: if that fails, the answers are still there.
                saved_answers.remove()
    return results


@contextlib.contextmanager
def open_weights(options: Options) -> Iterator[LoadedWeights]:
    """Opens the weights that options name, on their mesh.

    Raises:
      UserError: weights, tokenizer and mesh are incompatible, or can't be read.
    """
    shape, parallel = parallel_of(options)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        peers.advice = "start the evaluation again: finished rows are saved next to --out"
        # Before the weights are looked at, which uses a device: their number is fixed from then on.
        mesh = attach_devices(shape, peers.count)
        saved = SavedModel.open(options.source, Hints(vocab_multiple_for(shape), config=options.config))
        sharded_model = ShardedModel(config_of(options, saved.config, parallel), mesh)
        scorer = Scorer(sharded_model, length_of(options, sharded_model.config))
        yield LoadedWeights(saved, sharded_model, scorer, *saved.tokenizer(options.tokenizer))


def shared_answers(out: Path | None, identity: str) -> SavedAnswers:
    """Opens the answers that an interrupted evaluation saved, and checks that all processes see the same.

    Raises:
      UserError: the processes see different files.
    """
    saved = SavedAnswers(out, identity, writes=this_process() == 0)
    # Otherwise processes would run different numbers of batches, and their collectives hang.
    if len(set(all_gather_text("the saved answers", str(len(saved.answers))))) > 1:
        raise UserError(f"the processes see different files at {saved.path}: --out must be on a shared filesystem")
    return saved


@dataclass(frozen=True)
class AnswersIdentity:
    """Everything that answers depend on; saved answers with another identity are discarded."""

    options: Options
    settings: RowSettings
    tokenizer: str
    data: str
    """Digest of the data file."""
    weights: str
    """Identity of the weights."""

    @property
    def digest(self) -> str:
        """A digest of all facts but those that only affect rounding, such as the mesh."""
        facts = (
            # The digest of the tokenizer's content: the same folder may have another one by now.
            *(self.options.task, self.data, self.settings, digest_of(self.tokenizer), self.weights),
            # Not `rows`: padding of a batch changes no score by more than rounding.
            *(self.options.compute_dtype, self.options.attention, __version__),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def check_files(options: Options) -> None:
    """Checks the paths in options.

    Raises:
      UserError: the data file does not exist, or `--out` is a folder.
    """
    if options.task is not None and options.data is not None:
        check_data(options.task, options.data, "--data")
    if options.out is not None and options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder: name a JSON file")


def parallel_of(options: Options) -> tuple[MeshShape, Parallel]:
    """Returns the mesh, and how processes find each other.

    Raises:
      UserError: the mesh is invalid.
    """
    mesh_shape = parse_mesh(options.mesh)
    check_no_sharding_groups(mesh_shape)
    return mesh_shape, Parallel(
        mesh=options.mesh,
        sequence_parallel=options.sequence_parallel,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process_id,
    )


def config_of(options: Options, saved: Config, parallel: Parallel) -> Config:
    """Returns the config with which the weights' model is evaluated.

    Raises:
      UserError: there are fewer rows than pipeline stages.
    """
    settings = {"attention": options.attention, "compute_dtype": options.compute_dtype}
    return for_rows(saved, parallel, options.rows, **settings)


def length_of(options: Options, config: Config) -> int:
    """Returns the most tokens per row.

    Raises:
      UserError: they exceed the model's sequence length, or the overlap exceeds them.
    """
    longest = config.model.sequence_length
    length = options.sequence_length or longest
    if length > longest:
        raise UserError(f"--sequence-length {length} is above the model's sequence length of {longest}")
    if options.overlap is not None and options.overlap > length:
        raise UserError(f"--overlap {options.overlap} is above the {length} tokens of a window")
    return length


def print_header(sharded_model: ShardedModel, data: str) -> None:
    """Prints model, mesh and data."""
    if this_process():
        return
    model = sharded_model.config.model
    print(
        f"model   {model.family}: {model.num_layers} layers, hidden {model.hidden_size}, sequence "
        f"{model.sequence_length}, {sharded_model.config.training.compute_dtype}\n"
        f"mesh    {sharded_model.mesh_shape.description}\n"
        f"data    {data}",
        flush=True,
    )


def data_summary(task: EvaluationTask, saved: SavedAnswers) -> str:
    """Returns the number of rows and scored tokens, and of rows that are done already."""
    counted = sum(row.counted for row in task.rows)
    done = f"; {len(saved.answers):,} rows are done already" if saved.answers else ""
    return f"{len(task.rows):,} rows, {counted:,} scored tokens{done}" + (f"\nnote    {task.note}" if task.note else "")


def score_rows(rows: Sequence[ScoredRow], scorer: Scorer, parameters: Any, saved: SavedAnswers) -> None:
    """Scores all rows that are not saved yet, with a progress bar."""
    with (
        BytesProgress("evaluating", len(rows)) as progress,
        waiting("compiling, and scoring the first rows") as silence,
    ):
        for done in score_all(scorer, parameters, rows, saved):
            silence.begin(None)
            if this_process() == 0:
                progress.update(done)


def write(
    options: Options, weights: LoadedWeights, task_facts: Mapping[str, Any], results: Mapping[str, Any], seconds: float
) -> None:
    """Writes results, and facts about how they were obtained, to `--out` if it is given.

    Raises:
      UserError: the file can't be written.
    """
    if options.out is None:
        return
    facts = {
        **task_facts,
        "weights": {"from": options.source, "identity": weights.saved.identity},
        "tokenizer": weights.tokenizer_name,
        "mesh": str(weights.sharded_model.mesh_shape),
        "compute_dtype": options.compute_dtype,
        "sequence_length": weights.length,
        "mtjax": __version__,
        "seconds": round(seconds, 1),
        "results": results,
    }
    write_facts(options, facts)


def write_facts(options: Options, facts: Mapping[str, Any]) -> None:
    """Writes facts as JSON to `--out` if it is given.

    Raises:
      UserError: the file can't be written.
    """
    if options.out is not None:
        write_whole("--out", options.out, json.dumps(facts, indent=2) + "\n")
        print(f"\nwritten to {options.out}")


def shown(value: float) -> str:
    """Formats a result."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def digest(path: Path) -> str:
    """Returns the digest of a file, or of both files of a corpus."""
    # A corpus is named by its prefix, or by either of its files.
    names = [path, path.with_suffix(".bin"), path.with_suffix(".idx"), Path(f"{path}.bin"), Path(f"{path}.idx")]
    hashed = hashlib.sha256()
    for name in dict.fromkeys(name for name in names if name.is_file()):
        with name.open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()
