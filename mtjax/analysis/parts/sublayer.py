"""Formulas common to all sublayers: a norm, a tensor-parallel block, a residual add."""

from typing import Any

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Dtype, Expectation
from mtjax.analysis.parts.part import Norms, ResidualStream, over_model
from mtjax.analysis.parts.width import width_collectives
from mtjax.layout.plan import Plan

NORM_INPUTS = "norm inputs"


def sublayer_saved_bytes(tokens: int, hidden: int, plan: Plan) -> dict[str, float]:
    """Returns the bytes that any sublayer saves of the residual stream: its input, with Megatron also the input of its
    first matmul, and a dropout mask of a byte per element."""
    elements = plan.local_tokens(tokens) * hidden / (plan.mesh.model if plan.splits_stream else 1)
    return {
        NORM_INPUTS: plan.element_bytes * elements,
        "inputs of column-parallel products": 0 if plan.residuals == "jax" else plan.element_bytes * elements,
        "dropout masks": elements if plan.dropout else 0,
    }


def stream_bytes(tokens: int, hidden: int, plan: Plan) -> float:
    """Returns the bytes of a microbatch's residual stream, all-gathered over the tensor parallel ranks."""
    return plan.element_bytes * plan.local_tokens(tokens) * hidden


def sublayer_collectives(stream: ResidualStream, name: str, *, learns: bool = True) -> list[Expectation]:
    """Returns every sublayer's collectives: Figure 4 of arXiv 1909.08053, or, with sequence parallelism, Figure 5 of
    arXiv 2205.05198.

    `g` all-reduces the output of the row-parallel matmul, `f` the input gradient of the column-parallel matmul.

    Args:
      stream: that the sublayer reads.
      name: of the sublayer, for the reasons of the lines.
      learns: whether it has trainable weights.
    """
    lines = _sublayer_collectives(stream, name, learns=learns)
    # The lines of the second of two parallel sublayers stand for the sum of both.
    once = {OUTPUT: stream.joins_output, INPUT_GRADIENT: stream.joins_input}
    return [line for of, line in lines if not once.get(of)]


OUTPUT, INPUT_GRADIENT, OTHERS = "output", "input gradient", "others"


def _sublayer_collectives(stream: ResidualStream, name: str, *, learns: bool) -> list[tuple[str, Expectation]]:
    """Returns the lines of `sublayer_collectives`, with what each reduces."""
    # Full recompute repeats g where its result is needed, and in every layer of a group.
    recomputed = f"{stream.side}{'recomputed' if stream.needed_again else 'grouped'}_layers*{stream.turns}"
    times, elements = stream.forward_times, stream.elements
    if not stream.split:
        return [
            (OUTPUT, over_model(LAYER_FORWARD, "all-reduce", times, elements, f"g after {name}")),
            (OUTPUT, over_model(LAYER_RECOMPUTE, "all-reduce", recomputed, elements, f"g after {name}, recomputed")),
            (
                INPUT_GRADIENT,
                over_model(LAYER_BACKWARD, "all-reduce", stream.input_gradients, elements, f"f before {name}"),
            ),
        ]
    # The gathered input is not saved: weight gradients need it a second time, a frozen sublayer only the recompute.
    gathering_layers = f"{stream.side}{'layers' if learns else 'recomputed_layers'}"
    again = f"({gathering_layers} + {stream.side}grouped_layers)*{stream.turns}"
    output_gradients = stream.times if learns else stream.input_gradients
    (ahead, back), sums = stream.gathers, "compute"
    lines = [
        (OTHERS, LAYER_FORWARD, "all-gather", times, ahead, f"before {name}"),
        (OUTPUT, LAYER_FORWARD, "reduce-scatter", times, sums, f"after {name}"),
        (OTHERS, LAYER_RECOMPUTE, "all-gather", again, ahead, f"before {name}, again"),
        (OUTPUT, LAYER_RECOMPUTE, "reduce-scatter", recomputed, sums, f"after {name}, recomputed"),
        (OTHERS, LAYER_BACKWARD, "all-gather", output_gradients, back, f"output gradient of {name}"),
        (INPUT_GRADIENT, LAYER_BACKWARD, "reduce-scatter", stream.input_gradients, sums, f"input gradient of {name}"),
    ]
    return [
        (of, over_model(phase, kind, count, elements, why, dtype=dtype)) for of, phase, kind, count, dtype, why in lines
    ]


def local_gradient_sums(stream: ResidualStream, elements: str, why: str) -> Expectation:
    """Returns the all-reduce of gradients that each tensor parallel rank computed from its tokens or heads only."""
    return over_model(
        LAYER_BACKWARD, "all-reduce", stream.turns, elements, why, dtype="float32", pooled=True, hoisted=True
    )


def matrix_gradient_sums(
    stream: ResidualStream, elements: str, why: str, dtype: Dtype | None = None, also: str = ""
) -> Expectation:
    """Returns the all-reduce of gradients of matrices that several tensor parallel ranks hold alike, each computed from
    the rank's tokens or heads only.

    Args:
      stream: that the layers read.
      elements: formula, a product: of a layer's matrices.
      why: what they are.
      dtype: in which they are added up, if it is not that of other gradients of matrices.
      also: another phase in which they are reduced.
    """
    settings: dict[str, Any] = {"dtype": dtype or stream.matrix_gradients, "also": also, "pooled": True}
    if not stream.unstacked:
        return over_model(LAYER_BACKWARD, "all-reduce", stream.times, elements, why, **settings)
    # XLA: it may add up the gradients of all microbatches first, and reduce the sum once a step.
    every = f"{stream.side}layers*{elements}"
    return over_model(LAYER_BACKWARD, "all-reduce", stream.turns, every, why, hoisted=True, **settings)


def vector_gradient_sums(stream: ResidualStream, norms: Norms, bias: bool) -> list[Expectation]:
    """Returns the all-reduce of the gradients of a sublayer's norm and row-parallel bias; none if they are frozen."""
    vectors = norms.count + bias
    if stream.width_sums:
        return width_collectives(stream, len(norms.kinds), vectors)
    if stream.is_frozen or not vectors:
        return []
    return [local_gradient_sums(stream, f"{stream.side}layers*{vectors}*hidden", "norms and row-parallel biases")]


def adapter_saved_bytes(rank: int, count: float, reads: float, tokens: int, plan: Plan) -> dict[str, float]:
    """Returns the bytes that LoRA adapters save: the array between their two matmuls, replicated; with dropout also
    their dropped-out input with a mask of a byte per element.

    Args:
      rank: of every adapter; 0 without any.
      count: of adapters.
      reads: elements of their inputs per token, on a rank.
      tokens: of a sample.
      plan: of the run.
    """
    inputs = (plan.element_bytes + 1) * reads if plan.adapter_dropout else 0.0
    saved = plan.local_tokens(tokens) * (plan.element_bytes * rank * count + inputs)
    return {"adapters": saved} if rank else {}


def adapter_collectives(stream: ResidualStream, name: str, columns: int, rank: int) -> list[Expectation]:
    """Returns the collectives of a sublayer's LoRA adapters, on one row-parallel and `columns` column-parallel matmuls.

    An adapter's two matmuls A and B exchange `rank` numbers per token: partial sums of them in the row-parallel
    adapter, partial sums of their gradient in the column-parallel ones. With sequence parallelism the former are
    reduce-scattered, and each rank has the gradient of B from its tokens only.
    """
    if not rank:
        return []
    small, pooled = "batch*sequence*rank", {"pooled": True}
    recomputed, why = f"{stream.side}recomputed_layers*{stream.turns}", f"row-parallel adapter of {name}"
    kind = "reduce-scatter" if stream.split else "all-reduce"
    back: dict[str, object] = {"pooled": True, "also": LAYER_RECOMPUTE}
    columns_why = f"gradient in the column-parallel adapters of {name}"
    lines = [
        over_model(LAYER_FORWARD, kind, stream.forward_times, small, why, **pooled),
        # XLA: only the gradient of B needs it in the recompute, so that it may be sent in either phase.
        over_model(LAYER_BACKWARD, kind, recomputed, small, f"{why}, recomputed", **back),
        over_model(LAYER_BACKWARD, "all-reduce", stream.times, f"{columns}*{small}", columns_why, **back),
    ]
    if not stream.split:
        return lines
    b_gradients, b_why = f"{stream.side}layers*rank*hidden", "gradients of B of row-parallel adapters"
    of_b: dict[str, Any] = {"hoisted": True, "dtype": stream.matrix_gradients, **back}
    return [
        *lines,
        over_model(LAYER_BACKWARD, "all-gather", stream.times, small, f"gradient in the {why}", **pooled),
        over_model(LAYER_BACKWARD, "all-reduce", stream.turns, b_gradients, b_why, **of_b),
    ]
