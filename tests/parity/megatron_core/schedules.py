"""megatron-core's OptimizerParamScheduler: learning rate and weight decay of every update."""

from types import SimpleNamespace

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.parity.megatron_core.cases import PLAIN_DECAY, RATES, SCHEDULES, STEPS

BATCH = 16
"""Samples of a step; Megatron-LM counts all its schedules in samples."""
COUNTED = ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps")


def scheduled(name: str) -> dict[str, list[float]]:
    """Rates and weight decays of updates 0 to `STEPS` + 1.

    As `train_step` of Megatron-LM has it: the scheduler sets what the first update takes when it is made, and is told
    of the samples of an update after it.
    """
    settings = {"init_lr": 0.0, "wd_incr_steps": STEPS, **RATES, **PLAIN_DECAY, **SCHEDULES[name]}
    settings |= {key: BATCH * settings[key] for key in COUNTED if key in settings}
    group = {}
    scheduler = OptimizerParamScheduler(SimpleNamespace(param_groups=[group]), **settings)
    found: dict[str, list[float]] = {"learning_rate": [], "weight_decay": []}
    for _ in range(STEPS + 2):
        found["learning_rate"].append(group["lr"])
        found["weight_decay"].append(group["weight_decay"])
        scheduler.step(increment=BATCH)
    return found


def table() -> dict[str, dict[str, list[float]]]:
    """All of them, by their names."""
    return {name: scheduled(name) for name in SCHEDULES}
