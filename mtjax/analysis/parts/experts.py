"""Mixture of experts in place of the MLP: a router sends each token to its top k (arXiv 1701.06538, 2006.16668).

Symbols in addition to those of `mtjax.analysis.parts.part`: E experts, k experts per token, f the inner width of one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import (
    GRADIENTS,
    JOINED,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_RECOMPUTE,
    Dtype,
    Expectation,
    Kind,
)
from mtjax.analysis.parts.expert_dispatch import (
    LOADS,
    ROUTES,
    all_gather_dispatch,
    all_to_all_dispatch,
    capacity_dispatch,
    chunk_loads,
    grouped_times,
)
from mtjax.analysis.parts.mlp import MLPPart
from mtjax.analysis.parts.part import (
    Elementwise,
    Norms,
    Part,
    Product,
    ResidualStream,
    Weight,
    linear,
    over_model,
    weight,
    weights_of,
)
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    local_gradient_sums,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.config import Model
from mtjax.layout.plan import Plan
from mtjax.layout.rules import CONTEXT
from mtjax.layout.weights import expert_biases, expert_products, mlp_products, router_weights, shared_gate


@dataclass(frozen=True)
class ExpertsPart(Part):
    """A norm, a router, experts - each an MLP - and optionally a shared expert."""

    hidden: int
    tokens: int
    """Of a sample."""
    count: int
    """E: experts."""
    top_k: int
    """k: experts per token."""
    inner: int
    """f: inner width of an expert."""
    is_gated: bool
    norm: Norms
    router_bias: bool = False
    """Whether the top k are chosen by scores plus a bias per expert."""
    router_linear_bias: bool = False
    """Whether the router's logits have a trained bias."""
    bias: bool = False
    """Whether the experts' linear layers have biases."""
    shared: int = 0
    """Inner width of the shared expert, which processes every token; 0 without one."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a gate, a number per token."""
    capacity: int | None = None
    """Most tokens of a sample per expert; None drops no tokens."""
    balances: bool = True
    """Whether there is a load-balancing loss, by the mean load over a sample."""
    rank: int = 0
    """Of LoRA adapters, one for each expert; 0 without any."""
    is_frozen: bool = False
    """Whether experts have no gradients, but for their adapters."""

    @property
    def inputs(self) -> int:
        """g: projections into the inner width."""
        return 2 if self.is_gated else 1

    @property
    def shared_expert(self) -> MLPPart | None:
        """The shared expert as an MLP; its norm is the experts'."""
        if not self.shared:
            return None
        return MLPPart(self.hidden, self.tokens, self.shared, self.is_gated, self.norm, bias=False, rank=self.rank)

    @property
    def weights(self) -> list[Weight]:
        sizes = expert_products(self.hidden, self.inner, self.count, is_gated=self.is_gated)
        weights = self.norm.weights("experts", self.hidden)
        biases = {"bias": self.router_bias, "linear_bias": self.router_linear_bias}
        weights += weights_of(router_weights(self.hidden, self.count, **biases), "experts.router.")
        for name, each in sizes.items():
            weights += linear(f"experts.{name}", *each, bias=False, rank=self.rank)
        if self.bias:
            weights += [weight(f"experts.{name}.bias", bias) for name, bias in expert_biases(sizes).items()]
        if self.shared_gate:
            weights.append(weight("experts.shared_gate.weight", shared_gate(self.hidden)))
        shared = mlp_products(self.hidden, self.shared, is_gated=self.is_gated) if self.shared else {}
        for name, each in shared.items():
            weights += linear(f"experts.shared.{name}", *each, bias=False, rank=self.rank)
        return weights

    @property
    def elementwise(self) -> Elementwise:
        """Elements of element-wise kernels: k inner widths per token, and the shared expert's."""
        shared = self.shared_expert.elementwise.mlp if self.shared_expert else 0
        return Elementwise(stream=self.tokens * self.hidden, mlp=self.tokens * self.top_k * self.inner + shared)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the matmuls of router, experts and shared expert."""
        # The first of the experts' matmuls is recomputed in their backward pass, which reads no other result.
        inner, rows = self.inner / tensor_degree, self.tokens * self.top_k
        if self.capacity is not None:
            # Tokens beyond an expert's capacity are dropped.
            rows = min(rows, self.count * self.capacity)
        return [
            *self._adapter_products(rows, inner),
            Product(self.tokens, self.hidden, self.count, is_repeated=True, is_wide=True, reads_input=True),
            Product(rows, self.hidden, self.inputs * inner, experts=self.count, again=True, reads_input=True),
            Product(rows, inner, self.hidden, experts=self.count),
            *([self._biases] if self.bias else []),
            *(self.shared_expert.products(tensor_degree) if self.shared_expert else []),
        ]

    @property
    def _biases(self) -> Product:
        """The matmul of gates with biases."""
        return Product(self.tokens, self.count, self.hidden, is_repeated=True, is_output=True, is_wide=True)

    def _adapter_products(self, rows: float, inner: float) -> list[Product]:
        """Returns the matmuls of the experts' adapters. Their backward pass recomputes all but the last."""
        if not self.rank:
            return []
        sizes = (
            *((self.hidden, self.inputs * self.rank), (self.rank, self.inputs * inner)),
            *((inner, self.rank), (self.rank, self.hidden)),
        )
        one = Product(rows, 0, 0, is_adapter=True, experts=self.count)
        return [replace(one, inner=n, outer=m, again=i < 3, reads_input=i == 0) for i, (n, m) in enumerate(sizes)]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the router's float32 logits and the shared expert's activations."""
        tokens = plan.local_tokens(self.tokens) / (plan.mesh.model if plan.sequence_parallel else 1)
        of_shared = self.shared_expert.saved_bytes(plan) if self.shared_expert else {}
        shared = {name: of_shared[name] for name in ("MLP", "adapters") if name in of_shared}
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            "routers' logits": 4 * tokens * (self.count + self.shared_gate),
            **shared,
        }

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the tokens dispatched to a rank's experts, their output gradients, and float32 sums of
        the gradients of tokens and matrices; with all-to-all also of the tokens sent, and their gradients."""
        degree, local = plan.mesh.expert, plan.local_tokens(self.tokens) * self.hidden
        received, sent = degree * local, 0.0
        if self.capacity is not None:
            received = plan.microbatch_size * self.count * self._rank_capacity(plan) * self.hidden
        elif plan.expert_dispatch == "all-to-all" and degree > 1:
            sent = min(self.top_k, degree) * local
        inner = self.inner / plan.mesh.model
        matrices = self.count / degree * (self.inputs + 1) * self.hidden * inner
        if self.is_frozen:
            # Frozen experts have sums of their adapters' gradients only.
            matrices = self.count / degree * self.rank * (self.inputs + 1) * (self.hidden + inner)
        shared = self.shared_expert.backward_peak_bytes(plan) if self.shared_expert else 0.0
        return max((2 * plan.element_bytes + 4) * received + 2 * plan.element_bytes * sent + 4 * matrices, shared)

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        experts = {"num_experts": self.count, "rank_experts": self.count // plan.mesh.expert}
        return {"top_k": self.top_k, **experts, "capacity": self._rank_capacity(plan)}

    def over_context(self, degree: int) -> "ExpertsPart":
        """Returns the experts with the slots of all context parallel ranks: each has slots for an expert's capacity of
        the entire sample, or for all its tokens."""
        if self.capacity is None:
            return self
        return replace(self, capacity=degree * rank_capacity(self.capacity, self.tokens, degree))

    def _rank_capacity(self, plan: Plan) -> int:
        """Returns an expert's slots for a sample on a context parallel rank; 0 without a capacity."""
        return 0 if self.capacity is None else rank_capacity(self.capacity, self.tokens, plan.mesh.context)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the collectives of the sublayer, of loads, and of the dispatch over `expert`."""
        lines = sequence_parallel_collectives(stream) if stream.split else tensor_collectives(stream)
        lines += mean_loads(stream) if self.balances else []
        if stream.across and (self.balances or self.capacity is not None):
            lines += context_loads(stream, recomputed=self.balances)
        if self.rank:
            elements, why = f"rank_experts*rank*{self.inputs + 1}*hidden", "gradients of replicated parts of adapters"
            settings = {"pooled": True, "also": LAYER_RECOMPUTE}
            lines.append(over_model(LAYER_BACKWARD, "all-reduce", stream.times, elements, why, **settings))
        learns = self.rank > 0 or not self.is_frozen
        if self.shared:
            # XLA: with adapters between them, or on CPUs, it does not add the shared expert's sums to the experts'.
            is_apart = stream.split or self.rank > 0 or not stream.joins_shared
            lines += sublayer_collectives(stream, "the shared expert", learns=learns) if is_apart else []
            lines += adapter_collectives(stream, "the shared expert", self.inputs, self.rank)
        if stream.split:
            lines += vector_gradient_sums(stream, self.norm, bias=False)
            lines += [] if self.is_frozen else self._router_gradient_sums(stream)
        if self.shared_gate:
            lines += shared_gate_collectives(stream)
        if self.capacity is not None:
            return [*lines, *capacity_dispatch(stream), *(chunk_loads(stream) if stream.across else [])]
        is_exchanged = stream.expert_dispatch == "all-to-all"
        return [*lines, *(all_to_all_dispatch(stream) if is_exchanged else all_gather_dispatch(stream))]

    def _router_gradient_sums(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the all-reduces of the gradients of routers and of what else reads or adds to a rank's tokens."""
        sums = {
            "hidden*num_experts": "routers",
            "num_experts": "routers' trained biases" if self.router_linear_bias else "",
            "num_experts*hidden": "experts' biases" if self.bias else "",
            "hidden": "gates of shared experts" if self.shared_gate else "",
        }
        return [local_gradient_sums(stream, f"{stream.side}layers*{size}", why) for size, why in sums.items() if why]


def tensor_collectives(stream: ResidualStream) -> list[Expectation]:
    """Returns a sublayer's collectives without sequence parallelism, and the all-reduce of the gates' gradients."""
    # XLA: on GPUs, it adds a shared expert's output to the experts' before the all-reduce.
    times, why = stream.input_gradients, "gradients of gates"
    line = over_model(LAYER_BACKWARD, "all-reduce", times, ROUTES, why, dtype="float32")
    return [*sublayer_collectives(stream, "the experts"), line]


def sequence_parallel_collectives(stream: ResidualStream) -> list[Expectation]:
    """Returns a sublayer's collectives with sequence parallelism, and those of expert indices, gates and loads.

    The experts' backward pass gathers tokens itself, so that there is no recompute of the all-gather.
    """
    times = stream.times
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = "compute") -> None:
        lines.append(over_model(phase, kind, count, elements, why, dtype=dtype))

    for phase, count in ((LAYER_FORWARD, stream.forward_times), (LAYER_RECOMPUTE, grouped_times(stream))):
        line(phase, "all-gather", count, stream.elements, "before the experts")
        line(phase, "reduce-scatter", count, stream.elements, "after the experts")
    line(LAYER_BACKWARD, "all-gather", f"2*{times}", stream.elements, "before the experts, and their output gradient")
    line(LAYER_BACKWARD, "reduce-scatter", stream.input_gradients, stream.elements, "input gradient of the experts")
    for phase, count in (
        (LAYER_FORWARD, stream.forward_times),
        (LAYER_RECOMPUTE, grouped_times(stream)),
        (LAYER_BACKWARD, times),
    ):
        line(phase, "all-gather", count, ROUTES, "gates of tokens", "float32")
        line(phase, "all-gather", count, ROUTES, "expert indices of tokens", "int32")
    line(LAYER_BACKWARD, "reduce-scatter", stream.input_gradients, ROUTES, "gradients of gates", "float32")
    line(LAYER_FORWARD, "all-reduce", times, LOADS, "expert loads of a sample", "float32")
    return lines


def shared_gate_collectives(stream: ResidualStream) -> list[Expectation]:
    """Returns the collectives of the shared expert's gate, which multiplies its inner layer: before the row-parallel
    matmul, so that the sum of both outputs is still reduced at once."""
    elements, why = "batch*sequence", "gates of the shared expert"
    if not stream.split:
        return [
            over_model(LAYER_BACKWARD, "all-reduce", stream.times, elements, f"gradients of {why}", dtype="float32")
        ]
    again = f"({stream.side}layers + {stream.side}grouped_layers)*{stream.turns}"
    return [
        over_model(LAYER_FORWARD, "all-gather", stream.forward_times, elements, why, dtype="float32"),
        over_model(LAYER_RECOMPUTE, "all-gather", again, elements, why, dtype="float32"),
        over_model(LAYER_BACKWARD, "reduce-scatter", stream.times, elements, f"gradients of {why}", dtype="float32"),
    ]


def mean_loads(stream: ResidualStream) -> list[Expectation]:
    """Returns the all-reduces of the load-balancing loss with sequence parallelism: loads and scores of a sample."""
    if not stream.split:
        return []
    why = "router scores of a sample, and its expert loads"
    return [
        over_model(phase, "all-reduce", stream.times, LOADS, why, dtype="float32")
        for phase in (LAYER_FORWARD, LAYER_RECOMPUTE)
    ]


def load_line(axes: list[str]) -> Expectation:
    """Returns the collective that sums the tokens of each expert of each layer, over all ranks' samples and all stages'
    layers."""
    every, why = "routers*num_experts", "the load of each layer's experts, once a step"
    return Expectation(GRADIENTS, "all-reduce", JOINED.join(axes), "1", every, "float32", pooled=True, why=why)


def context_loads(stream: ResidualStream, *, recomputed: bool) -> list[Expectation]:
    """Returns the all-reduces of a sample's expert loads over context parallel ranks.

    Args:
      stream: that the router reads.
      recomputed: whether the recompute of a layer needs them too: where a load-balancing loss reads them.
    """
    why = "expert loads of a sample, over context parallel ranks"
    return [
        Expectation(phase, "all-reduce", CONTEXT, stream.times, LOADS, "float32", why=why)
        for phase in (LAYER_FORWARD, *([LAYER_RECOMPUTE] if recomputed else []))
    ]


def exchanged_share(model: Model, degree: int) -> float:
    """Returns the expected share of `degree` expert parallel ranks that a token is sent to, all choices equally likely.

    A token chooses k of the N experts in its top groups, and misses n of them with probability C(N-n, k) / C(N, k).
    """
    count, top_k, groups = model.num_experts, model.experts_top_k, model.expert_groups
    top_groups = model.expert_groups_top_k
    # A rank has one or several groups, or a fraction of one.
    rank_groups, pool = max(1, groups // degree), top_groups * count // groups
    group_experts, share = count // degree // rank_groups, 0.0
    for n in range(max(0, top_groups + rank_groups - groups), min(rank_groups, top_groups) + 1):
        # Hypergeometric: n of the rank's groups are among the token's top groups.
        chance = math.comb(rank_groups, n) * math.comb(groups - rank_groups, top_groups - n)
        chance /= math.comb(groups, top_groups)
        share += chance * (1 - math.comb(pool - n * group_experts, top_k) / math.comb(pool, top_k))
    return share


def exchanged_tokens(model: Model, plan: Plan) -> int:
    """Returns the expected number of tokens that a rank sends per microbatch, once for each receiving rank (itself
    included)."""
    degree = plan.mesh.expert
    return round(degree * exchanged_share(model, degree) * plan.local_tokens(model.sequence_length))


def rank_capacity(capacity: int, tokens: int, degree: int) -> int:
    """Returns an expert's slots for a sample of `tokens` on each of `degree` context parallel ranks: its capacity, or
    the rank's tokens if these are fewer."""
    return min(capacity, tokens // degree)
