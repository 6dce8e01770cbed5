"""A run that goes on elsewhere: Megatron-LM's checkpoint as a run of mtjax, with the optimizer's state."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.convert.from_megatron.checkpoint import from_arguments
from mtjax.convert.from_megatron.report import config_of, report
from mtjax.convert.from_megatron.translate import translate
from mtjax.convert.megatron import MegatronSource
from mtjax.convert.megatron_optimizer import MOMENTS, WEIGHTS, open_optimizer
from mtjax.convert.megatron_progress import Progress
from mtjax.convert.named import NamedWeights, Shards
from mtjax.convert.parameters import Parameter
from mtjax.convert.rates import check_growth, check_rates
from mtjax.convert.run_folder import Counters, RunSink
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError
from mtjax.models.routers import ROUTER_BIAS
from mtjax.runtime.processes.notes import say_notes

_SCHEDULE = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_decay_style": "lr_decay_style",
    "lr_decay_steps": "lr_decay_samples",
    "lr_warmup_steps": "lr_warmup_samples",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
}
"""What the scheduler's state calls Megatron's arguments; its steps are samples."""


class MegatronRun:
    """A checkpoint of Megatron-LM as a run of mtjax that can be resumed."""

    def __init__(self, source: MegatronSource, target: Path) -> None:
        """Reads the settings of the run.

        Args:
          source: the checkpoint.
          target: the folder of the new run.

        Raises:
          UserError: the checkpoint has no optimizer's state that is read, or the run's settings have no equivalent.
        """
        if source.origin.config.model.layer_pattern:
            raise UserError(
                f"{source.files.folder} is a hybrid model, whose weights alone are converted: remove --with-optimizer"
            )
        self.source = source
        # All checks come before the sink creates a file: a run that can't continue leaves nothing behind.
        self.optimizer = open_optimizer(source.files, source.selection, source.rows, source.origin.config)
        progress, arguments = self.optimizer.progress, dict(source.files.arguments)
        self.config, self.report = _run_config(arguments, progress, source, target)
        self.counters = _counters(progress, self.config, str(source.files.folder))
        check_growth(progress.schedule.get("wd_incr_steps"), self.config, str(source.files.folder))
        check_rates(progress.groups, self.config, self.counters.learning_rate_steps, str(source.files.folder))

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        counters, folder = self.counters, self.source.files.folder
        found = [
            f"optimizer's state: {self.optimizer.layout}, {counters.updates} updates of Adam, "
            f"{counters.consumed_samples} samples consumed at step {counters.step}"
        ]
        size, rows = self.config.model.vocab_size, self.source.rows
        if size is not None and size < rows:
            found.append(
                f"Megatron's loss includes the {rows - size} padding rows of the vocabulary of {folder}; mtjax's does "
                f"not: give --vocab-size {rows} for the same loss"
            )
        return found

    def write(self, sink: RunSink, task: str) -> int:
        """Writes weights and moments; returns the number of weights.

        Raises:
          UserError: the float32 weights are not those of the model.
        """
        parameters = list(self.source.parameters.values())
        # Weights and two moments, all float32.
        total = 3 * sum(parameter.nbytes * (parameter.num_layers or 1) for parameter in parameters)
        done = numbers = 0
        with BytesProgress(task, total) as line:
            for parameter in parameters:
                for layer, array in zip(parameter.layers, self._weights(parameter), strict=True):
                    sink.write(parameter, layer, array)
                    numbers += array.size
                    done += parameter.nbytes
                    line.update(done, done)
            for kind in MOMENTS:
                states = self.optimizer.states(kind)
                # Only weights may be None: a float32 model has no second copy of them.
                assert states is not None
                moments = self._named(states)
                for parameter in parameters:
                    for layer, array in zip(parameter.layers, moments.slices(parameter), strict=True):
                        _check_moment(kind, parameter, array, str(self.source.files.folder))
                        sink.write_moment(kind, parameter, layer, array)
                        done += parameter.nbytes
                        line.update(done, done)
        say_notes(self.source.origin.not_finite.notes)
        sink.close()
        return numbers

    def _named(self, states: Shards) -> NamedWeights:
        files, source = self.source.files, self.source
        return NamedWeights(source.selection, states, source.origin.config, source.rows, str(files.folder))

    def _weights(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the float32 weights of a parameter, which must round to the model's."""
        states = self.optimizer.states(WEIGHTS)
        # A router's bias is a buffer, updated by counts of tokens, and not in Adam's state.
        if states is None or parameter.name.endswith(ROUTER_BIAS):
            yield from self.source.slices(parameter)
            return
        # The layout of buffers is not saved but rebuilt. Weights that do not round to the model's show that it was
        # rebuilt wrongly, and the moments would be those of other tensors.
        for full, rounded in zip(self._named(states).slices(parameter), self.source.slices(parameter), strict=True):
            if not np.array_equal(full.astype(rounded.dtype), rounded):
                raise UserError(
                    f"{self.source.files.folder}: {parameter.name} of the optimizer's float32 weights is not that of "
                    f"the model: {self.optimizer.advice}"
                )
            yield full


def _check_moment(kind: str, parameter: Parameter, array: np.ndarray, source: str) -> None:
    if not np.isfinite(array).all() or (kind == MOMENTS[1] and (array < 0).any()):
        raise UserError(f"{source}: {kind} of {parameter.name} has numbers that are not finite or are negative")


def _run_config(
    arguments: dict[str, Any], progress: Progress, source: MegatronSource, target: Path
) -> tuple[Config, str]:
    """Returns the run's config, and a report of what has no equivalent."""
    folder, model = str(source.files.folder), source.origin.config.model
    if model.family == "bert":
        raise UserError(f"{folder} is a BERT: --with-optimizer converts GPT and Llama")
    given = from_arguments(arguments, folder)
    # Scales of earlier steps are in Transformer Engine's own state, which is not read.
    given.values |= {"fp8_recipe": "tensorwise"} if given.values.get("fp8_recipe", "delayed") == "delayed" else {}
    # The scheduler's state has the numbers that were in effect, which with --use-checkpoint-opt_param-scheduler are not
    # those of the arguments.
    for name in ("lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "end_weight_decay"):
        given.values.pop(name, None)
    for theirs, dest in _SCHEDULE.items():
        value = progress.schedule.get(theirs)
        if value is not None:
            # Megatron's numbers of steps are floats where they follow from a fraction.
            given.values[dest] = round(value) if theirs.endswith("_steps") else value
            given.typed.setdefault(dest, f"{theirs} {value} of opt_param_scheduler")
    if given.values.get("weight_decay_incr_style", "constant") == "constant":
        given.values.pop("start_weight_decay", None)
    # Where the run was saved and loaded is not where it goes on.
    for name in ("save", "load", "pretrained_checkpoint"):
        given.values.pop(name, None)
    to, _ = translate(given)
    translated = config_of(to)
    # `described` takes max_position_embeddings for the length; with RoPE the samples of the run may be shorter.
    length = arguments.get("seq_length") or model.sequence_length
    if model.position == "learned" and length != model.sequence_length:
        raise UserError(
            f"{folder} has {model.sequence_length} learned positions and samples of {length} tokens: mtjax has as many "
            "positions as a sample has tokens"
        )
    run = dataclasses.replace(translated, model=dataclasses.replace(model, sequence_length=length))
    run = configs.replace(run, out=target.resolve(), resume=False)
    configs.validate(run)
    if len(groups := {tuple(group["betas"]) for group in progress.groups if "betas" in group}) > 1:
        raise UserError(f"{folder} has several betas of Adam, {groups}: mtjax has one pair")
    for group in progress.groups:
        _check_group(group, run, folder)
    return run, report(to, None)


def _check_group(group: Mapping[str, Any], run: Config, folder: str) -> None:
    """Checks that Adam's settings in the optimizer's state are those of the arguments.

    Raises:
      UserError: they differ.
    """
    options = run.optimizer
    saved = {"betas": tuple(group.get("betas") or ()), "eps": group.get("eps")}
    wanted = {"betas": (options.beta1, options.beta2), "eps": options.epsilon}
    for name, value in saved.items():
        if value not in (None, ()) and value != wanted[name]:
            raise UserError(f"{folder}: {name} of Adam is {value} in the optimizer's state, and {wanted[name]} in args")
    if group.get("decoupled_weight_decay", group.get("adam_w_mode")) in (False, 0):
        raise UserError(f"{folder} has weight decay in Adam's gradients (L2), and mtjax's is decoupled (AdamW)")
    if group.get("lr_mult", 1.0) != 1.0 or group.get("is_decoupled_lr"):
        raise UserError(f"{folder} has parameters with a learning rate of their own, which mtjax has not")


def _counters(progress: Progress, run: Config, folder: str) -> Counters:
    # Not consumed_train_samples: after a start with --no-load-optim the schedule begins again, and the data do not.
    samples, batch = progress.schedule.get("num_steps"), run.training.global_batch_size
    if not isinstance(samples, int) or samples % batch:
        raise UserError(
            f"{folder}: the learning rate schedule has done {samples} samples, not a multiple of the batch of {batch}"
        )
    scale = None
    if run.training.compute_dtype == "float16":
        saved = progress.scaler or {}
        if "scale" not in saved:
            raise UserError(f"{folder} has no loss scale of float16")
        scale = {
            "scale": saved["scale"],
            "growth": saved.get("growth_tracker", 0),
            "hysteresis": saved.get("hysteresis_tracker", run.training.hysteresis),
        }
    return Counters(progress.iteration, progress.consumed_samples, progress.updates, samples // batch, scale)
