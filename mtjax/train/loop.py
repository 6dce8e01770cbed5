"""A training run from its config to its summary; read it from top to bottom."""

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
from mtjax.models.routers import COUNTS, LOAD, LOST
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, Restored
from mtjax.runtime.checkpoints.local import LocalCheckpoints, open_local
from mtjax.runtime.checkpoints.saves import Saves
from mtjax.runtime.compile_cache import CompileCache, describe_programs
from mtjax.runtime.processes.peers import Peers
from mtjax.runtime.processes.signals import StopRequest
from mtjax.runtime.train_state import State
from mtjax.storage import shown
from mtjax.train.best_checkpoint import BestCheckpoint, open_best_checkpoint
from mtjax.train.changes import parse_allowed
from mtjax.train.device_checks import check_devices
from mtjax.train.feed import next_batch, open_batches
from mtjax.train.first_scales import FirstScales
from mtjax.train.folder.run_folder import RUNS, claim_folder, writing
from mtjax.train.objective import PRETRAINING, Evaluations, Objective, RunData
from mtjax.train.observability import start_timer
from mtjax.train.observability.best import Goal
from mtjax.train.observability.corruption_checks import CorruptionChecks
from mtjax.train.observability.expert_load import load_entries
from mtjax.train.observability.goodput import TimeLog
from mtjax.train.observability.metrics import MetricsLog, Rates, plot_losses
from mtjax.train.observability.profiling import Profile, named_steps, parse_steps
from mtjax.train.observability.progress import ProgressLine
from mtjax.train.observability.start_timer import StartTimer
from mtjax.train.observability.step_clock import StepClock
from mtjax.train.observability.trackers import Tracking, check_tracker
from mtjax.train.options import Options
from mtjax.train.same_run import check_same_settings
from mtjax.train.setup import (
    ChooseMesh,
    RunEnvironment,
    find_past,
    nothing_to_do,
    open_checkpoints,
    portable_config,
    prepare,
    prepare_environment,
    print_run_summary,
    restore_or_initialize,
    resume_command,
    with_mesh,
)
from mtjax.train.skipped_steps import NonfiniteSteps, bad_parameter, tensors_of
from mtjax.train.step import TrainStep


@dataclass
class Run:
    """State that the functions below share."""

    config: Config
    objective: Objective
    environment: RunEnvironment
    data: RunData
    program: TrainStep
    progress: ProgressLine
    checkpoints: Checkpoints
    saves: Saves
    local: LocalCheckpoints | None
    """The local checkpoint tier, if there is one."""
    metrics: MetricsLog | None
    """Only in the first process, as is `time_log`."""
    time_log: TimeLog | None
    best: BestCheckpoint | None
    """Only if the objective or the evaluations define a goal."""
    nonfinite_steps: NonfiniteSteps
    corruption_checks: CorruptionChecks
    this_start: "StartOptions"


Show = Callable[[TrainStep, Console], object]


@dataclass(frozen=True)
class StartOptions:
    """Options and services of this start of the run only."""

    options: Options
    times: StartTimer
    cache: CompileCache
    show: Show | None = None
    """Called with the train step before its first step."""
    evaluations: Evaluations | None = None
    """Evaluation tasks that run during training."""

    def goal(self, objective: Objective, config: Config) -> Goal | None:
        """Returns the metric that selects the best checkpoint, from the objective or the evaluations."""
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
      name: name of the run.
      options: of this start.
      objective: what the model is trained for.
      times: timer of this start.
      show: called with the train step before its first step.
      choose_mesh: chooses the mesh of `--mesh auto`.
      evaluations: the tasks of `--evaluate`.

    Raises:
      UserError: the config, the machine, the data or a checkpoint does not permit the run.
    """
    times = times or StartTimer()
    check_tracker(options.track)
    parse_steps(options.profile)
    with times.watch_compiler(), CompileCache(options.compile_cache) as cache:
        times.begin(start_timer.PROCESSES)
        with Peers(config.parallel) as peers:
            check_same_settings(config, RUNS / f"{name}-N")  # first: what follows waits for other processes
            this_start = StartOptions(options, times, cache, show, evaluations)
            return train_with(peers, with_mesh(config, choose_mesh), name, this_start, objective)


def train_with(peers: Peers, config: Config, name: str, this_start: StartOptions, objective: Objective) -> bool:
    """Runs `train` after the processes of the run have connected."""
    times, allowed = this_start.times, parse_allowed(this_start.options.allow_changed)
    # --- Devices, data, and the model, which is abstract until the state is restored or initialized
    times.begin(start_timer.DEVICES)
    environment = prepare_environment(config, name, peers, objective)
    prepare_after = partial(prepare, config, environment, objective, allowed, times)
    prepared = prepare_after(find_past(config.output, environment.out))
    config, data, program = prepared.config, prepared.data, prepared.program
    check_devices(program)
    if (evaluations := this_start.evaluations) is not None:
        evaluations.open(program, data)
    if environment.weights is not None:
        environment.weights.check(program)
    rates = Rates.of(config, list(environment.mesh.devices.flat))
    with contextlib.ExitStack() as stack:
        progress = ProgressLine(config.training.steps, rates, first_process=environment.is_first_process)
        print_run_summary(config, environment, program, progress)
        if this_start.cache.note:
            progress.say(f"note    {this_start.cache.note}")
        if this_start.show is not None:
            this_start.show(program, progress.console)
        output, folder = config.output, environment.folder
        peers.at_end = claim_folder(folder, resume=output.resume, say=progress.say, remote=environment.remote)
        checkpoints = open_checkpoints(environment, output)
        stack.callback(checkpoints.close)
        if (local := open_local(output, folder)) is not None:
            stack.callback(local.close)

        # --- State: restored, or fresh
        times.begin(start_timer.STATE)
        start = restore_or_initialize(program, checkpoints, environment.weights, config, progress, local)
        if start.past != prepared.past:  # the newest checkpoint was corrupted, or the local tier has a newer one
            prepared = prepare_after(start.past)
            config, data, program = prepared.config, prepared.data, prepared.program
            progress.steps = config.training.steps
        if prepared.is_done:
            progress.say(nothing_to_do(objective, prepared, environment))
            return True
        prepared.record_and_report(progress.say, checkpoints, local)
        # Opened after the checkpoint is accepted: if it is refused, the run's folder must stay as it was.
        logs = open_logs(config, environment, data, this_start, start.step, progress.say)
        if logs[0] is not None:
            stack.callback(logs[0].close)

        # --- Steps
        peers.advice = resume_command(objective, environment.out)
        saves = Saves(checkpoints, output.max_failed_saves, lambda: peers.advice, progress.say)
        goal = this_start.goal(objective, config)
        best = open_best_checkpoint(goal, config, environment, start.step, stack, progress.say)
        monitors = (best, NonfiniteSteps(config.training, tensors_of(program)), CorruptionChecks(program))
        tiers = (checkpoints, saves, local)
        run = Run(config, objective, environment, data, program, progress, *tiers, *logs, *monitors, this_start)
        stack.enter_context(progress)
        state, stopped = run_steps(run, start)
        times.begin(start_timer.SAVE)  # leaving the context waits for the last save

    conclude(run, state, stopped)
    return not stopped


def conclude(run: Run, state: State, stopped: str | None) -> None:
    """Prints how the run ended: after its last step, or `stopped` by a signal."""
    run.this_start.times.begin(start_timer.SUMMARY)
    if stopped:
        advice = run.environment.peers.advice
        run.progress.say(f"stopped by {stopped} after step {int(state.step)}; saved. Resume with: {advice}")
    else:
        print_summary(run, state)
    end_time_log(run, state)


def open_logs(
    config: Config,
    environment: RunEnvironment,
    data: RunData,
    this_start: StartOptions,
    from_step: int,
    say: Callable[[str], object],
) -> tuple[MetricsLog | None, TimeLog | None]:
    """Opens metrics and time logs, and saves config and data files; returns None except in the first process."""
    if not environment.is_first_process:
        return None, None
    folder = environment.folder
    tracking = Tracking(this_start.options.track, folder, config, say)
    with writing(folder):
        configs.save(portable_config(config), folder / "config.toml")
        data.save(folder)
        metrics = MetricsLog(folder, from_step=from_step, tracker=tracking)
        time_log = TimeLog(folder, from_step, this_start.times)
    if metrics.renamed_to:
        say(f"note    the metrics of an earlier start were renamed to {metrics.renamed_to}")
    return metrics, time_log


def run_steps(run: Run, restored: Restored) -> tuple[State, str | None]:
    """Trains until the last step or a signal; returns the last state, which has been saved, and the signal's name.

    The host runs ahead of the devices: it waits for them only to log, save or validate.
    """
    training, output = run.config.training, run.config.output
    add_teacher_targets = run.objective.teacher_targets(run.program)
    state, consumed, signal_name = restored.state, restored.consumed_samples, None
    times, folder, say = run.this_start.times, run.environment.folder, run.progress.say
    clock = StepClock(restored.step, folder, run.config.parallel.step_timeout, run.environment.peers, say, times)
    profile = Profile(named_steps(run.this_start.options.profile, run.program), folder, say)
    results, with_first_scales = None, FirstScales(run.program, say, clock)
    stopped_before = run.best is not None and run.best.validation.is_over
    train_batches = open_batches(run.program, run.config, run.data.train, consumed, run.environment.batch_schedule)
    with StopRequest() as stop, train_batches as batches, clock, profile:
        for step in range(restored.step + 1, restored.step + 1 if stopped_before else training.steps + 1):
            size = run.environment.batch_schedule.batch_size(consumed)
            with times.waiting(results):
                batch = next_batch(run.program, batches, size)
            batch = add_teacher_targets(batch) if add_teacher_targets else batch
            # Before the step, which donates the state.
            check_replicas(run, step, state, batch, clock)
            state = with_first_scales(state, batch, step)
            clock.begin(step)
            # Dispatches the step; `state` is donated, and `results` are futures until something fetches them.
            state, results = profile.run(step, results, partial(run.program.step, state, batch))
            run.nonfinite_steps.add(step, range(consumed, consumed + size), results)
            consumed += size
            run.progress.advance(step)
            last = step == training.steps
            is_evaluated = run.data.held_out is not None and step % output.valid_every == 0
            is_evaluated |= run.this_start.evaluations is not None and step % output.evaluate_every == 0
            if step % output.log_every == 0 or step == restored.step + 1 or is_evaluated or last:
                entry = step_metrics(step, jax.device_get(results), clock, dense_layers(run.config.model))
                check_steps(run, state)
                entry |= validate_and_evaluate(run, state, step, clock)
                log_entry(run, entry, compiled=step == restored.step + 1)
                last = keep_best(run, entry, state, consumed, clock) or last
            # The queue of steps to check keeps results on the devices, so its length is limited.
            elif run.nonfinite_steps.is_full:
                check_steps(run, state)
            # All processes stop after the same step, whichever of them received the signal.
            signal_name = stop.at(step)
            last = last or bool(signal_name)
            if last or (output.checkpoint_every and step % output.checkpoint_every == 0):
                jax.block_until_ready(results)  # so that the time of the save does not include the steps in flight
                clock.pause(start_timer.SAVE)
                run.corruption_checks.check_state(step, state)
                run.saves.save(state, run.config, consumed, must_succeed=last)
                if run.time_log is not None:
                    run.time_log.write(step)
                clock.restart(step)
            elif run.local is not None and run.local.is_due(step):
                jax.block_until_ready(results)
                clock.pause(start_timer.SAVE)
                run.local.save(state, run.config, consumed)
                clock.restart(step)
            if last:
                break
    return state, signal_name


def check_replicas(run: Run, step: int, state: State, batch: dict[str, jax.Array], clock: StepClock) -> None:
    """Checks for silent data corruption before a step, if a check is due; its time is not counted as the step's."""
    if run.corruption_checks.is_due(step):
        clock.pause(start_timer.REPLICAS)
        run.corruption_checks.check_step(step, state, batch)
        clock.restart(step - 1)


def step_metrics(step: int, results: dict[str, Any], clock: StepClock, dense: Sequence[int]) -> dict[str, Any]:
    """Returns the metrics of a step; layers with indices `dense` have no experts."""
    # After `device_get` of the results: the steps since the last lap are done.
    seconds = clock.lap(step)
    scalars = {name: float(value) for name, value in results.items() if name not in ("first_bad", *COUNTS)}
    load = load_entries(results[LOAD], results.get(LOST), dense) if LOAD in results else {}
    return {"step": step} | scalars | load | {"step_time": seconds, "tokens_per_second": scalars["tokens"] / seconds}


def check_steps(run: Run, state: State) -> None:
    """Reports which steps since the last check were skipped, and why.

    Raises:
      UserError: too many steps in a row were skipped.
    """
    for skipped in run.nonfinite_steps.check():
        run.progress.say(f"step {skipped.step} skipped: {skipped}")
    if not run.nonfinite_steps.are_too_many:
        return
    in_a_row, saved = run.nonfinite_steps.in_a_row, run.checkpoints.latest()
    nonfinite_parameter = bad_parameter(run.program, state.weights)
    last_good = f"the last good checkpoint is {run.checkpoints.folder / str(saved)}"
    checkpoint = "there is no checkpoint yet" if saved is None else last_good
    raise UserError(
        f"{len(in_a_row)} steps in a row were skipped, from step {in_a_row[0].step} on: {in_a_row[0]}; "
        + (f"the parameter {nonfinite_parameter} itself is not finite; " if nonfinite_parameter else "")
        + f"{checkpoint}: lower --learning-rate, raise --warmup-steps, or look at these samples"
    )


def log_entry(run: Run, entry: dict[str, Any], *, compiled: bool) -> None:
    """Shows and logs the metrics of a step; `compiled` marks a time that is mostly compilation."""
    if run.metrics is not None and run.time_log is not None:
        run.metrics.write(entry | run.time_log.metrics())
        run.time_log.write(entry["step"])
    run.progress.update(entry, compiled=compiled)


def validate_and_evaluate(run: Run, state: State, step: int, clock: StepClock) -> dict[str, float]:
    """Runs the validation and evaluations due after a step, outside of its time; returns their metrics."""
    output, evaluations, entries = run.config.output, run.this_start.evaluations, dict[str, float]()
    last = step == run.config.training.steps
    validate = run.data.held_out is not None and (step % output.valid_every == 0 or last)
    evaluate = evaluations is not None and (step % output.evaluate_every == 0 or last)
    if not (validate or evaluate):
        return entries
    clock.pause(start_timer.VALIDATION)
    weights = state.weights  # copied to the device where they are in the host's memory
    if validate and run.data.held_out is not None:
        entries |= run.objective.validate(run.program, weights, run.data.held_out)
    if evaluate and evaluations is not None:
        entries |= evaluations.evaluate(weights)
    clock.restart(step)
    return entries


def keep_best(run: Run, entry: dict[str, Any], state: State, consumed: int, clock: StepClock) -> bool:
    """Saves the state if its validation is the best of those saved; returns whether the run ends early."""
    if run.best is None:
        return False
    run.best.validation.update(entry)
    # Better than the checkpoint in best/, which is not that of the best validation if its save failed.
    if run.best.held.is_better(entry):
        clock.pause(start_timer.SAVE)
        if run.best.saves.save(state, run.config, consumed, wait=True):
            run.best.held.update(entry)
        clock.restart(entry["step"])
    return run.best.validation.is_over


def print_summary(run: Run, state: State) -> None:
    """Prints where the results are, a sample of the model, where the time went, and the next commands."""
    out, best = shown(run.environment.out), "" if run.best is None else run.best.describe()
    sample = run.objective.sample(run.program, state, run.data.tokenizer)
    next_commands = f"\n{' ' * 8}".join(run.objective.next_commands(run.config, out))
    time = ""
    if run.metrics is not None and run.time_log is not None:
        with writing(run.environment.folder):
            plot_losses(run.metrics.path, run.environment.folder / "loss.png", run.config)
        time = f"time    {run.time_log.describe()}\n{' ' * 8}{describe_programs(run.this_start.cache)}\n"
    run.progress.say(
        f"\ndone    {int(state.step)} steps{best}; metrics, loss.png, goodput.png, TensorBoard events and "
        f"checkpoints are in {out}\n{sample}{time}next    {next_commands}"
    )


def end_time_log(run: Run, state: State) -> None:
    """Records that this start ended normally, and plots where the run's time went."""
    if run.time_log is not None:
        run.time_log.write(int(state.step), ended=True)
        with writing(run.environment.folder):
            run.time_log.plot()
