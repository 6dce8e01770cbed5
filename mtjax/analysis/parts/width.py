"""Collectives of 2D tensor parallelism besides those of the stream: of norms over a sharded width, and of vectors."""

from mtjax.analysis.contract import (
    EMBEDDING_BACKWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_RECOMPUTE,
    OTHER,
    Expectation,
)
from mtjax.analysis.parts.part import ResidualStream, over_model


def width_collectives(stream: ResidualStream, norms: int, vectors: int) -> list[Expectation]:
    """Returns what a sublayer's norms all-reduce of each token, forward and backward, and the all-gathers of the
    gradients of its vectors, of which a rank has those of its part of the width.

    Args:
      stream: sharded along its width.
      norms: of the sublayer.
      vectors: of the stream's width: of the norms, and the bias of the row-parallel product.
    """
    sums, settings = f"{norms * stream.width_sums}*batch*sequence", {"dtype": "float32", "pooled": True}
    recomputed = f"recomputed_layers*{stream.turns}"
    lines = [
        over_model(
            LAYER_FORWARD, "all-reduce", stream.forward_times, sums, "means of norms over the width", **settings
        ),
        over_model(LAYER_RECOMPUTE, "all-reduce", recomputed, sums, "means of norms over the width, again", **settings),
        over_model(LAYER_BACKWARD, "all-reduce", stream.times, sums, "means of norms' gradients", **settings),
    ]
    return [*lines, vector_gathers(stream, f"layers*{vectors}*hidden", "norms and row-parallel biases")]


def final_norm_collectives(stream: ResidualStream, path: str, vectors: int) -> list[Expectation]:
    """Returns those of a norm after the layers."""
    sums, settings = f"{stream.width_sums}*batch*sequence", {"dtype": "float32", "pooled": True}
    return [
        over_model(OTHER, "all-reduce", stream.turns, sums, f"means of the norm {path}", **settings),
        over_model(OTHER, "all-reduce", stream.turns, sums, f"means of its gradients, {path}", **settings),
        vector_gathers(stream, f"{vectors}*hidden", f"the norm {path}"),
    ]


def vector_gathers(stream: ResidualStream, elements: str, why: str) -> Expectation:
    """Returns the all-gather of gradients of vectors, of which each rank has those of its part of the width."""
    settings = {"dtype": "float32", "pooled": True, "hoisted": True, "also": EMBEDDING_BACKWARD}
    return over_model(LAYER_BACKWARD, "all-gather", stream.turns, elements, f"gradients of {why}", **settings)
