"""Scores of texts: of a classifier, or of any program that reads and writes JSON lines."""

import json
import math
import shlex
import subprocess
from collections.abc import Callable, Sequence

import numpy as np

from mtjax.config import Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.errors import UserError, first_line, shortened
from mtjax.finetune.outputs import Outputs
from mtjax.finetune.rows import Example
from mtjax.finetune.samples import RowEncoder
from mtjax.finetune.tasks.registry import task_of
from mtjax.layout.mesh import parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.devices import attach_devices

Scorer = Callable[[Sequence[str]], list[float]]
"""Returns the score of each text."""
COMMAND = "command:"
HEADS = ("classification", "regression")


def open_scorer(name: str, label: str | None = None, *, mesh: str = "1x1", rows: int = 32) -> Scorer:
    """Opens what `--scorer` names.

    Args:
      name: `command:PROGRAM ARGUMENTS`; or weights with a head for classes or values: a run, a folder, hf:DIR.
      label: the class whose probability is the score; the last of two when None.
      mesh: DATAxMODEL, for weights.
      rows: batch size per data-parallel rank.

    Raises:
      UserError: the weights have no such head or class, or read two texts; or a label is given for a program.
    """
    if name.startswith(COMMAND):
        if label is not None:
            raise UserError("--score-label needs a classifier, and --scorer is a command: remove it")
        return lambda texts: _scores_of_command(name.removeprefix(COMMAND), texts)
    return _classifier(name, label, mesh, rows)


def _classifier(source: str, label: str | None, mesh: str, rows: int) -> Scorer:
    mesh_shape = parse_mesh(mesh)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(mesh_shape)), "--scorer")
    config = saved.config
    if config.model.head not in HEADS:
        raise UserError(
            f"--scorer {source} has a head for {config.model.head}, and must have one for classes or values: finetune "
            "it with mtjax finetune --task classify or regress"
        )
    task = task_of(config)
    if task.name not in ("classify", "regress") or "," in (config.finetuning.text_fields or ""):
        raise UserError(f"--scorer {source} reads two texts, and each row has one: finetune it on one field")
    column = _column(source, label, config.finetuning.labels or (), config.model.num_labels, config.model.head)
    sharded_model = ShardedModel(for_rows(config, Parallel(mesh=mesh), rows), attach_devices(mesh_shape))
    encoder, outputs = RowEncoder(saved.tokenizer()[1], config.model.family), Outputs(sharded_model)
    parameters = saved.parameters(sharded_model)

    def scores(texts: Sequence[str]) -> list[float]:
        examples = [Example((text,), None, line) for line, text in enumerate(texts, 1)]
        # `which` is "": rows without labels are kept.
        encoded = task.encoded(examples, encoder, config)
        samples = encoded.samples(config.model.sequence_length)
        values = encoded.comparable(encoded.read(outputs.compute(parameters, samples)).astype(np.float64))
        return [float(value) for value in values[:, column]]

    return scores


def _column(source: str, label: str | None, labels: Sequence[str], count: int, head: str) -> int:
    if head == "regression":
        if label is not None:
            raise UserError(f"--score-label {label} needs classes, and --scorer {source} gives a value: remove it")
        return 0
    labels = labels or [str(number) for number in range(count)]
    if label is None and len(labels) != 2:
        raise UserError(f"--scorer {source} has the classes {', '.join(labels)}: name one with --score-label")
    if label is not None and label not in labels:
        known = ", ".join(labels)
        raise UserError(f"--score-label is {label}, and --scorer {source} has the classes {known}: name one of these")
    return labels.index(label) if label is not None else 1


def _scores_of_command(command: str, texts: Sequence[str]) -> list[float]:
    """Runs a program, without a shell, that reads `{"text": ...}` and writes `{"score": ...}` for each line.

    Raises:
      UserError: it can't be run, fails, or does not write a finite number for each text.
    """
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    try:
        # stderr is the user's: a program's progress and errors are shown as they come.
        done = subprocess.run(shlex.split(command), input=lines.encode(), stdout=subprocess.PIPE, check=False)
    except (OSError, ValueError, IndexError) as e:
        raise UserError(f"--scorer {COMMAND}{command} can't be run: {first_line(e)}") from e
    if done.returncode:
        raise UserError(f"--scorer {COMMAND}{command} ended with exit code {done.returncode}: see its messages above")
    # At line feeds only: `splitlines` would also divide at other separators within a line.
    found = [line for line in done.stdout.split(b"\n") if line.strip()]
    if len(found) != len(texts):
        wrote = f"wrote {len(found)} lines for {len(texts)} texts"
        raise UserError(f"--scorer {COMMAND}{command} {wrote}: it must write a line for each")
    return [_score_of(line, f"line {number} of --scorer {COMMAND}{command}") for number, line in enumerate(found, 1)]


def _score_of(line: bytes, where: str) -> float:
    try:
        score = json.loads(line)["score"]
        if isinstance(score, bool) or not math.isfinite(score):
            raise ValueError
    except (ValueError, KeyError, TypeError) as e:
        shown = shortened(line.decode(errors="replace"))
        raise UserError(f'{where} is {shown!r}, and must be an object with a finite number "score"') from e
    return float(score)
