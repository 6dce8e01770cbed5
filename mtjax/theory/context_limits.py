"""What context parallelism is not combined with."""

from collections.abc import Iterator
from dataclasses import replace

from mtjax.config import Model
from mtjax.config.sizes import nearest_multiples
from mtjax.theory.plan import Plan
from mtjax.theory.rules import CONTEXT

CONTEXT_FAMILIES = ("gpt", "llama", "bert")
"""Families with context parallelism. T5 has none: its attention has a relative bias, and the decoder a
cross-attention over the encoder's tokens."""


def context_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields what context parallelism is not compatible with."""
    mesh, degree = plan.mesh, plan.mesh.context
    if degree == 1:
        if plan.context_method != "ring":
            example = replace(mesh, context=2)
            yield (
                f"context_method {plan.context_method} needs context parallelism, and mesh {mesh} has none: "
                f"remove context_method, or use a mesh such as {example}"
            )
        return
    if model.family not in CONTEXT_FAMILIES:
        supported = f"{', '.join(CONTEXT_FAMILIES[:-1])} and {CONTEXT_FAMILIES[-1]}"
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) supports the families {supported}, and family is "
            f"{model.family}: remove context from the mesh"
        )
    if model.mtp_num_layers:
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) divides the samples in which mtp_num_layers "
            f"{model.mtp_num_layers} reads tokens ahead: remove context from the mesh, or use --mtp-num-layers 0"
        )
    if model.head != "language":
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) needs a loss per token, and head is "
            f"{model.head}: remove context from the mesh"
        )
    # Two chunks for each rank, one from either half of the sequence: causal attention is then balanced.
    length, chunks = model.sequence_length, 2 * degree
    if length % chunks:
        yield (
            f"sequence_length {length} is not divisible by {chunks}, 2 chunks for each rank of the "
            f"{mesh.degree_text((CONTEXT,))}; the nearest that are: {nearest_multiples(length, chunks)}"
        )
