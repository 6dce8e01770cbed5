"""Over which steps the learning rate decays and the weight decay increases, also after a resume."""

from dataclasses import dataclass

from mtjax.config.optimizer import Optimizer


@dataclass(frozen=True)
class Horizon:
    """Steps over which learning rate and weight decay change. It is fixed when the run starts, however often it is
    resumed.

    Attributes:
      decay_steps: step at which the learning rate reaches its minimum; None if no step so far depends on it.
      steps: number of steps over which the weight decay grows.
    """

    decay_steps: int | None
    steps: int


def horizon_of(options: Optimizer, steps: int, saved: Horizon | None = None) -> Horizon:
    """Returns the horizon of a run.

    Args:
      options: of the optimizer; their `decay_steps` takes precedence.
      steps: of the run.
      saved: the horizon of the run that is resumed.
    """
    # A resumed run keeps the horizon of its start: one that is made longer would otherwise jump to another rate.
    growth, last = (steps, None) if saved is None else (saved.steps, saved.decay_steps)
    if options.decay_steps is not None:
        return Horizon(options.decay_steps, growth)
    # Constant and inverse-square-root rates do not depend on the horizon, nor does the warmup.
    if options.decay_style in ("constant", "inverse-square-root"):
        return Horizon(None, growth)
    last = steps if last is None else last
    return Horizon(last if last > options.warmup_steps else None, growth)
