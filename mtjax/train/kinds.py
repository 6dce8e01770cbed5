"""Which train step a config has: `TrainStep`, or one that extends it for a setting, or for several."""

from pkgutil import resolve_name

from mtjax.config import Config
from mtjax.layout.optimizer_states import optimizer_states
from mtjax.train.step import TrainStep


def step_class(config: Config) -> type[TrainStep]:
    """Returns the class of a config's train step."""
    model, training, optimizer = config.model, config.training, config.optimizer
    # The first is the outermost: it extends methods of those after it.
    settings = {
        "variants:NarrowMastersStep": optimizer.master_dtype != "float32",
        "variants:PredictingStep": model.mtp_num_layers > 0,
        "variants:RoutedStep": model.num_experts > 0,
        "qk_clip:QKClipStep": optimizer.qk_clip > 0,
        "offload:OffloadedStep": config.parallel.offload != "none",
        "distilled:Distilled": config.finetuning.teacher is not None,
        "float8:Float8Step": training.fp8 != "none",
        "variants:Float16Step": training.compute_dtype == "float16",
        "variants:OtherOptimizerStep": not optimizer_states(config).is_plain,
        "variants:ScheduleFreeStep": optimizer.optimizer == "schedule-free",
    }
    kinds: list[type[TrainStep]] = [
        resolve_name(f"{__package__}.{name}") for name, is_set in settings.items() if is_set
    ]
    if len(kinds) < 2:
        return (kinds or [TrainStep])[0]
    return type("And".join(kind.__name__ for kind in kinds), tuple(kinds), {})
