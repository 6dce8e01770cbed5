"""Experts in the place of the MLP: a router sends each token to some of many (arXiv 1701.06538, 2006.16668).

Symbols beside those of `mtjax.theory.parts.part`: E experts, k that a token goes to, f the inner width of one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.config import Model
from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Dtype, Expectation, Kind
from mtjax.theory.parts.mlp import MLP
from mtjax.theory.parts.part import Elementwise, Part, Product, ResidualStream, Weight, linear, norm, over_model, weight
from mtjax.theory.parts.sublayer import own_token_sums, own_vector_sums, sublayer_keeps, sublayer_sends
from mtjax.theory.plan import Plan
from mtjax.theory.rules import CONTEXT, EXPERT


@dataclass(frozen=True)
class Experts(Part):
    """A norm, a router, experts - each an MLP without biases - and perhaps one more that every token goes to."""

    hidden: int
    tokens: int
    """Of a sample."""
    count: int
    """E: experts."""
    top_k: int
    """k: experts that a token goes to."""
    inner: int
    """f: inner width of an expert."""
    is_gated: bool
    norm: str
    router_bias: bool = False
    """Whether a bias of each expert's own takes part in choosing."""
    shared: int = 0
    """Inner width of the expert that every token goes to; 0 without one."""
    capacity: int | None = None
    """Tokens of a sample that an expert takes at most; None where it takes all that come."""
    balances: bool = True
    """Whether there is a loss by the mean load of a sample."""

    @property
    def inputs(self) -> int:
        """g: projections into the inner width."""
        return 2 if self.is_gated else 1

    @property
    def shared_expert(self) -> MLP | None:
        """The expert that every token goes to, as the MLP that it is; its norm is that of all experts."""
        if not self.shared:
            return None
        return MLP(self.hidden, self.tokens, self.shared, self.is_gated, self.norm, bias=False)

    @property
    def weights(self) -> list[Weight]:
        experts, embed, inner = {"expert": self.count}, {"embed": self.hidden}, {"mlp": self.inner}
        gate = {"gate": 2} if self.is_gated else {}
        found = [
            *norm("experts_norm", self.norm, self.hidden),
            weight("experts.router.weight", {**embed, "routes": self.count}),
            weight("experts.up.weight", {**experts, **embed, **gate, **inner}),
            weight("experts.down.weight", {**experts, **inner, **embed}),
        ]
        if self.router_bias:
            found.append(weight("experts.router.bias", {"routes": self.count}))
        if self.shared:
            found += linear("experts.shared.up", embed, {**gate, "mlp": self.shared}, bias=False)
            found += linear("experts.shared.down", {"mlp": self.shared}, embed, bias=False)
        return found

    @property
    def elementwise(self) -> Elementwise:
        """The experts' inner widths are gone over as often as a token has experts."""
        shared = self.shared_expert.elementwise.mlp if self.shared_expert else 0
        return Elementwise(stream=self.tokens * self.hidden, mlp=self.tokens * self.top_k * self.inner + shared)

    def products(self, model_ways: int = 1) -> list[Product]:
        """Experts' backward pass computes again what is f wide, and needs no other result."""
        inner, rows = self.inner / model_ways, self.tokens * self.top_k
        if self.capacity is not None:
            rows = min(rows, self.count * self.capacity)
        return [
            Product(self.tokens, self.hidden, self.count, is_repeated=True),
            Product(rows, self.hidden, self.inputs * inner, experts=self.count, again=True),
            Product(rows, inner, self.hidden, experts=self.count),
            *(self.shared_expert.products(model_ways) if self.shared_expert else []),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """The router's logits, float32; nothing that is f wide, but of the shared expert."""
        tokens = plan.local_tokens(self.tokens) / (plan.mesh.model if plan.sequence_parallel else 1)
        shared = {"MLP": self.shared_expert.saved_bytes(plan)["MLP"]} if self.shared_expert else {}
        return {**sublayer_keeps(self.tokens, self.hidden, plan), "routers' logits": 4 * tokens * self.count, **shared}

    def backward_peak_bytes(self, plan: Plan) -> float:
        """What all ranks over which experts are spread read, the gradient of the result, and float32 sums of the
        gradients of both the former and the experts here; in an exchange also what leaves, and its gradients."""
        ways, own = plan.mesh.expert, plan.local_tokens(self.tokens) * self.hidden
        everyone, leaving = ways * own, 0.0
        if self.capacity is not None:
            everyone = plan.microbatch_size * self.count * self._places(plan) * self.hidden
        elif plan.expert_dispatch == "all-to-all" and ways > 1:
            leaving = min(self.top_k, ways) * own
        matrices = self.count / ways * (self.inputs + 1) * self.hidden * self.inner / plan.mesh.model
        shared = self.shared_expert.backward_peak_bytes(plan) if self.shared_expert else 0.0
        return max((2 * plan.element_bytes + 4) * everyone + 2 * plan.element_bytes * leaving + 4 * matrices, shared)

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        return {"top_k": self.top_k, "num_experts": self.count, "capacity": self._places(plan)}

    def over_context(self, ways: int) -> "Experts":
        """Each of these ranks has as many places as an expert takes of a sample, or as it has tokens."""
        if self.capacity is None:
            return self
        return replace(self, capacity=ways * rank_places(self.capacity, self.tokens, ways))

    def _places(self, plan: Plan) -> int:
        return 0 if self.capacity is None else rank_places(self.capacity, self.tokens, plan.mesh.context)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """What a sublayer sends over the model ways, and what tokens and experts of other ranks have to say."""
        lines = split_sends(stream) if stream.split else whole_sends(stream)
        lines += mean_loads(stream) if self.balances else []
        if stream.across and (self.balances or self.capacity is not None):
            lines += shared_loads(stream, again=self.balances)
        if stream.split:
            lines += sublayer_sends(stream, "the shared expert") if self.shared else []
            lines += own_vector_sums(stream, self.norm, bias=False)
            lines.append(own_token_sums(stream, f"{stream.side}layers*hidden*num_experts", "routers"))
        if self.capacity is not None:
            return [*lines, *places(stream), *(loads_before(stream) if stream.across else [])]
        return [*lines, *(exchanges(stream) if stream.expert_dispatch == "all-to-all" else gathers(stream))]


ROUTES = "batch*sequence*top_k"
"""Numbers of a microbatch's experts, and how much each counts."""
EVERY = "expert_ways*batch*sequence*hidden"
"""Tokens of all ranks over which experts are spread."""
LOADS = "batch*num_experts"
"""Of a microbatch's samples, a number for each expert."""


def whole_sends(stream: ResidualStream) -> list[Expectation]:
    """As any sublayer - a shared expert's sums go with the others' - and what ranks' parts of experts say of routes."""
    why = "gradients of how much tokens' experts count"
    line = over_model(LAYER_BACKWARD, "all-reduce", stream.times, ROUTES, why, dtype="float32")
    return [*sublayer_sends(stream, "the experts"), line]


def split_sends(stream: ResidualStream) -> list[Expectation]:
    """Where sequences are split: as any sublayer, but that tokens are gathered by the backward pass itself; and with
    them where they go. Routers know a sample's mean load."""
    times = stream.times
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = "compute") -> None:
        lines.append(over_model(phase, kind, count, elements, why, dtype=dtype))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, _grouped(stream))):
        line(phase, "all-gather", count, stream.elements, "before the experts")
        line(phase, "reduce-scatter", count, stream.elements, "after the experts")
    line(LAYER_BACKWARD, "all-gather", f"2*{times}", stream.elements, "before the experts, and gradients behind them")
    line(LAYER_BACKWARD, "reduce-scatter", times, stream.elements, "gradient of what the experts gathered")
    for phase, count in (
        (LAYER_FORWARD, stream.forward_times),
        (LAYER_RECOMPUTE, _grouped(stream)),
        (LAYER_BACKWARD, times),
    ):
        line(phase, "all-gather", count, ROUTES, "how much tokens' experts count", "float32")
        line(phase, "all-gather", count, ROUTES, "which experts tokens go to", "int32")
    line(LAYER_BACKWARD, "reduce-scatter", times, ROUTES, "gradients of how much tokens' experts count", "float32")
    line(LAYER_FORWARD, "all-reduce", times, LOADS, "a sample's load", "float32")
    return lines


def mean_loads(stream: ResidualStream) -> list[Expectation]:
    """What the loss that balances loads adds up: the load of all tokens of a sample, and their scores."""
    if not stream.split:
        return []
    why = "a sample's scores, and its load again"
    return [
        over_model(phase, "all-reduce", stream.times, LOADS, why, dtype="float32")
        for phase in (LAYER_FORWARD, LAYER_RECOMPUTE)
    ]


def shared_loads(stream: ResidualStream, *, again: bool) -> list[Expectation]:
    """What the ranks that share a sample add up: what each expert is to take of it; `again` where a loss reads that."""
    why = "a sample's load, of all ranks that share it"
    return [
        Expectation(phase, "all-reduce", CONTEXT, stream.times, LOADS, "float32", why=why)
        for phase in (LAYER_FORWARD, *([LAYER_RECOMPUTE] if again else []))
    ]


def _grouped(stream: ResidualStream) -> str:
    """How often layers that are computed again in groups are so."""
    return f"{stream.side}grouped_layers*{stream.turns}"


def gathers(stream: ResidualStream) -> list[Expectation]:
    """What goes over `expert`: every rank has all ranks' tokens from a gather, and scatters what its experts say.

    The backward pass gathers tokens and the gradients of results, and scatters the gradients of tokens; what a layer
    that is computed again would send first, nobody needs, but in a group of layers.
    """
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, why: str) -> None:
        lines.append(Expectation(phase, kind, EXPERT, count, EVERY, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, _grouped(stream))):
        line(phase, "all-gather", count, "tokens for the experts of all ranks")
        line(phase, "reduce-scatter", count, "what experts say of them")
    line(LAYER_BACKWARD, "all-gather", f"2*{stream.times}", "tokens, and gradients of what experts said")
    line(LAYER_BACKWARD, "reduce-scatter", stream.times, "gradients of tokens")
    return [*lines, *_gathered_routes(stream)]


def exchanges(stream: ResidualStream) -> list[Expectation]:
    """What goes over `expert` where tokens go to those ranks alone whose experts they need: there and back, in arrays
    with room for all. Every rank knows of all tokens where they go. The backward pass sends tokens once more, and
    gradients of results there and of tokens back."""
    lines: list[Expectation] = []

    def line(phase: str, count: str, why: str) -> None:
        sent = "exchanged_tokens*hidden"
        lines.append(Expectation(phase, "ragged-all-to-all", EXPERT, count, EVERY, sent=sent, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, _grouped(stream))):
        line(phase, f"2*{count}", "tokens to their experts, and what these say back")
    line(LAYER_BACKWARD, f"3*{stream.times}", "tokens, gradients of what experts said, of tokens")
    return [*lines, *_gathered_routes(stream)]


def _gathered_routes(stream: ResidualStream) -> list[Expectation]:
    """All ranks' numbers of experts, and how much each counts; without which no rank knows what to do with a token."""
    routes, lines = f"expert_ways*{ROUTES}", []

    def line(phase: str, kind: Kind, count: str, why: str, dtype: Dtype) -> None:
        lines.append(Expectation(phase, kind, EXPERT, count, routes, dtype, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, _grouped(stream))):
        line(phase, "all-gather", count, "how much each of tokens' experts counts", "float32")
        line(phase, "all-gather", count, "and which these are", "int32")
    line(LAYER_BACKWARD, "all-gather", stream.times, "how much each counts, once more", "float32")
    line(LAYER_BACKWARD, "all-gather", stream.times, "and which, once more", "int32")
    line(LAYER_BACKWARD, "reduce-scatter", stream.times, "gradients of how much each counts", "float32")
    return lines


def exchanged_share(model: Model, ways: int) -> float:
    """Of `ways` ranks with experts of their own, the share that a token goes to, if all choices are as likely.

    It chooses k of the experts of the groups that are kept, and misses n of these N with a chance of C(N-n, k) /
    C(N, k). A rank has one or several groups, or a part of one.
    """
    count, chosen, groups, kept = model.num_experts, model.experts_top_k, model.expert_groups, model.expert_groups_top_k
    own, pool = max(1, groups // ways), kept * count // groups
    each, share = count // ways // own, 0.0
    for n in range(max(0, kept + own - groups), min(own, kept) + 1):
        have = math.comb(own, n) * math.comb(groups - own, kept - n) / math.comb(groups, kept)
        share += have * (1 - math.comb(pool - n * each, chosen) / math.comb(pool, chosen))
    return share


def exchanged_tokens(model: Model, plan: Plan) -> int:
    """Tokens of a microbatch that a rank is expected to send, as often as a token has ranks to go to, its own among
    them."""
    ways = plan.mesh.expert
    return round(ways * exchanged_share(model, ways) * plan.local_tokens(model.sequence_length))


def rank_places(capacity: int, tokens: int, ways: int) -> int:
    """Places for an expert on each of the ranks that share a sample of so many tokens: as many as an expert takes, or
    as the rank has tokens, if these are fewer."""
    return min(capacity, tokens // ways)


def places(stream: ResidualStream) -> list[Expectation]:
    """What goes over `expert` where every expert has so many places for each sample: places to the experts' ranks, and
    back. The backward pass sends tokens once more, gradients of results there, and those of tokens back."""
    room, lines = "batch*num_experts*capacity", []

    def line(phase: str, count: str, elements: str, why: str, dtype: Dtype = "compute") -> None:
        lines.append(Expectation(phase, "all-to-all", EXPERT, count, elements, dtype, why=why))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, _grouped(stream))):
        line(phase, f"2*{count}", f"{room}*hidden", "tokens to experts, and what these say back")
        line(phase, count, room, "how much each counts", "float32")
    line(LAYER_BACKWARD, f"3*{stream.times}", f"{room}*hidden", "tokens, gradients of what experts said, of tokens")
    line(LAYER_BACKWARD, f"2*{stream.times}", room, "how much each counts, and its gradients", "float32")
    return lines


def loads_before(stream: ResidualStream) -> list[Expectation]:
    """What ranks that share a sample tell each other: how many tokens of each of their chunks want which expert."""
    why, elements = "how many tokens of each chunk go to which expert", f"2*context_ways*{LOADS}"
    counts = {LAYER_FORWARD: stream.forward_times, LAYER_RECOMPUTE: _grouped(stream), LAYER_BACKWARD: stream.times}
    return [
        Expectation(phase, "all-gather", CONTEXT, count, elements, "int32", why=why) for phase, count in counts.items()
    ]
