"""A run of mtjax as a checkpoint that Megatron-LM goes on with: weights, Adam's state, schedules and arguments."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.convert.megatron import check_experts
from mtjax.convert.megatron_optimizer import MOMENTS, WEIGHTS
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.convert.rates import rates_at
from mtjax.convert.run_folder import OURS
from mtjax.convert.torch_dist_sink import TorchDistSink
from mtjax.data import train_steps
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.arrays import open_array
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.checkpoints.weights import CHECKPOINTS
from mtjax.runtime.processes.notes import say_notes

LAYOUT = "fully_reshardable"
_COUNT = re.compile(r"optimizer\..*\bcount")


def newest_checkpoint(folder: Path) -> Path:
    """Returns the newest checkpoint of a run, whichever is its best; the folder itself if it is not a run's."""
    steps = [path for path in (folder / CHECKPOINTS).glob("*") if path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name), default=folder)


class MtjaxRun:
    """A checkpoint of a run, with its optimizer's state."""

    def __init__(self, source: MtjaxSource, expert: int) -> None:
        """Reads counters and settings.

        Args:
          source: the checkpoint.
          expert: expert parallel degree of the run that goes on; above 1, Megatron-LM has an optimizer for the experts.

        Raises:
          UserError: there is no optimizer's state, or Megatron-LM can't continue the run.
        """
        self.source, weights = source, source.weights
        self._names = list(weights.metadata["fingerprints"])
        if not any(name.startswith("optimizer.") for name in self._names):
            raise UserError(f"{weights.folder} holds weights without an optimizer's state: remove --with-optimizer")
        if source.adapters:
            raise UserError(f"{weights.folder} trains adapters, which Megatron-LM does not: remove --with-optimizer")
        self.config: Config = weights.config
        if (optimizer := self.config.optimizer.optimizer) != "adamw":
            raise UserError(
                f"{weights.folder} has the states of optimizer {optimizer}, and Megatron-LM's Adam is written from "
                "adamw alone: remove --with-optimizer"
            )
        if self.config.model.layer_pattern:
            raise UserError(
                f"{weights.folder} is a hybrid model, whose weights alone are converted: remove --with-optimizer"
            )
        check_experts(self.config.model, expert)
        self.expert = expert
        self.step = int(weights.metadata["step"])
        self.past = Past.from_metadata(self.step, weights.metadata)
        # Adam's own count comes first in optax's chain, that of the learning rate schedule last.
        counts = [self._scalar(name) for name in self._names if _COUNT.fullmatch(name)]
        self.updates, self.scheduled = int(counts[0]), int(counts[-1])

    @property
    def dtype(self) -> str:
        """The type in which Megatron-LM has the model's weights."""
        return self.config.training.compute_dtype

    def write(self, sink: TorchDistSink, task: str) -> int:
        """Writes everything; returns the number of weights."""
        parameters = list(self.source.parameters.values())
        total = (1 + len(MOMENTS)) * sum(p.nbytes * (p.num_layers or 1) for p in parameters)
        done = numbers = 0
        with BytesProgress(task, total) as line:
            for kind in (WEIGHTS, *MOMENTS):
                for parameter in parameters:
                    for layer, array in zip(parameter.layers, self._state(kind, parameter), strict=True):
                        if kind == WEIGHTS:
                            sink.write(parameter, layer, array)
                            numbers += array.size
                        sink.write_state(kind, parameter, layer, array)
                        done += parameter.nbytes
                        line.update(done, done)
        say_notes(self.source.origin.not_finite.notes)
        sink.add(self._arguments(), self._common(), self._content())
        sink.close()
        return numbers

    def _state(self, kind: str, parameter: Any) -> Iterator[np.ndarray]:
        if kind == WEIGHTS:
            return self.source.saved(parameter)
        pattern = re.compile(rf"(optimizer\..*\b{OURS[kind]})\.{re.escape(parameter.name)}")
        prefix = next(match[1] for name in self._names if (match := pattern.fullmatch(name)))
        return self.source.saved(parameter, prefix)

    def _scalar(self, name: str) -> float:
        return np.asarray(open_array(self.source.weights.folder / "state", name).read().result()).item()

    @property
    def _samples(self) -> int:
        return self.config.training.global_batch_size

    def _schedule(self) -> dict[str, Any]:
        """Returns the state of Megatron's scheduler, which counts samples."""
        options, horizon, size = self.config.optimizer, self.past.horizon, self._samples
        start = options.weight_decay if options.start_weight_decay is None else options.start_weight_decay
        return {
            "max_lr": options.learning_rate,
            "lr_warmup_steps": options.warmup_steps * size,
            # Not the consumed samples: after a ramp of batch sizes they are fewer, and Megatron would take the rates of
            # an earlier step.
            "num_steps": self.scheduled * size,
            "lr_decay_style": options.decay_style,
            "lr_decay_steps": (horizon.decay_steps or train_steps(self.config.training)) * size,
            "min_lr": options.min_learning_rate,
            # Megatron asserts that both ends agree where the decay does not grow.
            "start_wd": options.weight_decay if options.weight_decay_style == "constant" else start,
            "end_wd": options.weight_decay,
            "wd_incr_style": options.weight_decay_style,
            "wd_incr_steps": horizon.steps * size,
        }

    def _common(self) -> dict[str, Any]:
        options = self.config.optimizer
        rate, decay = rates_at(self.config, self.scheduled, self.past.horizon)
        group = {
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": options.learning_rate,
            "min_lr": options.min_learning_rate,
            "lr": rate,
            "betas": (options.beta1, options.beta2),
            "eps": options.epsilon,
            "step": self.updates,
            # Of Transformer Engine's and Apex's Adam, and of torch's.
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        decays, experts = {"wd_mult": 1.0, "weight_decay": decay}, {"is_expert_parallel": True}
        optimizer = self._optimizer([group | {"wd_mult": 0.0, "weight_decay": 0.0}, group | decays])
        # Experts have no vectors, which do not decay.
        chained = {0: optimizer, 1: self._optimizer([group | decays | experts])} if self.expert > 1 else optimizer
        return {"optimizer": chained, "opt_param_scheduler": self._schedule()}

    def _optimizer(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the state of one of Megatron's optimizers without its tensors."""
        found: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": LAYOUT}
        if self.dtype == "float16":
            scale = {name: self._scalar(f"loss_scale.{name}") for name in ("scale", "growth", "hysteresis")}
            found["grad_scaler"] = {
                "scale": scale["scale"],
                "growth_tracker": int(scale["growth"]),
                "hysteresis_tracker": int(scale["hysteresis"]),
            }
        return found

    def _content(self) -> dict[str, Any]:
        return {"distrib_optim_sharding_type": LAYOUT, "chained_optim_avoid_prefix": True}

    def _arguments(self) -> dict[str, Any]:
        """Returns Megatron's arguments of the training; those of the model are the sink's."""
        options, training = self.config.optimizer, self.config.training
        return {
            "iteration": self.step,
            "consumed_train_samples": self.past.consumed_samples,
            "train_iters": train_steps(training),
            "global_batch_size": training.global_batch_size,
            "micro_batch_size": training.microbatch_size or 1,
            "rampup_batch_size": list(training.rampup_batch_size) if training.rampup_batch_size else None,
            "seed": training.seed,
            "optimizer": "adam",
            "lr": options.learning_rate,
            "min_lr": options.min_learning_rate,
            "lr_decay_style": options.decay_style,
            "lr_warmup_iters": options.warmup_steps,
            "lr_decay_iters": self.past.horizon.decay_steps,
            "lr_warmup_init": options.initial_learning_rate,
            "lr_wsd_decay_style": options.wsd_decay_style,
            "lr_wsd_decay_iters": options.wsd_decay_steps,
            "weight_decay": options.weight_decay,
            "weight_decay_incr_style": options.weight_decay_style,
            "start_weight_decay": self._schedule()["start_wd"],
            "end_weight_decay": options.weight_decay,
            "clip_grad": options.clip_grad_norm,
            "adam_beta1": options.beta1,
            "adam_beta2": options.beta2,
            "adam_eps": options.epsilon,
            "split": self.config.data.split,
            "use_distributed_optimizer": True,
            "no_save_optim": False,
            # States of torch's generators have no equivalent in a run of mtjax; Megatron then seeds its own.
            "no_save_rng": True,
            "expert_model_parallel_size": self.expert,
            # As one rank would have saved it: Megatron reshards a checkpoint that is fully reshardable.
            "world_size": 1,
            "data_parallel_size": 1,
        }
