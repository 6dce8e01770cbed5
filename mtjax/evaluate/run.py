"""An evaluation from its options to its results: read it from top to bottom."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax import __version__
from mtjax.config import Config, Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.data.progress import ProgressLine
from mtjax.data.tokens.tokenizer import digest_of
from mtjax.errors import UserError, first_line
from mtjax.evaluate.answers import Kept
from mtjax.evaluate.options import Options
from mtjax.evaluate.rows import scores_of
from mtjax.evaluate.score import Scorer, score_all
from mtjax.evaluate.tasks.registry import KINDS
from mtjax.evaluate.tasks.task import Results, Settings, Task
from mtjax.models.placed import Placed
from mtjax.sharding.mesh import attach_devices
from mtjax.theory.mesh import MeshShape, check_implemented, parse_mesh
from mtjax.train.compile_cache import CompileCache
from mtjax.train.processes.exchange import exchange, this_process
from mtjax.train.processes.peers import Peers


def evaluate(options: Options) -> Results:
    """Evaluates the weights and shows the results; in several processes, the first one does.

    Raises:
      UserError: weights, data, tokenizer and mesh don't fit each other, or can't be read.
    """
    start = time.monotonic()
    check_data(options)
    shape, parallel = parallel_of(options)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        peers.advice = "start the evaluation again: what is done is kept beside --out"
        mesh = attach_devices(shape, peers.count)
        saved = SavedModel.open(options.source, Hints(vocab_multiple_for(shape), config=options.config))
        config = config_of(options, saved.config, parallel)
        placed = Placed(config, mesh)
        length = length_of(options, config)
        scorer = Scorer(placed, length)
        name, tokenizer = saved.tokenizer(options.tokenizer)
        settings = Settings(length, min(options.overlap or length, length))
        task = KINDS[options.task].open(options.data, tokenizer, settings)
        question = Question(options, settings, name, digest(options.data), saved.identity)
        kept = Kept(options.out, question.identity, writes=this_process() == 0)
        if len(set(exchange("the answers that are kept", str(len(kept.answers))))) > 1:
            raise UserError(f"the processes see different files at {kept.path}: --out must be on a disk that all share")
        with kept:
            introduce(task, placed, kept)
            score_task(task, scorer, saved.parameters(placed), kept)
            results = task.results(scores_of(kept.answers))
            if this_process() == 0:
                report(options, question, placed, results, time.monotonic() - start)
                kept.forget()
    return results


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


def check_data(options: Options) -> None:
    """Checks what needs no model.

    Raises:
      UserError: the data file is not there, or `--out` can't be a file.
    """
    indexed = options.data.with_suffix(".idx").is_file() or Path(f"{options.data}.idx").is_file()
    if not options.data.is_file() and not (options.task == "perplexity" and indexed):
        is_folder = options.data.is_dir()
        raise UserError(f"--data {options.data} {'is a folder: name a file' if is_folder else 'does not exist'}")
    if options.out is not None and options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder: name a JSON file")


def parallel_of(options: Options) -> tuple[MeshShape, Parallel]:
    """The mesh, and how processes find each other.

    Raises:
      UserError: the mesh is none.
    """
    shape = parse_mesh(options.mesh)
    check_implemented(shape)
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


def introduce(task: Task, placed: Placed, kept: Kept) -> None:
    """Says what is about to happen."""
    if this_process():
        return
    model = placed.config.model
    counted = sum(row.counted for row in task.rows)
    print(
        f"model   {model.family}: {model.num_layers} layers, hidden {model.hidden_size}, sequence "
        f"{model.sequence_length}, {placed.config.training.compute_dtype}\n"
        f"mesh    {placed.shape.in_words}\n"
        f"data    {len(task.rows):,} rows, {counted:,} tokens count"
        + (f"; {len(kept.answers):,} rows are done already" if kept.answers else "")
        + (f"\nnote    {task.note}" if task.note else ""),
        flush=True,
    )


def score_task(task: Task, scorer: Scorer, parameters: Any, kept: Kept) -> None:
    """Scores all rows, with a bar."""
    with ProgressLine("evaluating", len(task.rows)) as progress:
        for done in score_all(scorer, parameters, task.rows, kept):
            if this_process() == 0:
                progress.update(done)


def report(options: Options, question: Question, placed: Placed, results: Results, seconds: float) -> None:
    """Prints the results, and writes them to `--out`.

    Raises:
      UserError: the file can't be written.
    """
    width = max(map(len, results))
    print("\n" + "\n".join(f"{name:{width}}  {_shown(value)}" for name, value in results.items()))
    if options.out is None:
        return
    facts = {
        "task": options.task,
        "data": {"file": str(options.data), "sha256": question.data},
        "weights": {"from": options.source, "identity": question.weights},
        "tokenizer": question.tokenizer,
        "mesh": str(placed.shape),
        "compute_dtype": options.compute_dtype,
        "sequence_length": question.settings.length,
        "overlap": question.settings.overlap,
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


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def digest(path: Path) -> str:
    """Of a file, or of both files of a corpus."""
    names = [path, path.with_suffix(".bin"), path.with_suffix(".idx"), Path(f"{path}.bin"), Path(f"{path}.idx")]
    hashed = hashlib.sha256()
    for name in dict.fromkeys(name for name in names if name.is_file()):
        with name.open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()
