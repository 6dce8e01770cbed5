"""What the mesh of a Retro must divide, and the axes that it may not have."""

from collections.abc import Iterator

from mtjax.config import Model
from mtjax.families.retro.config import neighbour_length
from mtjax.layout.plan import Plan


def retro_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields axes of the mesh that Retro does not support, and neighbours that sequence parallelism can't divide."""
    mesh = plan.mesh
    if model.family != "retro":
        return
    for name, what, degree in (("stage", "pipeline", mesh.stage), ("context", "context", mesh.context)):
        if degree > 1:
            yield (
                f"{what} parallelism ({name}={degree} in mesh {mesh}) does not support the family retro, whose encoder "
                f"runs within a layer: remove {name} from the mesh"
            )
    if plan.zero == 3 and (model.retro_frozen == "decoder" or not model.retro_reads):
        what = "retro_frozen decoder" if model.retro_reads else "retro_reads false"
        yield f"--zero 3 does not support {what}, with which some layers have no backward pass: use --zero 2"
    length, axes = neighbour_length(model), plan.layout(model).rules.act_seq
    if length % mesh.degree(axes):
        yield (
            f"the {length} tokens of a neighbour (retro_retrieved_chunks {model.retro_retrieved_chunks} x retro_chunk "
            f"{model.retro_chunk}) are not divisible by the {mesh.degree_text(axes)}, over which sequence_parallel "
            "shards them: change retro_chunk, or remove sequence_parallel"
        )
