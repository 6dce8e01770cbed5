"""Prepares a run before its first step: devices, folder, data, and initial state."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from mtjax import config as configs
from mtjax import data
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Config, Output
from mtjax.config.horizon import Horizon
from mtjax.data import BatchSchedule
from mtjax.data.cache import Cache
from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config, check_ramp
from mtjax.layout.float8 import float8_note
from mtjax.layout.mesh import AUTO, MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.models.named_parameters import replicated_names
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, Restored
from mtjax.runtime.checkpoints.local import LocalCheckpoints
from mtjax.runtime.checkpoints.past import Past, RunRecord, newest_past
from mtjax.runtime.checkpoints.remote import RemoteCheckpoints
from mtjax.runtime.checkpoints.weights import CHECKPOINTS
from mtjax.runtime.devices import attach_devices, use_cpu_devices
from mtjax.runtime.processes.peers import Peers
from mtjax.storage import shown, url_of
from mtjax.train.changes import check_states, find_changes, rate_of, table, with_horizon
from mtjax.train.float8_resume import check_float8_layers
from mtjax.train.folder.remote import RemoteFolder
from mtjax.train.folder.run_folder import choose_folder
from mtjax.train.objective import InitialWeights, Objective, RunData, position_in
from mtjax.train.observability.metrics import CONVENTION
from mtjax.train.observability.progress import ProgressLine
from mtjax.train.observability.start_timer import MODEL, TEXT, StartTimer
from mtjax.train.same_run import check_same_settings, check_same_text
from mtjax.train.step import TrainStep, make_train_step

ChooseMesh = Callable[[Config, int, str], MeshShape]
"""Maps a config, the number of devices and their kind to a mesh shape."""


@dataclass(frozen=True)
class RunEnvironment:
    """Devices, folder and processes of a run."""

    mesh_shape: MeshShape
    mesh: Mesh
    batch_schedule: BatchSchedule
    folder: Path
    """Where the run writes its files: `out`, or the local copy of a folder in an object store."""
    out: Path
    """The value of --out, or the folder chosen when it is not given."""
    remote: RemoteFolder | None
    """Set if `out` is in an object store."""
    weights: InitialWeights | None
    """Initial weights (`init_from`); None for random weights."""
    is_first_process: bool
    peers: Peers
    """The other processes of the run."""


@dataclass(frozen=True)
class Prepared:
    """A run before its state is created or restored."""

    config: Config
    """Resolved: defaults that depend on the data, the machine and the steps done are filled in."""
    data: RunData
    program: TrainStep
    horizon: Horizon
    past: Past | None
    """The run that is resumed; None for a new run."""

    @property
    def is_done(self) -> bool:
        """Whether a resumed run has done all of its steps."""
        return self.past is not None and self.past.step >= self.config.training.steps

    def record_and_report(self, say: Callable[[str], object], *tiers: Checkpoints | LocalCheckpoints | None) -> None:
        """Sets the run's record in the checkpoints of all tiers, and prints a table of the changes since a resumed
        run's checkpoint, if there are any."""
        position = self.data.position
        # The folder to which relative paths of the config refer.
        record = RunRecord(position, self.horizon, str(Path.cwd()))
        for tier in tiers:
            if tier is not None:
                tier.record = record
        rows = find_changes(self.past, self.config, self.program.config, position) if self.past else []
        if self.past is not None and rows:
            say(table(self.past, rows))


def with_mesh(config: Config, choose: ChooseMesh | None) -> Config:
    """Returns the config with `mesh = auto` replaced by a mesh of all devices. On CPUs, each process then has one
    device.

    Raises:
      UserError: no mesh fits the devices.
    """
    if config.parallel.mesh != AUTO or choose is None:
        return config
    # Set before `jax.devices()`, after which the number of devices is fixed.
    use_cpu_devices(1)
    devices = jax.devices()
    return configs.replace(config, mesh=str(choose(config, len(devices), devices[0].device_kind)))


def find_devices(config: Config, peers: Peers) -> tuple[MeshShape, Mesh, BatchSchedule]:
    """Returns the shape of the mesh, the mesh and the batch sizes of a run.

    Raises:
      UserError: batch and mesh don't fit, or devices are missing.
    """
    mesh_shape = parse_mesh(config.parallel.mesh)
    check_config(config, mesh_shape)
    batch_schedule = data.batch_schedule(config.training)
    check_ramp(config, batch_schedule.batch_sizes(), mesh_shape)
    return mesh_shape, attach_devices(mesh_shape, peers.count), batch_schedule


def prepare_environment(config: Config, name: str, peers: Peers, objective: Objective) -> RunEnvironment:
    """Attaches the devices and chooses the folder of a run called `name`.

    Raises:
      UserError: batch and mesh don't fit, devices or weights are missing, or the folder can't be used.
    """
    mesh_shape, mesh, batch_schedule = find_devices(config, peers)
    out = choose_folder(config.output, name)
    url = url_of(out)
    remote = RemoteFolder(url, Cache.of(config.data).root) if url else None
    folder = remote.work if remote else out
    # Before anything is written: weights that do not exist are an error without a folder.
    weights = objective.initial_weights(config)
    return RunEnvironment(
        mesh_shape, mesh, batch_schedule, folder, out, remote, weights, jax.process_index() == 0, peers
    )


def find_past(output: Output, out: Path) -> Past | None:
    """Returns the run in `out` that `--resume` will most likely continue: its newest checkpoint with valid metadata.

    Raises:
      UserError: metadata can't be read, or have an unknown format version.
    """
    return newest_past(out / CHECKPOINTS) if output.resume else None


def prepare(
    config: Config,
    environment: RunEnvironment,
    objective: Objective,
    allowed: Collection[str],
    times: StartTimer,
    past: Past | None,
) -> Prepared:
    """Opens the data of a run and builds its train step, as required to continue `past`.

    Raises:
      UserError: the data can't be used or continued, or model and mesh don't fit.
    """
    times.begin(TEXT)
    try:
        resolved, run_data = objective.load_data(config, environment.out, past, allowed)
    except UserError as e:
        # Relative paths of the data refer to the folder in which the run was started.
        if past is None or past.record is None or past.record.started_in == str(Path.cwd()):
            raise
        raise UserError(
            f"{e} (the run was started in {past.record.started_in}, and this is {Path.cwd()}: relative paths in its "
            "config.toml refer to that folder)"
        ) from e
    check_same_text(run_data.position, run_data.read)
    # Settings that each process has resolved by itself: the mesh of its devices, the steps and lengths of its data.
    check_same_settings(resolved, what="the resolved settings")
    times.begin(MODEL)
    if past is not None:
        check_states(past, resolved)
        check_float8_layers(past, resolved)
    horizon = objective.horizon(resolved, past)
    return Prepared(
        resolved, run_data, make_train_step(with_horizon(resolved, horizon), environment.mesh), horizon, past
    )


def portable_config(config: Config) -> Config:
    """Returns the config without the settings of this process and this start of the run."""
    return configs.replace(config, resume=False, coordinator=None, num_processes=None, process_id=None)


def print_run_summary(config: Config, environment: RunEnvironment, program: TrainStep, progress: ProgressLine) -> None:
    """Prints a summary of the resolved config, and notes where the program deviates from it."""
    model, training, mesh_shape = config.model, config.training, environment.mesh_shape
    device = jax.devices()[0]
    kind = (
        f"{mesh_shape.size} virtual CPU devices"
        if device.platform == "cpu"
        else f"{mesh_shape.size} x {device.device_kind}"
    )
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    count = parameters(anatomy_of(model))
    progress.say(
        f"model   {model.family}, {count / 1e6:,.1f}M parameters: {model.num_layers} layers, "
        f"hidden {model.hidden_size}, {model.num_heads} heads, sequence {model.sequence_length}, "
        f"vocabulary {model.vocab_size}\n"
        f"mesh    {mesh_shape.description}: {kind}{processes}\n"
        f"batch   {training.global_batch_size} x {model.sequence_length} tokens, "
        f"{training.compute_dtype}, recompute {training.recompute}\n"
        f"data    {config.data.data or config.data.train_data or 'documentation that comes with Python'}\n"
        f"out     {shown(environment.out)}"
        + (f"\nspeed   TFLOP/s and MFU count {CONVENTION}" if progress.rates.are_shown else "")
    )
    all_specs, trainable = (jax.tree.leaves(tree) for tree in (program.records, program.trainable_records))
    if model.lora_rank:
        total, trained = (sum(math.prod(spec.shape) for spec in specs) for specs in (all_specs, trainable))
        progress.say(f"trained {trained:,} of {total:,} parameters ({trained / total:.2%}); the others are frozen")
    if program.attention_fallback:
        used = program.config.model.attention
        progress.say(f"note    attention is {used}, not {config.model.attention}: {program.attention_fallback}")
    if note := float8_note(program.config.model, Plan.of(program.config, program.mesh_shape)):
        progress.say(f"note    {note}")
    if program.xla.refused:
        names = ", ".join(program.xla.refused)
        progress.say(f"note    steps may be slower: this XLA does not support {names}")
    if training.steps <= config.optimizer.warmup_steps:
        last = rate_of(program.config, training.steps - 1)
        progress.say(
            f"note    warmup_steps {config.optimizer.warmup_steps} is not below the run's {training.steps} steps: the "
            f"learning rate reaches {last} in the last step, and the peak is {config.optimizer.learning_rate:.2e}"
        )
    if replicated := replicated_names(program):
        names, axes = ", ".join(replicated), program.layout.zero_axes
        degree = mesh_shape.degree(axes)
        progress.say(f"note    replicated over {axes[0]} (no dimension is divisible by {degree}): {names}")


def nothing_to_do(objective: Objective, prepared: Prepared, environment: RunEnvironment) -> str:
    """Returns the message for a resumed run that has done all of its steps."""
    assert prepared.past is not None  # only a resumed run can be done
    training, out, (step, consumed) = prepared.config.training, shown(environment.out), position_in(prepared.past)
    requested = f"--steps is {training.steps:,}"
    if training.train_samples is not None:
        left = max(0, training.train_samples - consumed)
        requested = f"--train-samples is {training.train_samples:,}"
        requested += f", of which {left:,} are left, less than one batch" if left else ""
    longer = configs.replace(prepared.config, steps=step)
    next_commands = f"\n{' ' * 8}".join(objective.next_commands(longer, out))
    return (
        f"nothing to do: the run in {out} has done {step:,} steps with {consumed:,} samples, and {requested}; nothing "
        f"was changed\nnext    {next_commands}"
    )


def resume_command(objective: Objective, folder: Path) -> str:
    """Returns the command that resumes the run in a folder."""
    return f"{objective.command} --config {shown(folder)}/config.toml --resume"


def open_checkpoints(environment: RunEnvironment, output: Output) -> Checkpoints:
    """Opens the checkpoints of a run, in its folder or in an object store."""
    return checkpoints_in(environment, CHECKPOINTS, output.keep_last, output.keep_every)


def checkpoints_in(
    environment: RunEnvironment, name: str, keep_last: int, keep_every: int | None = None
) -> Checkpoints:
    """Opens the checkpoints in a subfolder of a run's folder, or of its place in an object store."""
    retention = {"keep_last": keep_last, "keep_every": keep_every}
    if environment.remote is None:
        return Checkpoints(environment.folder / name, **retention)
    return RemoteCheckpoints(environment.out / name, **retention, before_metadata=environment.remote.upload)


def restore_or_initialize(
    program: TrainStep,
    checkpoints: Checkpoints,
    weights: InitialWeights | None,
    config: Config,
    progress: ProgressLine,
    local: LocalCheckpoints | None = None,
) -> Restored:
    """Returns the state with which the run starts: the last good checkpoint with --resume, otherwise step 0 with
    initial or random weights."""

    def from_local_tier(at_least: int) -> Restored | None:
        return local.newest(at_least, program.abstract_state, config, progress.say) if local else None

    if config.output.resume:
        # The local tier is asked before each step is read here: the newest state of both wins.
        restored = checkpoints.restore(program.abstract_state, config, from_local_tier)
        if restored is not None:
            if local is not None:
                local.quarantine()
            progress.say(f"resumed from step {restored.step} in {shown(restored.folder)}")
            return restored
        progress.say(f"no checkpoint in {shown(checkpoints.folder)}: starting from step 0")
    parameters = None
    if weights is not None:
        parameters = weights.read(program)
        progress.say(f"weights from {weights.folder}")
    return Restored(0, program.initialize(config.training.seed, parameters), 0)
