"""Retro's stacks of layers; what its mesh must divide, and the axes that it may not have."""

from collections.abc import Iterator

from mtjax.config import Model
from mtjax.families.retro.config import (
    first_retro_layer,
    later_retro_layers,
    neighbour_length,
    neighbour_tokens,
    plain_layers,
)
from mtjax.layout.plan import Plan
from mtjax.layout.stacks import ENCODER, LayerStack

ENCODER_FIRST, FIRST_ATTENTION, FIRST_REST = "encoder_first", "first_attention", "first_rest"
"""Paths of Retro's first encoder layer, which also reads the chunk, and of the two parts of the first layer with
chunked cross-attention: self-attention, and what follows the encoder."""
PLAIN, RETRO = "plain", "retro"
"""Paths of its layers without chunked cross-attention, and of the other ones with it."""


def retro_stacks(model: Model) -> tuple[LayerStack, ...]:
    """Returns the stacks of a Retro, in the order in which they first run; the last has no prefix. In their section the
    encoder runs within the first layer with chunked cross-attention."""
    first, each, read = first_retro_layer(model), model.sequence_length, neighbour_tokens(model)
    encoding = model.retro_encoder_layers
    found = [
        (PLAIN, "transformer", plain_layers(model), each),
        (FIRST_ATTENTION, "attention", (first,), each),
        (ENCODER_FIRST, "transformer with cross-attention", (0,), read),
        (ENCODER, "transformer", tuple(range(1, encoding)), read),
        (RETRO, "retro", later_retro_layers(model), each),
        (FIRST_REST, "retro after its encoder", (first,), each),
    ]

    def stack(path: str, kind: str, numbers: tuple[int, ...], tokens: int) -> LayerStack:
        # The last stack's symbols are those of the embedding and the head, which have no prefix.
        side, is_encoder = "" if path == FIRST_REST else f"{path}_", path.startswith(ENCODER)
        stream, among = (f"{ENCODER_FIRST}_", encoding) if is_encoder else ("", model.num_layers)
        return LayerStack(path, len(numbers), tokens, side, numbers, stream, among, is_encoder, kind)

    return tuple(stack(*one) for one in found if one[2])


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
