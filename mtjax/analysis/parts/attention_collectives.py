"""Collectives of attention between its two projections: of context parallelism, and of norms over all heads."""

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Expectation, Kind
from mtjax.analysis.parts.part import ResidualStream, over_model
from mtjax.layout.rules import CONTEXT


def width_norm_collectives(stream: ResidualStream, *, learns: bool) -> list[Expectation]:
    """Returns the all-reduces of a QK norm over all heads: of each token the sum of squares, and in the backward pass
    the sum of its gradient's products, for queries and for keys.

    The sums are saved, so that only full recompute repeats those of the forward pass.
    """
    sums, settings = "2*batch*sequence", {"dtype": "float32", "pooled": True}
    recomputed = f"{stream.side}recomputed_layers*{stream.turns}"
    back = stream.times if learns else stream.input_gradients
    why = "of queries and of keys, for their norms over all heads"
    # In programs for CPUs they are not told from adapters' sums, which may be in either phase.
    again, either = (LAYER_BACKWARD, {"also": LAYER_RECOMPUTE}) if stream.is_frozen else (LAYER_RECOMPUTE, {})
    return [
        over_model(LAYER_FORWARD, "all-reduce", stream.forward_times, sums, f"squares {why}", **settings),
        over_model(again, "all-reduce", recomputed, sums, f"squares {why}, again", **settings, **either),
        over_model(LAYER_BACKWARD, "all-reduce", back, sums, f"gradients {why}", **settings),
    ]


def context_collectives(stream: ResidualStream, *, has_narrow_values: bool = False) -> list[Expectation]:
    """Returns the collectives of context parallel self-attention, in every layer.

    A ring permutes keys and values c-1 times, and in the backward pass the float32 sums of their gradients, which one
    more hop returns to their rank in the compute dtype. Otherwise keys and values are all-gathered, and the gradients
    reduce-scattered. The backward pass needs keys and values again. `has_narrow_values`: whether these are narrower
    than keys.
    """
    if stream.across is None:
        return []
    layers, hops = f"{stream.side}layers", "(context_degree - 1)"
    recomputed = f"{stream.side}recomputed_layers*{stream.turns}"
    # XLA: the backward pass's first transfer is the recompute's last, but for layers in groups.
    sent_before = f"({stream.side}recomputed_layers - {stream.side}grouped_layers)"
    both = [(1, "rank_key_width"), (1, "rank_value_width")] if has_narrow_values else [(2, "rank_key_width")]
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, **settings: object) -> None:
        lines.append(Expectation(phase, kind, CONTEXT, count, elements, why=why, **settings))  # pyright: ignore[reportArgumentType]

    if stream.across.method == "ring":
        sent: list[tuple[int, str, str, dict[str, object]]]
        sent = [(arrays, f"batch*sequence*{width}", "keys and values", {}) for arrays, width in both]
        if stream.across.keeps_documents_apart:
            sent.append((1, "batch*sequence", "document ids of keys", {"dtype": "int32"}))
        for arrays, elements, what, settings in sent:
            permutes = f"{arrays}*{hops}" if arrays > 1 else hops
            forward, forward_permutes = stream.forward_times, permutes
            if settings:  # XLA: ids are the same in all layers, so that their first hop may be sent once
                forward_permutes, first = "(context_degree - 2)", {"pooled": True, "hoisted": True, **settings}
                line(LAYER_FORWARD, "collective-permute", forward, elements, f"{what}, first ring step", **first)
            count = f"{forward_permutes}*{forward}"
            line(LAYER_FORWARD, "collective-permute", count, elements, f"{what}, ring steps", **settings)
            count = f"{permutes}*{recomputed}"
            line(LAYER_RECOMPUTE, "collective-permute", count, elements, f"{what}, ring steps", **settings)
            count = f"{arrays}*({hops}*{layers} - {sent_before})*{stream.turns}"
            line(LAYER_BACKWARD, "collective-permute", count, elements, f"{what}, ring steps", **settings)
        why, dtype = "gradients of keys and values", "compute" if stream.across.sends_rounded else "float32"
        for arrays, width in both:
            local, count = f"batch*sequence*{width}", f"{arrays}*{hops}*{stream.times}"
            line(LAYER_BACKWARD, "collective-permute", count, local, f"{why}, ring steps", dtype=dtype)
            line(LAYER_BACKWARD, "collective-permute", f"{arrays}*{stream.times}", local, f"{why}, back to their rank")
        return lines
    why, count = "gradients of keys and values", f"({layers} - {sent_before})*{stream.turns}"
    for arrays, width in both:
        every = f"context_degree*batch*sequence*{width}"
        line(LAYER_FORWARD, "all-gather", f"{arrays}*{stream.forward_times}", every, "keys and values")
        line(LAYER_RECOMPUTE, "all-gather", f"{arrays}*{recomputed}", every, "keys and values")
        line(LAYER_BACKWARD, "all-gather", f"{arrays}*{count}", every, "keys and values")
        line(LAYER_BACKWARD, "reduce-scatter", f"{arrays}*{stream.times}", every, why, dtype="float32")
    if stream.across.keeps_documents_apart:
        elements, why = "context_degree*batch*sequence", "document ids of keys, the same for all layers"
        settings = {"dtype": "int32", "pooled": True, "hoisted": True, "also": LAYER_RECOMPUTE}
        line(LAYER_FORWARD, "all-gather", f"3*{stream.times}", elements, why, **settings)
    return lines
