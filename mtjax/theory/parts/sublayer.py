"""What all sublayers - a norm, something split over the model ways, a residual add - have in common."""

from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Expectation
from mtjax.theory.parts.part import NORM_VECTORS, Stream, over_model
from mtjax.theory.plans import Plan

NORM_INPUTS = "norm inputs"


def sublayer_keeps(tokens: int, hidden: int, plan: Plan) -> dict[str, float]:
    """What any sublayer keeps of the residual stream: what it adds, Megatron also what its first product reads, and a
    dropout mask of a byte an element."""
    elements = plan.microbatch_size * tokens * hidden / (plan.mesh.model if plan.sequence_parallel else 1)
    return {
        NORM_INPUTS: plan.element_bytes * elements,
        "inputs of column-parallel products": 0 if plan.residuals == "jax" else plan.element_bytes * elements,
        "dropout masks": elements if plan.dropout else 0,
    }


def sublayer_sends(stream: Stream, name: str) -> list[Expectation]:
    """What every sublayer sends: Figure 4 of arXiv 1909.08053, or, split, Figure 5 of arXiv 2205.05198.

    `g` sums what the row-parallel product gives, `f` the gradient of what the column-parallel product reads. Full
    recompute repeats g where its result is needed, and in a group of layers everywhere.
    """
    again = f"{stream.side}{'recomputed' if stream.needed_again else 'grouped'}_layers*{stream.turns}"
    if not stream.split:
        return [
            over_model(LAYER_FORWARD, "all-reduce", stream.forward_times, stream.elements, f"g after {name}"),
            over_model(LAYER_RECOMPUTE, "all-reduce", again, stream.elements, f"g after {name}, again"),
            over_model(LAYER_BACKWARD, "all-reduce", stream.times, stream.elements, f"f before {name}"),
        ]
    gathered_again = f"({stream.side}layers + {stream.side}grouped_layers)*{stream.turns}"
    return [
        over_model(LAYER_FORWARD, "all-gather", stream.forward_times, stream.elements, f"before {name}"),
        over_model(LAYER_FORWARD, "reduce-scatter", stream.forward_times, stream.elements, f"after {name}"),
        over_model(LAYER_RECOMPUTE, "all-gather", gathered_again, stream.elements, f"before {name}, again"),
        over_model(LAYER_RECOMPUTE, "reduce-scatter", again, stream.elements, f"after {name}, again"),
        over_model(LAYER_BACKWARD, "all-gather", stream.times, stream.elements, f"gradient of what {name} scattered"),
        over_model(
            LAYER_BACKWARD, "reduce-scatter", stream.times, stream.elements, f"gradient of what {name} gathered"
        ),
    ]


def own_token_sums(stream: Stream, elements: str, why: str) -> Expectation:
    """A sum over the model ways of gradients of which each rank, with split sequences, saw its own tokens."""
    return over_model(
        LAYER_BACKWARD, "all-reduce", stream.turns, elements, why, dtype="float32", pooled=True, hoisted=True
    )


def own_vector_sums(stream: Stream, norm: str, bias: bool) -> Expectation:
    """Those of a sublayer's norm and of its row-parallel product's bias."""
    vectors = len(NORM_VECTORS[norm]) + bias
    return own_token_sums(stream, f"{stream.side}layers*{vectors}*hidden", "norms and row-parallel biases")
