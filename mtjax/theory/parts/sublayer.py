"""What all sublayers - a norm, something split over the model ways, a residual add - have in common."""

from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Expectation
from mtjax.theory.parts.part import NORM_VECTORS, ResidualStream, over_model
from mtjax.theory.plan import Plan

NORM_INPUTS = "norm inputs"


def sublayer_keeps(tokens: int, hidden: int, plan: Plan) -> dict[str, float]:
    """What any sublayer keeps of the residual stream: what it adds, Megatron also what its first product reads, and a
    dropout mask of a byte an element."""
    elements = plan.local_tokens(tokens) * hidden / (plan.mesh.model if plan.sequence_parallel else 1)
    return {
        NORM_INPUTS: plan.element_bytes * elements,
        "inputs of column-parallel products": 0 if plan.residuals == "jax" else plan.element_bytes * elements,
        "dropout masks": elements if plan.dropout else 0,
    }


def stream_bytes(tokens: int, hidden: int, plan: Plan) -> float:
    """The residual stream of a microbatch, of a rank's tokens, where sequences are gathered."""
    return plan.element_bytes * plan.local_tokens(tokens) * hidden


def sublayer_sends(stream: ResidualStream, name: str, *, learns: bool = True) -> list[Expectation]:
    """What every sublayer sends: Figure 4 of arXiv 1909.08053, or, split, Figure 5 of arXiv 2205.05198.

    `g` sums what the row-parallel product gives, `f` the gradient of what the column-parallel product reads. Full
    recompute repeats g where its result is needed, and in a group of layers everywhere. Where a sublayer `learns`
    nothing, its backward pass needs what it gathered for what is computed again alone.
    """
    again = f"{stream.side}{'recomputed' if stream.needed_again else 'grouped'}_layers*{stream.turns}"
    if not stream.split:
        return [
            over_model(LAYER_FORWARD, "all-reduce", stream.forward_times, stream.elements, f"g after {name}"),
            over_model(LAYER_RECOMPUTE, "all-reduce", again, stream.elements, f"g after {name}, again"),
            over_model(LAYER_BACKWARD, "all-reduce", stream.input_gradients, stream.elements, f"f before {name}"),
        ]
    read_again = f"{stream.side}{'layers' if learns else 'recomputed_layers'}"
    gathered_again = f"({read_again} + {stream.side}grouped_layers)*{stream.turns}"
    scattered = stream.times if learns else stream.input_gradients
    return [
        over_model(LAYER_FORWARD, "all-gather", stream.forward_times, stream.elements, f"before {name}"),
        over_model(LAYER_FORWARD, "reduce-scatter", stream.forward_times, stream.elements, f"after {name}"),
        over_model(LAYER_RECOMPUTE, "all-gather", gathered_again, stream.elements, f"before {name}, again"),
        over_model(LAYER_RECOMPUTE, "reduce-scatter", again, stream.elements, f"after {name}, again"),
        over_model(LAYER_BACKWARD, "all-gather", scattered, stream.elements, f"gradient of what {name} scattered"),
        over_model(
            LAYER_BACKWARD,
            "reduce-scatter",
            stream.input_gradients,
            stream.elements,
            f"gradient of what {name} gathered",
        ),
    ]


def own_token_sums(stream: ResidualStream, elements: str, why: str) -> Expectation:
    """A sum over the model ways of gradients of which each rank saw its own tokens, with split sequences, or heads."""
    return over_model(
        LAYER_BACKWARD, "all-reduce", stream.turns, elements, why, dtype="float32", pooled=True, hoisted=True
    )


def own_vector_sums(stream: ResidualStream, norm: str, bias: bool) -> list[Expectation]:
    """Those of a sublayer's norm and of its row-parallel product's bias; none where these are frozen."""
    if stream.is_frozen:
        return []
    vectors = len(NORM_VECTORS[norm]) + bias
    return [own_token_sums(stream, f"{stream.side}layers*{vectors}*hidden", "norms and row-parallel biases")]


def adapters_keep(rank: int, count: int, reads: float, tokens: int, plan: Plan) -> dict[str, float]:
    """What `count` adapters keep: what goes between their two products, on every rank; and with dropout what is left of
    what they read, `reads` elements a token on a rank, with masks of a byte an element."""
    read = (plan.element_bytes + 1) * reads if plan.adapter_dropout else 0.0
    kept = plan.local_tokens(tokens) * (plan.element_bytes * rank * count + read)
    return {"adapters": kept} if rank else {}


def adapters_send(stream: ResidualStream, name: str, columns: int, rank: int) -> list[Expectation]:
    """What the adapters of a sublayer send, beside one row-parallel and `columns` column-parallel products.

    Between the two products of an adapter go `rank` numbers a token: of the row-parallel one each rank has a part of
    their sum, of the column-parallel ones of the sum of their gradient. With split sequences the sum is scattered, and
    each rank has the gradient of B from its own tokens.
    """
    if not rank:
        return []
    small, pooled = "batch*sequence*rank", {"pooled": True}
    again, why = f"{stream.side}recomputed_layers*{stream.turns}", f"the row-parallel adapter of {name}"
    kind = "reduce-scatter" if stream.split else "all-reduce"
    back: dict[str, object] = {"pooled": True, "also": LAYER_RECOMPUTE}
    columns_why = f"gradient of the column-parallel adapters of {name}"
    lines = [
        over_model(LAYER_FORWARD, kind, stream.forward_times, small, why, **pooled),
        # Only the gradient of B needs it again: the compiler may send it with the gradients.
        over_model(LAYER_BACKWARD, kind, again, small, f"{why}, again", **back),
        over_model(LAYER_BACKWARD, "all-reduce", stream.times, f"{columns}*{small}", columns_why, **back),
    ]
    if not stream.split:
        return lines
    own = f"{stream.side}layers*rank*hidden"
    return [
        *lines,
        over_model(LAYER_BACKWARD, "all-gather", stream.times, small, f"gradient of {why}", **pooled),
        over_model(LAYER_BACKWARD, "all-reduce", stream.turns, own, "B of row-parallel adapters", hoisted=True, **back),
    ]
