"""Whether a step compiles its layers one by one, or one loop over them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtjax.config import Config, Model
from mtjax.layout.stacks import stacks_of

if TYPE_CHECKING:  # its `Plan.of` asks `unrolls`
    from mtjax.layout.plan import Plan

MOST_LAYERS = 100
"""Layers up to which they are unrolled by default: compiling 32 takes about a minute on two cores."""


def unrolls(run: Config, plan: "Plan", *, on_gpus: bool = True) -> bool:
    """Returns whether a run's layers are unrolled: by default on GPUs, where that is possible and saves copies.

    Args:
      run: the config, whose `unroll_layers` decides where it is set.
      plan: the run's, whose `unrolled` is not read.
      on_gpus: whether its devices are GPUs. On CPUs loops compile sooner, and copies cost little.
    """
    if run.training.unroll_layers is not None:
        return run.training.unroll_layers
    # Each size of a batch ramp-up is a program to compile.
    is_one_program = run.training.rampup_batch_size is None
    is_short = sum(stack.layers for stack in stacks_of(run.model)) <= MOST_LAYERS
    return on_gpus and is_one_program and is_short and not any(unrolling_problems(run.model, plan))


def unrolling_problems(model: Model, plan: "Plan") -> Iterator[str]:
    """Yields what unrolled layers are not compatible with."""
    if model.num_experts:
        yield f"unroll_layers does not support experts, and num_experts is {model.num_experts}: remove one of the two"
    if plan.mesh.has_pipeline:
        yield (
            f"unroll_layers does not support pipeline parallelism, and mesh {plan.mesh} has {plan.stages} stages, "
            "which save activations in slots that a loop indexes: remove it"
        )
    if plan.recompute == "full":
        yield (
            "unroll_layers needs recompute none or selective, and recompute is full: without a loop XLA would "
            "recompute several layers at the same time, each in separate memory; remove one of the two"
        )
    if plan.recompute == "selective" and plan.keeps_scores:
        yield (
            "unroll_layers with recompute selective needs attention that holds no scores of all queries, and here "
            "XLA's kernel does, whose scores XLA would recompute for several layers at the same time: use --attention "
            "blocks, a setting that allows cuDNN's kernel, or recompute none"
        )
    if len(stacks_of(model)) > 1:
        yield f"unroll_layers needs a family with one stack of layers, and {model.family} has two: remove it"
