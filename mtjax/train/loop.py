"""A training run from its config to its summary: the one long story, read it from top to bottom."""

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mtjax import config as configs
from mtjax import data
from mtjax.config import Config
from mtjax.data import BatchSchedule, Dataset, Loader, Tokenizer
from mtjax.errors import UserError
from mtjax.plan.formulas import Shape, parameters
from mtjax.sharding.layouts import check_divisible, check_ramp
from mtjax.sharding.mesh import MeshShape, attach_devices, parse_mesh
from mtjax.sharding.placement import global_batch, process_rows
from mtjax.sharding.processes import start_processes
from mtjax.train.checkpoint import Checkpoints, Restored
from mtjax.train.metrics import CONVENTION, MetricsLog, Rates, plot_losses
from mtjax.train.progress import ProgressLine
from mtjax.train.run_folder import choose_folder
from mtjax.train.sample import CONTINUES_TEXT, continue_text
from mtjax.train.signals import StopRequest
from mtjax.train.step import Program, State, make_program
from mtjax.train.weights import Weights, check_same_weights, find_weights, restore_weights


@dataclass
class Run:
    """What the sections below share."""

    config: Config
    folder: Path
    program: Program
    tokenizer: Tokenizer
    text: Dataset
    held_out: Dataset | None
    """What validation reads; None when there is none."""
    schedule: BatchSchedule
    progress: ProgressLine
    checkpoints: Checkpoints
    metrics: MetricsLog | None
    """Of the first process only."""


def train(config: Config, name: str, *, inspect: bool = False) -> None:
    """Trains the model of `config`; `name` is what the run is called; `inspect` shows the program before it runs.

    Raises:
      UserError: the config, the machine, the data or a checkpoint does not allow it.
    """
    # --- Processes and devices
    num_processes = start_processes(config.parallel)
    shape = parse_mesh(config.parallel.mesh)
    check_divisible(config, shape)
    schedule = data.batch_schedule(config.training)
    check_ramp(config, schedule.batch_sizes(), shape)
    mesh = attach_devices(shape, num_processes)
    first_process = jax.process_index() == 0
    folder = choose_folder(config.output, name)
    weights = find_weights(config.training.init_from) if config.training.init_from else None

    # --- Text
    tokenizer = data.load_tokenizer(config)
    config = resolve(config, tokenizer, folder)
    text = data.open_dataset(config, "train", data.train_samples(config.training))
    held_out_samples = config.output.valid_batches * config.training.global_batch_size
    held_out = data.open_dataset(config, "valid", held_out_samples) if config.output.valid_every else None

    # --- Model: abstract until there is a checkpoint or a seed
    program = make_program(config, mesh)
    if weights is not None:
        check_same_weights(weights, program.abstract_parameters, program.config)
    rates = Rates.of(config, list(mesh.devices.flat))
    with contextlib.ExitStack() as stack:
        progress = ProgressLine(config.training.steps, rates, first_process=first_process)
        introduce(config, shape, folder, progress)
        if program.attention_fallback:
            progress.say(f"note    attention is XLA's, not cuDNN's: {program.attention_fallback}")
        if program.placed.unsplit:
            names = ", ".join(program.placed.unsplit)
            progress.say(f"note    whole on every data rank, for no dimension divides {shape.data} ways: {names}")
        if inspect:
            from mtjax.inspect.hook import show_program

            show_program(program, progress.console)
        output = config.output
        checkpoints = Checkpoints(folder / "checkpoints", keep_last=output.keep_last, keep_every=output.keep_every)
        stack.callback(checkpoints.close)

        # --- State: restored, or fresh
        start = restore_or_initialize(program, checkpoints, weights, config, progress)
        metrics = None
        if first_process:  # not before: a checkpoint that is refused leaves its run as it was
            configs.save(shareable(config), folder / "config.toml")
            tokenizer.save(folder)
            metrics = MetricsLog(folder, from_step=start.step)
            stack.callback(metrics.close)

        # --- Steps
        run = Run(config, folder, program, tokenizer, text, held_out, schedule, progress, checkpoints, metrics)
        stack.enter_context(progress)
        state, stopped = run_steps(run, start)

    # --- What came of it
    if stopped:
        progress.say(f"stopped by {stopped} after step {int(state.step)}; saved. Go on with: {resume_command(run)}")
    else:
        summarise(run, state)


def resolve(config: Config, tokenizer: Tokenizer, folder: Path) -> Config:
    """The config with everything filled in that the text and the machine decide.

    Raises:
      UserError: the vocabulary is smaller than the tokenizer's.
    """
    needed = data.vocabulary_size(config, tokenizer)
    size = config.model.vocab_size or needed
    if size < needed:
        raise UserError(f"vocab_size {size} is below the {needed} tokens of the tokenizer; raise it, or leave it out")
    return configs.replace(config, vocab_size=size, steps=data.train_steps(config.training), out=folder)


def shareable(config: Config) -> Config:
    """The config without what belongs to this process or this start of the run."""
    return configs.replace(config, resume=False, coordinator=None, num_processes=None, process_id=None)


def introduce(config: Config, shape: MeshShape, folder: Path, progress: ProgressLine) -> None:
    """Prints the resolved config, short."""
    model, training = config.model, config.training
    device = jax.devices()[0]
    kind = f"{shape.size} virtual CPU devices" if device.platform == "cpu" else f"{shape.size} x {device.device_kind}"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    count = parameters(Shape.of(model))
    progress.say(
        f"model   {model.family}, {count / 1e6:,.1f}M parameters: {model.num_layers} layers, "
        f"hidden {model.hidden_size}, {model.num_heads} heads, sequence {model.sequence_length}, "
        f"vocabulary {model.vocab_size}\n"
        f"mesh    {shape} (data x model): {kind}{processes}\n"
        f"batch   {training.global_batch_size} x {model.sequence_length} tokens, "
        f"{training.compute_dtype}, recompute {training.recompute}\n"
        f"data    {config.data.data or config.data.train_data or 'text that comes with Python'}\n"
        f"out     {folder} (TFLOP/s and MFU are of {CONVENTION})"
    )


def restore_or_initialize(
    program: Program, checkpoints: Checkpoints, weights: Weights | None, config: Config, progress: ProgressLine
) -> Restored:
    """Where the run begins: the last good checkpoint with --resume, else step 0 with given or random weights."""
    if config.output.resume:
        restored = checkpoints.restore(program.abstract_state, config)
        if restored is not None:
            progress.say(f"resumed from step {restored.step} in {checkpoints.folder}")
            if restored.step >= config.training.steps:
                progress.say(f"all {config.training.steps} steps are done already; --steps asks for more")
            return restored
        progress.say(f"no checkpoint in {checkpoints.folder}: starting from step 0")
    parameters = None
    if weights is not None:
        parameters = restore_weights(weights, program.abstract_state.parameters)
        progress.say(f"weights from {weights.folder}")
    return Restored(0, program.initialize(config.training.seed, parameters), 0)


def run_steps(run: Run, start: Restored) -> tuple[State, str | None]:
    """Steps until the last one, or until a signal; returns the last state, saved, and the signal's name.

    The host runs ahead of the devices: it waits for them where something is logged, saved or validated, nowhere else.
    """
    training, output = run.config.training, run.config.output
    state, consumed = start.state, start.consumed_samples
    timer = StepTimer(start.step)
    signal_name = None
    with StopRequest() as stop, open_batches(run, run.text, consumed) as batches:
        for step in range(start.step + 1, training.steps + 1):
            size = run.schedule.batch_size(consumed)
            state, results = run.program.step(state, next_batch(run, batches, size))
            consumed += size
            run.progress.advance(step)
            last = step == training.steps
            validate = run.held_out is not None and (step % output.valid_every == 0 or last)
            if step % output.log_every == 0 or step == start.step + 1 or validate or last:
                entry = measure(run, step, jax.device_get(results), timer)
                if validate:
                    entry |= validation_losses(run, state)
                    timer.restart(step)
                report(run, entry, compiled=step == start.step + 1)
            signal_name = stop.at(step)
            if last or signal_name or (output.checkpoint_every and step % output.checkpoint_every == 0):
                run.checkpoints.save(state, run.config, consumed)
                timer.restart(step)
            if signal_name:
                break
    return state, signal_name


@dataclass
class StepTimer:
    """Seconds per step since something last stopped the clock; the first step, which compiles, is on its own."""

    step: int
    since: float = dataclasses.field(default_factory=time.perf_counter)

    def lap(self, step: int) -> float:
        """Mean seconds of the steps since the last lap or restart."""
        seconds = (time.perf_counter() - self.since) / (step - self.step)
        self.restart(step)
        return seconds

    def restart(self, step: int) -> None:
        """Leaves out what happened since the last lap."""
        self.step, self.since = step, time.perf_counter()


def measure(run: Run, step: int, results: dict[str, Any], timer: StepTimer) -> dict[str, Any]:
    """A step's entry in the metrics.

    Raises:
      UserError: the loss is no longer a number.
    """
    seconds = timer.lap(step)
    entry = {"step": step} | {name: float(value) for name, value in results.items()}
    entry |= {"step_time": seconds, "tokens_per_second": entry["tokens"] / seconds}
    if not math.isfinite(entry["loss"]):
        saved = run.checkpoints.latest()
        raise UserError(
            f"the loss is {entry['loss']} at step {step} (gradient norm {entry['grad_norm']}); nothing was saved since "
            f"{'the start' if saved is None else f'step {saved}'}: lower --learning-rate or raise --warmup-steps"
        )
    return entry


def report(run: Run, entry: dict[str, Any], *, compiled: bool) -> None:
    """Shows an entry and writes it down; `compiled` says that its time is mostly the compiler's."""
    if run.metrics is not None:
        run.metrics.write(entry)
    run.progress.update(entry, compiled=compiled)


def validation_losses(run: Run, state: State) -> dict[str, float]:
    """Means over the first batches of the held-out text: `valid_loss`, and each loss where the family has several."""
    size = run.config.training.global_batch_size
    totals: dict[str, tuple[Any, Any]] = {}
    with open_batches(run, run.held_out, 0, data.constant(size)) as batches:
        for _ in range(run.config.output.valid_batches):
            sums = run.program.evaluate(state.parameters, next_batch(run, batches, size))
            totals = {n: (s + totals[n][0], w + totals[n][1]) if totals else (s, w) for n, (s, w) in sums.items()}
    means = {f"valid_{name}": float(s) / max(float(w), 1.0) for name, (s, w) in totals.items()}
    return means | {"valid_loss": sum(means.values())}


def open_batches(run: Run, dataset: Any, consumed: int, schedule: BatchSchedule | None = None) -> Loader:
    """This process' rows of every batch from a position in the data on."""
    mesh = run.program.mesh
    return data.open_loader(
        run.config,
        dataset,
        rows=lambda size: process_rows(mesh, size),
        start_sample=consumed,
        schedule=schedule or run.schedule,
    )


def next_batch(run: Run, batches: Loader, size: int) -> dict[str, jax.Array]:
    """The next global batch, of what the program reads."""
    local = next(batches)
    return global_batch(run.program.mesh, {name: local[name] for name in run.program.batch_names}, size)


def resume_command(run: Run, extra: str = "") -> str:
    """What to type to go on with this run."""
    return f"mtjax train --config {run.folder / 'config.toml'} --resume{extra}"


def summarise(run: Run, state: State) -> None:
    """Where the results are, how the model writes, and what to try next."""
    steps = run.config.training.steps
    sample = sample_of(run, state)
    if run.metrics is not None:
        plot_losses(run.metrics.path, run.folder / "loss.png")
    run.progress.say(
        f"\ndone    {steps} steps; metrics, loss.png, TensorBoard events and checkpoints are in {run.folder}\n"
        f"{sample}"
        f"next    {resume_command(run, f' --steps {2 * steps}')}\n"
        f"        mtjax inspect --config {run.folder / 'config.toml'}"
    )


def sample_of(run: Run, state: State) -> str:
    """A line with a continuation of the prompt; nothing for families that don't continue text."""
    if run.config.model.family not in CONTINUES_TEXT:
        return ""
    return f"sample  {continue_text(run.program, state.parameters, run.tokenizer, run.config.output.prompt)!r}\n"
