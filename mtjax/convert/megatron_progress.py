"""How far a run of Megatron-LM had come when it saved, by the parts of a checkpoint that are not tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtjax.convert.megatron_buffers import SAVE_AGAIN
from mtjax.errors import UserError


@dataclass(frozen=True)
class Progress:
    """How far a run of Megatron-LM had come, and what its optimizer's settings were."""

    iteration: int
    consumed_samples: int
    updates: int
    """Steps of Adam."""
    schedule: Mapping[str, Any]
    """The state of Megatron's `OptimizerParamScheduler`, which counts samples."""
    groups: Sequence[Mapping[str, Any]]
    """Adam's settings for groups of parameters."""
    scaler: Mapping[str, Any] | None
    """The loss scale of float16."""


def progress_of(contents: Mapping[str, Any], optimizers: Sequence[Any], source: str) -> Progress:
    """Reads the parts of a checkpoint that are not tensors.

    Args:
      contents: iteration, args and opt_param_scheduler.
      optimizers: the state of each of the optimizers without tensors.
      source: for messages.

    Raises:
      UserError: something is missing, or contradicts itself.
    """
    arguments = contents.get("args")
    arguments = arguments if isinstance(arguments, Mapping) else vars(arguments) if arguments else {}
    groups = [group for state in optimizers for group in state.get("param_groups", ())]
    # Transformer Engine's and Apex's Adam count in the groups, torch's in the state of each parameter, of which
    # torch_dist saves one `common_step`.
    steps = {group["step"] for group in groups if group.get("step") is not None}
    for state in optimizers:
        inner = state.get("state")
        steps |= {inner["common_step"]} if isinstance(inner, Mapping) and "common_step" in inner else set()
    found = {
        "iteration": contents.get("iteration"),
        "consumed_train_samples": arguments.get("consumed_train_samples"),
        "Adam's step": next(iter(steps), None),
        "opt_param_scheduler": contents.get("opt_param_scheduler"),
    }
    if missing := [name for name, value in found.items() if value is None]:
        raise UserError(f"{source} has no {', '.join(missing)}, which --with-optimizer needs: {SAVE_AGAIN}")
    if len(steps) > 1:
        raise UserError(f"{source} has several steps of Adam, {', '.join(map(str, sorted(steps)))}: mtjax has one")
    scalers = [state["grad_scaler"] for state in optimizers if state.get("grad_scaler")]
    return Progress(
        int(found["iteration"]),
        int(found["consumed_train_samples"]),
        int(next(iter(steps))),
        found["opt_param_scheduler"],
        groups,
        scalers[0] if scalers else None,
    )


def optimizers_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the state of each optimizer: with expert parallelism the experts have their own."""
    if isinstance(value, list):
        for one in value:
            yield from optimizers_in(one)
    # `ChainedOptimizer` saves a list in the format torch, and a dict by number in torch_dist.
    elif isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        for one in value.values():
            yield from optimizers_in(one)
    elif isinstance(value, Mapping):
        inner = value.get("optimizer")
        yield {**inner, "grad_scaler": value.get("grad_scaler")} if isinstance(inner, Mapping) else value
