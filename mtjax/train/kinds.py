"""Which train step a config has: one that clips scores, offloads, has a teacher or multiplies in 8 bits, or several."""

from mtjax.config import Config
from mtjax.train.step import TrainStep


def step_class(config: Config) -> type[TrainStep]:
    """Returns the class of a config's train step."""
    kinds: list[type[TrainStep]] = []
    if config.optimizer.qk_clip:
        from mtjax.train.qk_clip import QKClipStep

        kinds.append(QKClipStep)
    if config.parallel.offload != "none":
        from mtjax.train.offload import OffloadedStep

        kinds.append(OffloadedStep)
    if config.finetuning.teacher is not None:
        from mtjax.train.distilled import Distilled

        kinds.append(Distilled)
    if config.training.fp8 != "none":
        from mtjax.train.float8 import Float8Step

        kinds.append(Float8Step)
    if len(kinds) < 2:
        return (kinds or [TrainStep])[0]
    # Each extends other methods of `TrainStep`, or calls those of the next.
    return type("And".join(kind.__name__ for kind in kinds), tuple(kinds), {})
