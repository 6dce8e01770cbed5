"""The gated delta net, sharded by heads (`mtjax.models.mixers.delta_net`).

Symbols besides those of `mtjax.analysis.parts.part`: i width of all values, heads times theirs; H heads; G groups that
share queries and keys; N width of a key; K taps of the convolution; q tokens of a chunk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import Expectation
from mtjax.analysis.parts.loop import Loop
from mtjax.analysis.parts.mamba import Mamba
from mtjax.analysis.parts.part import Product, ResidualStream, Weight, linear, weight
from mtjax.analysis.parts.sublayer import (
    local_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.config.ssm import delta_chunks_at_once, ssm_chunk, ssm_groups
from mtjax.layout.plan import Plan

DELTA_INPUTS, DELTA_OUTPUT = "delta net inputs", "delta net output"


@dataclass(frozen=True)
class DeltaNet(Mamba):
    """A norm and a gated delta net: `h (2i + 2GN + 2H) + ih + K (i + 2GN) + 2H + i/H + h` parameters."""

    @property
    def weights(self) -> list[Weight]:
        embed, heads, taps = {"embed": self.hidden}, {"heads": self.heads}, {"taps": self.model.ssm_conv}
        inner = {**heads, "head_dim": self.model.ssm_head_dim}
        shared = {"kv": 2, "groups": ssm_groups(self.model), "state": self.model.ssm_state}
        return [
            *self.norm.weights("delta", self.hidden),
            weight("delta.inputs.gate_value", {**embed, "gate": 2, **inner}),
            weight("delta.inputs.query_key", {**embed, **shared}),
            weight("delta.inputs.beta", {**embed, **heads}),
            weight("delta.inputs.rate", {**embed, **heads}),
            weight("delta.conv", {**taps, **inner}),
            weight("delta.conv_query_key", {**taps, **shared}),
            weight("delta.rate_bias", heads),
            weight("delta.a_log", heads),
            weight("delta.norm_scale", {"head_dim": self.model.ssm_head_dim}),
            *linear("delta.output", inner, embed, bias=False),
        ]

    def _width(self, tensor_degree: int) -> float:
        """Outputs of the first matmul on a rank."""
        shared = 2 * self.model.ssm_state * self._groups(tensor_degree)
        return 2 * (self.inner + self.heads) / tensor_degree + shared

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the projections, and the matmuls of the delta rule: sums of decays; products of a chunk's keys with
        each other and with queries; the inverse, what tokens write and read of the state; and from chunk to chunk, what
        they write less, read of the state and of each other, and leave in the state."""
        inner, tokens, key = self.inner / tensor_degree, self.tokens, self.model.ssm_state
        heads, chunk, pairs = self.heads / tensor_degree, ssm_chunk(self.model), self._groups(tensor_degree)
        # Two for each doubling of the blocks but the first; the backward pass has two for all of them.
        doublings = 2 * max(0, math.ceil(math.log2(chunk)) - 1)
        return [
            Product(tokens, self.hidden, self._width(tensor_degree)),
            Product(tokens, chunk, heads),
            Product(tokens, key, chunk * pairs),
            Product(tokens, key, chunk * pairs),
            Product(tokens, chunk, chunk * heads * (doublings + 2) / 3),
            Product(tokens, chunk, inner),
            Product(tokens, chunk, heads * key),
            Product(tokens, key, 2 * inner, again=True),
            Product(tokens, chunk, inner),
            Product(tokens, key, inner),
            Product(tokens, inner, self.hidden),
        ]

    def over_context(self, degree: int) -> "DeltaNet":
        assert degree == 1, "layout.hybrid refuses context parallelism"
        return self

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the first matmul's output and of the delta rule's, which is recomputed."""
        own = plan.element_bytes * plan.local_tokens(self.tokens)
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            DELTA_INPUTS: own * self._width(plan.mesh.model),
            DELTA_OUTPUT: own * self.inner / plan.mesh.model,
        }

    def loop(self, plan: Plan) -> Loop:
        """Returns the loop that passes the state from chunk to chunk."""
        chunk, key, value = ssm_chunk(self.model), self.model.ssm_state, self.model.ssm_head_dim
        batch = plan.microbatch_size * self.heads / plan.mesh.model
        reads, takes = (2 * chunk, key, value, batch), (chunk + key, chunk, value, batch)
        # The backward pass has the first again, and two gradients of each.
        return Loop(math.ceil(self.tokens / chunk), (reads, takes), (*[reads] * 3, *[takes] * 2), kernels=(9, 17))

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the matrices between the tokens of chunks and their gradients, of one state for each
        chunk, of what tokens write and read with its gradients, and of the inner width in float32."""
        degree, chunk, key = plan.mesh.model, ssm_chunk(self.model), self.model.ssm_state
        heads, tokens, inner = self.heads // degree, plan.local_tokens(self.tokens), self.inner / degree
        at_once = delta_chunks_at_once(self.model, plan.microbatch_size, heads)
        alive = min(tokens, plan.microbatch_size * at_once * chunk)
        matrices = (18 + 4 * plan.element_bytes) * alive * chunk * heads
        states = 4 * alive / chunk * inner * key
        written = 2 * alive * (4 * inner + plan.element_bytes * heads * (3 * key + chunk))
        return matrices + states + written + 12 * tokens * inner + stream_bytes(self.tokens, self.hidden, plan)

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        del plan
        return {
            "taps": self.model.ssm_conv,
            "shared_width": 2 * ssm_groups(self.model) * self.model.ssm_state,
            "value_width": self.model.ssm_head_dim,
        }

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = not stream.is_frozen
        lines = sublayer_collectives(stream, "the gated delta net", learns=learns)
        lines += vector_gradient_sums(stream, self.norm, bias=False) if stream.split else []
        if not learns:
            return lines
        lines.append(local_gradient_sums(stream, f"{stream.side}layers*value_width", "norms of the heads' values"))
        if stream.shares_groups:
            shared = f"{stream.side}layers*shared_width*(hidden + taps)"
            lines.append(local_gradient_sums(stream, shared, "queries and keys of shared groups"))
        return lines
