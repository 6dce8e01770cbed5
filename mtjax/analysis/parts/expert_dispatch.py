"""Collectives that bring tokens to the ranks of their experts, and back."""

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Dtype, Expectation, Kind
from mtjax.analysis.parts.part import ResidualStream
from mtjax.layout.rules import CONTEXT, EXPERT

ROUTES = "batch*sequence*top_k"
"""Formula: elements of a microbatch's expert indices, and of their gates (weights of the experts' outputs)."""
EVERY = "expert_degree*batch*sequence*hidden"
"""Formula: elements of the tokens of all expert parallel ranks."""
LOADS = "batch*num_experts"
"""Formula: elements of the loads of a microbatch's samples, a number per expert."""


def grouped_times(stream: ResidualStream) -> str:
    """Returns the formula of how often layers are recomputed in groups."""
    return f"{stream.side}grouped_layers*{stream.turns}"


def all_gather_dispatch(stream: ResidualStream) -> list[Expectation]:
    """Returns the collectives over `expert` of --expert-dispatch all-gather.

    Every rank all-gathers all ranks' tokens, and its experts' outputs are reduce-scattered. The backward pass
    all-gathers tokens and output gradients, and reduce-scatters input gradients. The recompute of a layer needs none of
    it, but in a group of layers.
    """
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, why: str) -> None:
        lines.append(Expectation(phase, kind, EXPERT, count, EVERY, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, grouped_times(stream))):
        line(phase, "all-gather", count, "tokens to experts")
        line(phase, "reduce-scatter", count, "outputs of experts")
    line(LAYER_BACKWARD, "all-gather", f"2*{stream.times}", "tokens and output gradients to experts")
    line(LAYER_BACKWARD, "reduce-scatter", stream.input_gradients, "input gradients of experts")
    return [*lines, *_gathered_routes(stream)]


def all_to_all_dispatch(stream: ResidualStream) -> list[Expectation]:
    """Returns the collectives over `expert` of --expert-dispatch all-to-all without a capacity.

    Ragged all-to-alls send tokens only to the ranks of their experts and outputs back, in arrays sized for the worst
    case. The backward pass sends tokens again, output gradients to experts and input gradients back.
    """
    lines: list[Expectation] = []

    def line(phase: str, count: str, why: str) -> None:
        sent = "exchanged_tokens*hidden"
        lines.append(Expectation(phase, "ragged-all-to-all", EXPERT, count, EVERY, sent=sent, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, grouped_times(stream))):
        line(phase, f"2*{count}", "tokens to experts, and outputs back")
    line(LAYER_BACKWARD, stream.with_input_gradients(3), "tokens and output gradients to experts, input gradients back")
    return [*lines, *_gathered_routes(stream)]


def _gathered_routes(stream: ResidualStream) -> list[Expectation]:
    """Returns the all-gathers of all ranks' expert indices and gates, from which a rank dispatches tokens."""
    routes, lines = f"expert_degree*{ROUTES}", []

    def line(phase: str, kind: Kind, count: str, why: str, dtype: Dtype) -> None:
        lines.append(Expectation(phase, kind, EXPERT, count, routes, dtype, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, grouped_times(stream))):
        line(phase, "all-gather", count, "gates of tokens", "float32")
        line(phase, "all-gather", count, "expert indices of tokens", "int32")
    line(LAYER_BACKWARD, "all-gather", stream.times, "gates of tokens", "float32")
    line(LAYER_BACKWARD, "all-gather", stream.times, "expert indices of tokens", "int32")
    line(LAYER_BACKWARD, "reduce-scatter", stream.input_gradients, "gradients of gates", "float32")
    return lines


def capacity_dispatch(stream: ResidualStream) -> list[Expectation]:
    """Returns the collectives over `expert` with a capacity: all-to-alls of each expert's slots, and back.

    The backward pass sends tokens again, output gradients to experts and input gradients back.
    """
    # Slots are sent whether a token fills them or not: shapes are static.
    slots, lines = "batch*num_experts*capacity", []

    def line(phase: str, count: str, elements: str, why: str, dtype: Dtype = "compute") -> None:
        lines.append(Expectation(phase, "all-to-all", EXPERT, count, elements, dtype, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, grouped_times(stream))):
        line(phase, f"2*{count}", f"{slots}*hidden", "tokens to experts, and outputs back")
        line(phase, count, slots, "gates of tokens", "float32")
    why = "tokens and output gradients to experts, input gradients back"
    line(LAYER_BACKWARD, stream.with_input_gradients(3), f"{slots}*hidden", why)
    line(LAYER_BACKWARD, stream.with_input_gradients(2), slots, "gates of tokens, and their gradients", "float32")
    return lines


def chunk_loads(stream: ResidualStream) -> list[Expectation]:
    """Returns the all-gathers of the expert loads of all context parallel chunks: earlier tokens fill slots first."""
    why, elements = "expert loads of each chunk of a sample", f"2*context_degree*{LOADS}"
    counts = {LAYER_FORWARD: stream.forward_times, LAYER_RECOMPUTE: grouped_times(stream), LAYER_BACKWARD: stream.times}
    return [
        Expectation(phase, "all-gather", CONTEXT, count, elements, "int32", why=why) for phase, count in counts.items()
    ]
