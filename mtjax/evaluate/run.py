"""An evaluation from its options to its results: read it from top to bottom."""

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
from mtjax.data.progress import ProgressLine
from mtjax.data.tokens.tokenizer import digest_of
from mtjax.errors import UserError, first_line
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.options import Options
from mtjax.evaluate.rows import Row, scores_of
from mtjax.evaluate.score import Scorer, score_all
from mtjax.evaluate.tasks.registry import KINDS, check_data
from mtjax.evaluate.tasks.task import Results, Settings, Task
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.mesh import attach_devices
from mtjax.theory.mesh import MeshShape, parse_mesh
from mtjax.train.compile_cache import CompileCache
from mtjax.train.processes.coordination import all_gather_text, this_process
from mtjax.train.processes.peers import Peers


@dataclass(frozen=True)
class Subject:
    """Weights on a mesh, ready to be asked."""

    saved: SavedModel
    placed: ShardedModel
    scorer: Scorer
    tokenizer_name: str
    tokenizer: Tokenizer

    @property
    def length(self) -> int:
        """Tokens that are read at once."""
        return self.scorer.longest


def evaluate(options: Options) -> Results:
    """Evaluates the weights on a task and shows the results; in several processes, the first one does.

    Raises:
      UserError: weights, data, tokenizer and mesh don't fit each other, or can't be read.
    """
    start = time.monotonic()
    assert options.task is not None and options.data is not None  # Options.check has looked
    check_files(options)
    with opened(options) as subject:
        first = tuple(first_tokens_of(subject.saved, subject.tokenizer))
        settings = Settings(subject.length, min(options.overlap or subject.length, subject.length), first)
        task = KINDS[options.task].open(options.data, subject.tokenizer, settings)
        question = Question(options, settings, subject.tokenizer_name, digest(options.data), subject.saved.identity)
        with kept_by_all(options.out, question.identity) as kept:
            introduce(subject.placed, data_in_words(task, kept))
            score_rows(task.rows, subject.scorer, subject.saved.parameters(subject.placed), kept)
            results = task.results(scores_of(kept.answers))
            if this_process() == 0:
                width = max(map(len, results))
                print("\n" + "\n".join(f"{name:{width}}  {shown(value)}" for name, value in results.items()))
                asked = {
                    "task": options.task,
                    "data": {"file": str(options.data), "sha256": question.data},
                    "overlap": settings.overlap,
                }
                write(options, subject, asked, results, time.monotonic() - start)
                kept.forget()
    return results


@contextlib.contextmanager
def opened(options: Options) -> Iterator[Subject]:
    """The weights that options name, on their mesh.

    Raises:
      UserError: weights, tokenizer and mesh don't fit each other, or can't be read.
    """
    shape, parallel = parallel_of(options)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        peers.advice = "start the evaluation again: what is done is kept beside --out"
        mesh = attach_devices(shape, peers.count)
        saved = SavedModel.open(options.source, Hints(vocab_multiple_for(shape), config=options.config))
        placed = ShardedModel(config_of(options, saved.config, parallel), mesh)
        scorer = Scorer(placed, length_of(options, placed.config))
        yield Subject(saved, placed, scorer, *saved.tokenizer(options.tokenizer))


def kept_by_all(out: Path | None, identity: str) -> SavedAnswers:
    """The answers that an earlier start has left, the same in all processes.

    Raises:
      UserError: the processes see different ones.
    """
    kept = SavedAnswers(out, identity, writes=this_process() == 0)
    if len(set(all_gather_text("the answers that are kept", str(len(kept.answers))))) > 1:
        raise UserError(f"the processes see different files at {kept.path}: --out must be on a disk that all share")
    return kept


@dataclass(frozen=True)
class Question:
    """What is asked of which weights: answers to another question are of no use."""

    options: Options
    settings: Settings
    tokenizer: str
    data: str
    """Digest of the file."""
    weights: str
    """Identity of the weights."""

    @property
    def identity(self) -> str:
        """Changes with everything that an answer depends on but rounding: not with the mesh."""
        facts = (
            *(self.options.task, self.data, self.settings, digest_of(self.tokenizer), self.weights),
            *(self.options.compute_dtype, self.options.attention, __version__),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def check_files(options: Options) -> None:
    """Checks what needs no model.

    Raises:
      UserError: the data file is not there, or `--out` can't be a file.
    """
    if options.task is not None and options.data is not None:
        check_data(options.task, options.data, "--data")
    if options.out is not None and options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder: name a JSON file")


def parallel_of(options: Options) -> tuple[MeshShape, Parallel]:
    """The mesh, and how processes find each other.

    Raises:
      UserError: the mesh is none.
    """
    shape = parse_mesh(options.mesh)
    return shape, Parallel(
        mesh=options.mesh,
        sequence_parallel=options.sequence_parallel,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process_id,
    )


def config_of(options: Options, saved: Config, parallel: Parallel) -> Config:
    """The weights' model as it is evaluated, without anything that only training has.

    Raises:
      UserError: there are fewer rows than stages.
    """
    settings = {"attention": options.attention, "compute_dtype": options.compute_dtype}
    return for_rows(saved, parallel, options.rows, **settings)


def length_of(options: Options, config: Config) -> int:
    """Tokens that the model reads at once.

    Raises:
      UserError: they are more than it can, or the overlap is longer.
    """
    longest = config.model.sequence_length
    length = options.sequence_length or longest
    if length > longest:
        raise UserError(f"--sequence-length {length} is above the {longest} tokens that the model was made for")
    if options.overlap is not None and options.overlap > length:
        raise UserError(f"--overlap {options.overlap} is above the {length} tokens of a window")
    return length


def introduce(placed: ShardedModel, data: str) -> None:
    """Says what is about to happen."""
    if this_process():
        return
    model = placed.config.model
    print(
        f"model   {model.family}: {model.num_layers} layers, hidden {model.hidden_size}, sequence "
        f"{model.sequence_length}, {placed.config.training.compute_dtype}\n"
        f"mesh    {placed.shape.description}\n"
        f"data    {data}",
        flush=True,
    )


def data_in_words(task: Task, kept: SavedAnswers) -> str:
    """What a task asks, and how much of it is done."""
    counted = sum(row.counted for row in task.rows)
    done = f"; {len(kept.answers):,} rows are done already" if kept.answers else ""
    return f"{len(task.rows):,} rows, {counted:,} tokens count{done}" + (f"\nnote    {task.note}" if task.note else "")


def score_rows(rows: Sequence[Row], scorer: Scorer, parameters: Any, kept: SavedAnswers) -> None:
    """Scores all rows that are not kept yet, with a bar."""
    with ProgressLine("evaluating", len(rows)) as progress:
        for done in score_all(scorer, parameters, rows, kept):
            if this_process() == 0:
                progress.update(done)


def write(
    options: Options, subject: Subject, asked: Mapping[str, Any], results: Mapping[str, Any], seconds: float
) -> None:
    """Writes results to `--out`, if there is one, with what they are of.

    Raises:
      UserError: the file can't be written.
    """
    if options.out is None:
        return
    facts = {
        **asked,
        "weights": {"from": options.source, "identity": subject.saved.identity},
        "tokenizer": subject.tokenizer_name,
        "mesh": str(subject.placed.shape),
        "compute_dtype": options.compute_dtype,
        "sequence_length": subject.length,
        "mtjax": __version__,
        "seconds": round(seconds, 1),
        "results": results,
    }
    try:
        temporary = options.out.with_name(f".{options.out.name}.new")
        temporary.write_text(json.dumps(facts, indent=2) + "\n")
        temporary.replace(options.out)
    except OSError as e:
        raise UserError(f"--out {options.out} can't be written: {e.strerror or first_line(e)}") from e
    print(f"\nwritten to {options.out}")


def shown(value: float) -> str:
    """A result for people."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def digest(path: Path) -> str:
    """Of a file, or of both files of a corpus."""
    names = [path, path.with_suffix(".bin"), path.with_suffix(".idx"), Path(f"{path}.bin"), Path(f"{path}.idx")]
    hashed = hashlib.sha256()
    for name in dict.fromkeys(name for name in names if name.is_file()):
        with name.open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()
