"""Pretrains BERT with pre-LN and post-LN layers on real text: losses, masked-token accuracy, export.

    python benchmarks/bert_pretraining.py --data TRAIN.jsonl.gz --valid-data VALID.jsonl.gz --tokenizer bert:vocab.txt

The two runs differ in `--norm-placement` only (Figure 7 of arXiv 1909.08053): same text, seed, sample order, sizes and
schedule, without dropout. Both are trained by `mtjax train`; then each predicts the masked tokens of held-out samples,
compared with the baseline of always predicting the most frequent masked token of training. Last, `mtjax convert`
exports each, and transformers computes the same logits (needs the extra `parity`; skipped without it).

It takes a quarter of an hour on two idle cores. Existing runs are resumed, or only evaluated if they are finished.
Losses, accuracies and facts of the machine go to benchmarks/results/bert_pretraining.json, curves to
docs/bert-stability.png.
"""

import datetime
import gzip
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from train_step import RESULTS, processor

from mtjax import data
from mtjax.config import Config
from mtjax.data.samples.split import Split
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.checkpoints.weights import find_weights, restore_weights
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.axes import use_rules
from mtjax.sharding.global_batch import global_batch
from mtjax.train.observability.metrics import read_metrics
from mtjax.train.step import TrainStep, make_train_step

Batch = dict[str, np.ndarray]

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "bert-stability.png"
LINES = 10
"""Lines of a document. A sentence of more than 512 tokens excludes its document, so documents must be short."""


@dataclass(frozen=True)
class Options:
    """Data, sizes and hyperparameters."""

    data: Path
    """JSON lines with `text`, optionally gzipped."""
    valid_data: Path
    """Held-out text in the same format, from other books."""
    tokenizer: str
    """BERT's vocabulary: bert:vocab.txt."""
    placements: tuple[Literal["pre", "post"], ...] = ("pre", "post")
    """Norm placements to train."""
    results: Path = RESULTS / "bert_pretraining.json"
    """Results file."""
    out: Path = Path("runs/bert-pretraining")
    """Folder for the sampled text, the runs and their exports."""
    steps: int = 700
    """Steps of each run."""
    batch: int = 16
    """Global batch size."""
    sequence: int = 64
    """Sequence length."""
    layers: int = 6
    """Layers of each model."""
    hidden: int = 128
    """Hidden size; the head dimension is 64."""
    learning_rate: float = 2e-3
    """Peak learning rate, after 10% of the steps as warm-up; the cosine schedule decays to 10% of it."""
    beta2: float = 0.98
    """Adam's beta2: lower than 0.999, as the runs are short."""
    init_std: float = 0.06
    """Standard deviation of initial weights: 0.02 at hidden size 1,024, scaled by the square root of the width."""
    megabytes: float = 4.0
    """Megabytes of text to sample evenly from the file; an eighth of it from the held-out file."""
    valid_batches: int = 64
    """Batches of held-out samples to evaluate at the end."""


# --- Text


def documents(path: Path) -> Iterator[str]:
    """Yields the texts of a file in documents of `LINES` lines, without empty lines."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as rows:
        for row in rows:
            lines = [line for line in json.loads(row)["text"].split("\n") if line.strip()]
            yield from ("\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES))


def cut(source: Path, target: Path, megabytes: float) -> Path:
    """Writes about so many megabytes of evenly spaced documents of `source`, unless `target` exists."""
    if not target.exists():
        total = sum(len(piece) for piece in documents(source))
        every = max(1, round(total / (megabytes * 1e6)))
        sampled = (piece for number, piece in enumerate(documents(source)) if number % every == 0)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in sampled), encoding="utf-8")
        temporary.replace(target)
    return target


# --- Training


def train(placement: str, options: Options) -> Path:
    """Trains or resumes one of the runs; returns its folder."""
    train_data = cut(options.data, options.out / "train.jsonl", options.megabytes)
    valid_data = cut(options.valid_data, options.out / "valid.jsonl", options.megabytes / 8)
    folder = options.out / f"{placement}-ln"
    settings = {
        "config": "bert-tiny",
        "norm-placement": placement,
        "num-layers": options.layers,
        "hidden-size": options.hidden,
        "num-heads": max(1, options.hidden // 64),
        "sequence-length": options.sequence,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "mesh": "1x1",
        "compute-dtype": "float32",
        "recompute": "none",
        "train-data": train_data,
        "valid-data": valid_data,
        "tokenizer": options.tokenizer,
        "cache-dir": options.out / "cache",
        "steps": options.steps,
        "global-batch-size": options.batch,
        "learning-rate": options.learning_rate,
        "min-learning-rate": options.learning_rate / 10,
        "warmup-steps": options.steps // 10,
        "beta2": options.beta2,
        "init-std": options.init_std,
        "valid-every": 100,
        "valid-batches": 10,
        "checkpoint-every": 200,
        "keep-last": 1,
        "out": folder,
    }
    mtjax(
        "train", *(argument for name, value in settings.items() for argument in (f"--{name}", str(value))), "--resume"
    )
    return folder


def mtjax(command: str, *options: str) -> None:
    """Runs a command of this checkout in a separate process."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = [sys.executable, "-m", f"mtjax.{command}", *options]
    subprocess.run(arguments, check=True, env=os.environ | {"PYTHONPATH": python_path})


# --- Accuracy


class Trained:
    """A finished run: its config, its parameters, and a function for logits."""

    def __init__(self, folder: Path) -> None:
        weights = find_weights(folder)
        self.folder, self.config = folder, weights.config
        self.program: TrainStep = make_train_step(self.config, attach_devices(parse_mesh("1x1")))
        self.parameters = restore_weights(weights, self.program.abstract_state.parameters)
        self._logits = jax.jit(self._compute)

    def logits(self, batch: Batch) -> np.ndarray:
        """Computes logits, float32[batch, sequence, vocabulary], without the vocabulary's padding."""
        inputs = {name: batch[name] for name in ("tokens", "token_types", "padding_mask")}
        with jax.set_mesh(self.program.mesh):
            arrays = global_batch(self.program.batch_sharding, inputs, len(batch["tokens"]))
            found = self._logits(self.parameters, arrays)
        return np.asarray(found)[..., : self.config.model.vocab_size]

    def _compute(self, parameters: Any, batch: Any) -> jax.Array:
        with use_rules(self.program.layout.rules):
            model: Any = self.program.model(parameters)
            return model.logits(model(batch["tokens"], batch["token_types"], batch["padding_mask"]))


def batches(config: Config, split: Split, count: int) -> Iterator[Batch]:
    """Yields the first global batches of a split."""
    size = config.training.global_batch_size
    samples = data.open_dataset(config, split, count * size)
    for start in range(0, count * size, size):
        rows = [samples[i] for i in range(start, start + size)]
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def unigram(config: Config) -> np.ndarray:
    """Computes frequencies of the masked tokens of training, with 0.1 added to each count: float64[vocabulary]."""
    counts = np.full(config.model.vocab_size or 0, 0.1)
    for batch in batches(config, "train", config.training.steps):
        labels = batch["labels"][batch["loss_mask"] > 0]
        counts += np.bincount(labels, minlength=len(counts))
    return counts / counts.sum()


def accuracy(run: Trained, baseline: np.ndarray, count: int, mask: int) -> dict[str, Any]:
    """Computes accuracies and losses (in nats) on held-out masked tokens, for the model and the baseline.

    A tenth of the masked tokens is unchanged and can be copied, so those replaced by `[MASK]` also count separately.
    """
    right, hidden, likely, losses, labels = [], [], [], [], []
    for batch in batches(run.config, "valid", count):
        where = batch["loss_mask"] > 0
        chosen, answers = run.logits(batch)[where], batch["labels"][where]
        right.append(chosen.argmax(-1) == answers)
        likely.append(answers == baseline.argmax())
        hidden.append(batch["tokens"][where] == mask)
        losses.append(jax.nn.logsumexp(jnp.asarray(chosen), axis=-1) - chosen[np.arange(len(answers)), answers])
        labels.append(answers)
    masked, guessed, by_baseline = np.concatenate(hidden), np.concatenate(right), np.concatenate(likely)
    return {
        "masked_tokens": len(masked),
        "accuracy": float(guessed.mean()),
        "unigram_accuracy": float(by_baseline.mean()),
        "accuracy_where_hidden": float(guessed[masked].mean()),
        "unigram_accuracy_where_hidden": float(by_baseline[masked].mean()),
        "loss": float(np.concatenate(losses).mean()),
        "unigram_loss": float(-np.log(baseline[np.concatenate(labels)]).mean()),
    }


# --- Export


def export(run: Trained) -> dict[str, Any]:
    """Converts a run and compares its logits of two held-out batches with those of transformers."""
    target = run.folder.with_name(f"{run.folder.name}-hf")
    shutil.rmtree(target, ignore_errors=True)
    mtjax("convert", "--from", f"mtjax:{run.folder}", "--to", f"hf:{target}")
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return {"model": "not loaded: torch and transformers are not installed"}
    import torch
    import transformers

    network: Any = transformers.AutoModelForPreTraining.from_pretrained(target)
    network.eval()
    difference = largest = 0.0
    same = []
    for batch in batches(run.config, "valid", 2):
        inputs = {name: torch.tensor(batch[name]).long() for name in ("tokens", "token_types", "padding_mask")}
        with torch.no_grad():
            found = network(
                inputs["tokens"], attention_mask=inputs["padding_mask"], token_type_ids=inputs["token_types"]
            )
        real = batch["padding_mask"] > 0
        ours, theirs = run.logits(batch)[real], found.prediction_logits.numpy()[real]
        difference = max(difference, float(np.abs(ours - theirs).max()))
        largest = max(largest, float(np.abs(theirs).max()))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    return {
        "model": type(network).__name__,
        "tokens": sum(map(len, same)),
        "max_difference_over_max_logit": difference / largest,
        "same_best_token": float(np.concatenate(same).mean()),
    }


# --- Results


def plot(curves: dict[str, list[dict[str, Any]]]) -> None:
    """Plots masked-LM losses and gradient norms of both runs."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, norms = figure.subplots(1, 2)
    for placement, entries in curves.items():
        steps, label = [e["step"] for e in entries], f"{placement}-LN"
        line = losses.plot(steps, [e["masked_lm"] for e in entries], linewidth=1, label=f"{label}, training")[0]
        valid = [e for e in entries if "valid_masked_lm" in e]
        values = [e["valid_masked_lm"] for e in valid]
        losses.plot([e["step"] for e in valid], values, "o", color=line.get_color(), label=f"{label}, held out")
        norms.plot(steps, [e["grad_norm"] for e in entries], linewidth=1, label=label)
    losses.set(xlabel="step", ylabel="masked-LM loss (nats per masked token)")
    norms.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log")
    for axes in (losses, norms):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(PLOT, dpi=110)


def measured(run: Trained, baseline: np.ndarray, valid_batches: int) -> dict[str, Any]:
    """Computes all results of one run."""
    names = ("step", "masked_lm", "sentence_order", "grad_norm", "valid_masked_lm", "valid_sentence_order", "step_time")
    curve = [e for e in read_metrics(run.folder / "metrics.jsonl") if "valid_loss" in e or e["step"] == 1]
    mask = data.load_tokenizer(run.config).special("[MASK]")
    assert mask is not None  # BERT samples require it
    return {
        "norm_placement": run.config.model.norm_placement,
        "held_out": accuracy(run, baseline, valid_batches, mask),
        "export": export(run),
        "curve": [{name: round(e[name], 4) for name in names if name in e} for e in curve],
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "layers", "masked-LM loss", "unigram's", "accuracy", "unigram's", "where hidden", "unigram's", "export"
    )
    for row in rows:
        found, exported = row["held_out"], row["export"]
        shares = ("accuracy", "unigram_accuracy", "accuracy_where_hidden", "unigram_accuracy_where_hidden")
        table.add_row(
            f"{row['norm_placement']}-LN",
            f"{found['loss']:.3f}",
            f"{found['unigram_loss']:.3f}",
            *(f"{found[name]:.1%}" for name in shares),
            f"{exported['model']} {exported.get('max_difference_over_max_logit', float('nan')):.1e}",
        )
    console.print(table)


def main() -> None:
    """Trains, measures, exports, writes."""
    options = tyro.cli(Options, description=__doc__)
    console = Console(width=None if Console().is_terminal else 150)
    folders = {placement: train(placement, options) for placement in options.placements}
    runs = [Trained(folder) for folder in folders.values()]
    baseline = unigram(runs[0].config)
    rows = [measured(run, baseline, options.valid_batches) for run in runs]
    if len(runs) > 1:
        plot({placement: read_metrics(folder / "metrics.jsonl") for placement, folder in folders.items()})
    show(rows, console)
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages if importlib.util.find_spec(name)},
        "options": {
            k: v.name if isinstance(v, Path) else v
            for k, v in vars(options).items()
            if k not in ("tokenizer", "results")
        },
    }
    options.results.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    console.print(f"written to {options.results}" + (f" and {PLOT}" if len(runs) > 1 else ""))


if __name__ == "__main__":
    main()
