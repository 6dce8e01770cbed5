"""Learning rate and weight decay of a run's next step, which Megatron-LM saves with its optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.config.horizon import Horizon, horizon_of
from mtjax.data import train_steps
from mtjax.errors import UserError
from mtjax.train.optimizer import make_learning_rate
from mtjax.train.weight_decay import make_weight_decay

_ROUNDED = 1e-4
"""Relative difference of numbers that are computed in float32."""


def rates_at(run: Config, step: int, horizon: Horizon | None = None) -> tuple[float, float]:
    """Returns the learning rate and the weight decay of a step, counted from 0.

    Args:
      run: all of its config.
      step: of its schedules.
      horizon: of the run; that of one which has not begun when None.
    """
    steps = train_steps(run.training)
    horizon = horizon or horizon_of(run.optimizer, steps)
    decay = make_weight_decay(run.optimizer, horizon.steps)
    rate = make_learning_rate(run.optimizer, horizon.decay_steps or steps)
    value = lambda schedule: float(np.asarray(schedule(step) if callable(schedule) else schedule))  # noqa: E731
    return value(rate), value(decay)


def check_growth(samples: Any, run: Config, source: str) -> None:
    """Checks over how many samples weight decay grows: mtjax's grows to the end of a run.

    Raises:
      UserError: they are not those of the run.
    """
    steps, batch = train_steps(run.training), run.training.global_batch_size
    is_growing = run.optimizer.weight_decay_style != "constant" and isinstance(samples, int)
    if is_growing and samples // batch != steps:
        raise UserError(
            f"{source}: weight decay grows over {samples} samples, and the run has {steps} steps of {batch}: mtjax's "
            "grows to the end of the run"
        )


def check_rates(groups: Sequence[Mapping[str, Any]], run: Config, step: int, source: str) -> None:
    """Checks that the rates that are saved are those of the run's schedules.

    They may be those of a step before or after, for Megatron's schedules count samples, and mtjax's steps.

    Args:
      groups: Adam's settings for groups of parameters.
      run: all of its config.
      step: of its schedules, the next one.
      source: for messages.

    Raises:
      UserError: they differ.
    """
    near = [rates_at(run, max(0, at)) for at in (step - 1, step, step + 1)]
    for group in groups:
        factors = {"lr": 1.0, "weight_decay": group.get("wd_mult", 1.0)}
        for (name, factor), ours in zip(factors.items(), zip(*near, strict=True), strict=True):
            saved, ours = group.get(name), [factor * value for value in ours]
            if not isinstance(saved, int | float):
                continue
            if not min(ours) * (1 - _ROUNDED) <= saved <= max(ours) * (1 + _ROUNDED):
                raise UserError(
                    f"{source}: {name} of the next step is {saved:.6g} in the optimizer's state, and {ours[1]:.6g} by "
                    "the schedule that the arguments and opt_param_scheduler describe: convert without --with-optimizer"
                )
