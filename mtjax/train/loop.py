"""A training run from its config to its summary: the one long story, read it from top to bottom."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from rich.console import Console

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.sizes import dense_layers
from mtjax.errors import UserError
from mtjax.models.mixers.experts import COUNTS, LOAD, LOST
from mtjax.storage import shown
from mtjax.train.changes import parse_allowed
from mtjax.train.checkpoints.checkpoint import Checkpoints, Restored
from mtjax.train.checkpoints.local import LocalCheckpoints, open_local
from mtjax.train.checkpoints.saves import Saves
from mtjax.train.compile_cache import CompileCache, programs_in_words
from mtjax.train.feed import next_batch, open_batches
from mtjax.train.folder.run_folder import claim_folder, writing
from mtjax.train.nonfinite_steps import NonfiniteSteps
from mtjax.train.objective import PRETRAINING, Evaluations, Objective, RunData
from mtjax.train.observability import start_timer
from mtjax.train.observability.best import Goal
from mtjax.train.observability.corruption_checks import CorruptionChecks
from mtjax.train.observability.expert_load import load_entries
from mtjax.train.observability.goodput import TimeLog
from mtjax.train.observability.metrics import MetricsLog, Rates, plot_losses
from mtjax.train.observability.profiling import Profile, parse_steps
from mtjax.train.observability.progress import ProgressLine
from mtjax.train.observability.start_timer import StartTimer
from mtjax.train.observability.step_clock import StepClock
from mtjax.train.observability.trackers import Tracking, check_tracker
from mtjax.train.options import Options
from mtjax.train.processes.peers import Peers
from mtjax.train.processes.signals import StopRequest
from mtjax.train.setup import (
    BestKept,
    ChooseMesh,
    RunEnvironment,
    check_comparable,
    check_memory,
    find_past,
    nothing_to_do,
    open_best_kept,
    open_checkpoints,
    portable_config,
    prepare,
    prepare_environment,
    print_run_summary,
    restore_or_initialize,
    resume_command,
    with_mesh,
)
from mtjax.train.step import State, TrainStep


@dataclass
class Run:
    """What the sections below share."""

    config: Config
    objective: Objective
    environment: RunEnvironment
    data: RunData
    program: TrainStep
    progress: ProgressLine
    checkpoints: Checkpoints
    saves: Saves
    local: LocalCheckpoints | None
    """The other tier, where there is one."""
    metrics: MetricsLog | None
    """Of the first process only, as the next."""
    time_log: TimeLog | None
    best: BestKept | None
    """Where the objective has a goal."""
    nonfinite_steps: NonfiniteSteps
    corruption_checks: CorruptionChecks
    start: "StartOptions"


Show = Callable[[TrainStep, Console], object]


@dataclass(frozen=True)
class StartOptions:
    """What belongs to this start of the run alone."""

    options: Options
    times: StartTimer
    cache: CompileCache
    show: Show | None = None
    """Called with the program before its first step."""
    evaluations: Evaluations | None = None
    """What is asked of the model on the way."""

    def goal(self, objective: Objective, config: Config) -> Goal | None:
        """By what the best checkpoint is chosen: a measure of the objective, or a result of the evaluations."""
        return objective.goal(config) or (self.evaluations.goal if self.evaluations is not None else None)


def train(
    config: Config,
    name: str,
    options: Options = Options(),  # noqa: B008 - it can't be changed
    *,
    objective: Objective = PRETRAINING,
    times: StartTimer | None = None,
    show: Show | None = None,
    choose_mesh: ChooseMesh | None = None,
    evaluations: Evaluations | None = None,
) -> bool:
    """Trains the model of `config`; returns whether it was trained to the end, and not stopped by a signal.

    Args:
      config: the run.
      name: what the run is called.
      options: of this start.
      objective: what the model learns.
      times: of this start, since it began.
      show: called with the program before its first step.
      choose_mesh: what `--mesh auto` asks.
      evaluations: what `--evaluate` asks of the model.

    Raises:
      UserError: the config, the machine, the data or a checkpoint does not allow it.
    """
    times = times or StartTimer()
    check_tracker(options.track)
    parse_steps(options.profile)
    with times.watch_compiler(), CompileCache(options.compile_cache) as cache:
        times.begin(start_timer.PROCESSES)
        with Peers(config.parallel) as peers:
            this_start = StartOptions(options, times, cache, show, evaluations)
            return train_with(peers, with_mesh(config, choose_mesh), name, this_start, objective)


def train_with(peers: Peers, config: Config, name: str, this_start: StartOptions, objective: Objective) -> bool:
    """`train`, once the processes of the run have found each other."""
    times, allowed = this_start.times, parse_allowed(this_start.options.allow_changed)
    # --- Devices, text, and the model: abstract until there is a checkpoint or a seed
    times.begin(start_timer.DEVICES)
    place = prepare_environment(config, name, peers, objective)
    again = partial(prepare, config, place, objective, allowed, times)
    ready = again(find_past(config.output, place.out))
    config, text, program = ready.config, ready.text, ready.program
    check_memory(program)
    check_comparable(program)
    if (evaluations := this_start.evaluations) is not None:
        evaluations.open(program, text)
    if place.weights is not None:
        place.weights.check(program)
    rates = Rates.of(config, list(place.mesh.devices.flat))
    with contextlib.ExitStack() as stack:
        progress = ProgressLine(config.training.steps, rates, first_process=place.is_first_process)
        print_run_summary(config, place, program, progress)
        if this_start.cache.note:
            progress.say(f"note    {this_start.cache.note}")
        if this_start.show is not None:
            this_start.show(program, progress.console)
        output, folder = config.output, place.folder
        peers.at_end = claim_folder(folder, resume=output.resume, say=progress.say, remote=place.remote)
        checkpoints = open_checkpoints(place, output)
        stack.callback(checkpoints.close)
        if (local := open_local(output, folder)) is not None:
            stack.callback(local.close)

        # --- State: restored, or fresh
        times.begin(start_timer.STATE)
        start = restore_or_initialize(program, checkpoints, place.weights, config, progress, local)
        if start.past != ready.past:  # the newest checkpoint was damaged, or the other tier has a newer one
            ready = again(start.past)
            config, text, program = ready.config, ready.text, ready.program
            progress.steps = config.training.steps
        if ready.is_done:
            progress.say(nothing_to_do(objective, ready, place))
            return True
        ready.go_on(progress.say, checkpoints, local)
        # Not before: a checkpoint that is refused leaves its run as it was.
        logs = open_logs(config, place, text, this_start, start.step, progress.say)
        if logs[0] is not None:
            stack.callback(logs[0].close)

        # --- Steps
        peers.advice = resume_command(objective, place.out)
        saves = Saves(checkpoints, output.max_failed_saves, lambda: peers.advice, progress.say)
        best = open_best_kept(this_start.goal(objective, config), config, place, start.step, stack, progress.say)
        watches = (best, NonfiniteSteps(config.training, program.tensors), CorruptionChecks(program))
        tiers = (checkpoints, saves, local)
        run = Run(config, objective, place, text, program, progress, *tiers, *logs, *watches, this_start)
        stack.enter_context(progress)
        state, stopped = run_steps(run, start)
        times.begin(start_timer.SAVE)  # is waited for here

    conclude(run, state, stopped)
    return not stopped


def conclude(run: Run, state: State, stopped: str | None) -> None:
    """Prints how the run ended: after its last step, or `stopped` by a signal."""
    run.start.times.begin(start_timer.SUMMARY)
    if stopped:
        advice = run.environment.peers.advice
        run.progress.say(f"stopped by {stopped} after step {int(state.step)}; saved. Resume with: {advice}")
    else:
        print_summary(run, state)
    end_time_log(run, state)


def open_logs(
    config: Config,
    place: RunEnvironment,
    text: RunData,
    this_start: StartOptions,
    from_step: int,
    say: Callable[[str], object],
) -> tuple[MetricsLog | None, TimeLog | None]:
    """The metrics and times of a run, beside what it was started with; None in all processes but the first."""
    if not place.is_first_process:
        return None, None
    folder = place.folder
    tracking = Tracking(this_start.options.track, folder, config, say)
    with writing(folder):
        configs.save(portable_config(config), folder / "config.toml")
        text.save(folder)
        metrics = MetricsLog(folder, from_step=from_step, tracker=tracking)
        time_log = TimeLog(folder, from_step, this_start.times)
    if metrics.kept_as:
        say(f"note    the metrics of an earlier start are kept in {metrics.kept_as}")
    return metrics, time_log


def run_steps(run: Run, start: Restored) -> tuple[State, str | None]:
    """Steps until the last one, or until a signal; returns the last state, saved, and the signal's name.

    The host runs ahead of the devices: it waits for them only where something is logged, saved or validated.
    """
    training, output, lessons = run.config.training, run.config.output, run.objective.teacher_targets(run.program)
    state, consumed = start.state, start.consumed_samples
    signal_name = None
    times, timeout = run.start.times, run.config.parallel.step_timeout
    clock = StepClock(start.step, run.environment.folder, timeout, run.environment.peers, run.progress.say, times)
    profile = Profile(parse_steps(run.start.options.profile), run.environment.folder, run.progress.say)
    results = None
    stopped_before = run.best is not None and run.best.best.is_over
    train_batches = open_batches(run.program, run.config, run.data.train, consumed, run.environment.batch_schedule)
    with StopRequest() as stop, train_batches as batches, clock, profile:
        for step in range(start.step + 1, start.step + 1 if stopped_before else training.steps + 1):
            size = run.environment.batch_schedule.batch_size(consumed)
            with times.waiting(results):
                batch = next_batch(run.program, batches, size)
            batch = lessons(batch) if lessons else batch
            check_replicas(run, step, state, batch, clock)
            clock.begin(step)
            state, results = profile.run(step, results, partial(run.program.step, state, batch))
            run.nonfinite_steps.add(step, range(consumed, consumed + size), results)
            consumed += size
            run.progress.advance(step)
            last = step == training.steps
            judged = run.data.held_out is not None and step % output.valid_every == 0
            judged |= run.start.evaluations is not None and step % output.evaluate_every == 0
            if step % output.log_every == 0 or step == start.step + 1 or judged or last:
                entry = step_metrics(step, jax.device_get(results), clock, dense_layers(run.config.model))
                check_steps(run, state)
                entry |= validate_and_evaluate(run, state, step, clock)
                log_entry(run, entry, compiled=step == start.step + 1)
                last = keep_best(run, entry, state, consumed, clock) or last
            elif run.nonfinite_steps.is_full:
                check_steps(run, state)
            signal_name = stop.at(step)
            if last or signal_name or (output.checkpoint_every and step % output.checkpoint_every == 0):
                jax.block_until_ready(results)  # else the save would wait for the steps
                clock.pause(start_timer.SAVE)
                run.corruption_checks.check_state(step, state)
                run.saves.save(state, run.config, consumed, last=last or bool(signal_name))
                if run.time_log is not None:
                    run.time_log.write(step)
                clock.restart(step)
            elif run.local is not None and run.local.is_due(step):
                jax.block_until_ready(results)
                clock.pause(start_timer.SAVE)
                run.local.save(state, run.config, consumed)
                clock.restart(step)
            if signal_name or last:
                break
    return state, signal_name


def check_replicas(run: Run, step: int, state: State, batch: dict[str, jax.Array], clock: StepClock) -> None:
    """Looks for silent corruption before a step, where that is due; it does not count as a step's time."""
    if run.corruption_checks.is_due(step):
        clock.pause(start_timer.REPLICAS)
        run.corruption_checks.check_step(step, state, batch)
        clock.restart(step - 1)


def step_metrics(step: int, results: dict[str, Any], clock: StepClock, dense: Sequence[int]) -> dict[str, Any]:
    """A step's entry in the metrics; layers with the numbers `dense` have no experts."""
    seconds = clock.lap(step)
    scalars = {name: float(value) for name, value in results.items() if name not in ("first_bad", *COUNTS)}
    load = load_entries(results[LOAD], results.get(LOST), dense) if LOAD in results else {}
    entry = {"step": step} | scalars | load
    return entry | {"step_time": seconds, "tokens_per_second": entry["tokens"] / seconds}


def check_steps(run: Run, state: State) -> None:
    """Reports which steps since the last look were skipped, and why.

    Raises:
      UserError: too many in a row.
    """
    for skipped in run.nonfinite_steps.look():
        run.progress.say(f"step {skipped.step} skipped: {skipped}")
    if not run.nonfinite_steps.are_too_many:
        return
    in_a_row, saved = run.nonfinite_steps.in_a_row, run.checkpoints.latest()
    spoilt = run.program.bad_parameter(state.parameters)
    checkpoint = (
        "there is no checkpoint yet"
        if saved is None
        else f"the last good checkpoint is {run.checkpoints.folder / str(saved)}"
    )
    raise UserError(
        f"{len(in_a_row)} steps in a row were skipped, from step {in_a_row[0].step} on: {in_a_row[0]}; "
        + (f"the parameter {spoilt} itself is not finite; " if spoilt else "")
        + f"{checkpoint}: lower --learning-rate, raise --warmup-steps, or look at these samples"
    )


def log_entry(run: Run, entry: dict[str, Any], *, compiled: bool) -> None:
    """Shows an entry and logs it; `compiled` says that its time is mostly the compiler's."""
    if run.metrics is not None and run.time_log is not None:
        run.metrics.write(entry | run.time_log.metrics())
        run.time_log.write(entry["step"])
    run.progress.update(entry, compiled=compiled)


def validate_and_evaluate(run: Run, state: State, step: int, clock: StepClock) -> dict[str, float]:
    """The entries in the metrics of what is due after a step: a validation, evaluations; it is not a step's time."""
    output, evaluations, entries = run.config.output, run.start.evaluations, dict[str, float]()
    last = step == run.config.training.steps
    validate = run.data.held_out is not None and (step % output.valid_every == 0 or last)
    evaluate = evaluations is not None and (step % output.evaluate_every == 0 or last)
    if not (validate or evaluate):
        return entries
    clock.pause(start_timer.VALIDATION)
    if validate and run.data.held_out is not None:
        entries |= run.objective.validate(run.program, state.parameters, run.data.held_out)
    if evaluate and evaluations is not None:
        entries |= evaluations.evaluate(state.parameters)
    clock.restart(step)
    return entries


def keep_best(run: Run, entry: dict[str, Any], state: State, consumed: int, clock: StepClock) -> bool:
    """Saves the state where its validation is the best so far; returns whether there shall be no more steps."""
    if run.best is None:
        return False
    if run.best.best.look(entry):
        clock.pause(start_timer.SAVE)
        run.best.saves.save(state, run.config, consumed, last=True)
        clock.restart(entry["step"])
    return run.best.best.is_over


def print_summary(run: Run, state: State) -> None:
    """Says where the results and the time are, how the model writes, and what to try next."""
    out, best = shown(run.environment.out), ""
    if run.best is not None and run.best.best.step:
        kept = run.best.best
        best = f", best {kept.goal.metric.removeprefix('valid_')} {kept.value:.4f} after step {kept.step}"
    sample = run.objective.sample(run.program, state.parameters, run.data.tokenizer)
    next_commands = f"\n{' ' * 8}".join(run.objective.next_commands(run.config, out))
    time = ""
    if run.metrics is not None and run.time_log is not None:
        with writing(run.environment.folder):
            plot_losses(run.metrics.path, run.environment.folder / "loss.png")
        time = f"time    {run.time_log.in_words()}\n{' ' * 8}{programs_in_words(run.start.cache)}\n"
    run.progress.say(
        f"\ndone    {int(state.step)} steps{best}; metrics, loss.png, goodput.png, TensorBoard events and "
        f"checkpoints are in {out}\n"
        f"{sample}"
        f"{time}"
        f"next    {next_commands}"
    )


def end_time_log(run: Run, state: State) -> None:
    """Notes that this start ended by itself, and draws where the run's time went."""
    if run.time_log is not None:
        run.time_log.write(int(state.step), ended=True)
        with writing(run.environment.folder):
            run.time_log.plot()
