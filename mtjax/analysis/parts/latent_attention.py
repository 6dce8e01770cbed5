"""Multi-head latent attention (MLA; arXiv 2405.04434, section 2.1), sharded by heads.

Symbols in addition to those of `mtjax.analysis.parts.part`: c and r the widths of the latent and of the rotated key, d
the width of the queries' latent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Expectation
from mtjax.analysis.parts.attention import (
    ATTENTION_OUTPUT,
    PROBABILITIES,
    QUERY_KEY_VALUE,
    STATISTICS,
    gradient_bytes,
    probability_bytes,
    statistics_bytes,
)
from mtjax.analysis.parts.attention_collectives import context_collectives
from mtjax.analysis.parts.part import (
    Elementwise,
    Norms,
    Part,
    Product,
    ResidualStream,
    Scores,
    Weight,
    linear,
    over_model,
    weight,
)
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    matrix_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.layout.plan import Plan
from mtjax.layout.weights import latent_products

LATENTS = "latents"
"""The kind of saved activations: products of hidden states with the matrices to the latents."""

OF_INPUT = {
    *((LAYER_FORWARD, "all-gather"), (LAYER_RECOMPUTE, "all-gather")),
    *((LAYER_BACKWARD, "all-reduce"), (LAYER_BACKWARD, "reduce-scatter")),
}
"""Collectives of a sublayer's input, where a column-parallel matmul reads it."""


@dataclass(frozen=True)
class LatentAttentionPart(Part):
    """A norm and multi-head latent attention."""

    hidden: int
    tokens: int
    """Of a sample."""
    heads: int
    latent: int
    """c: width of the latent of keys and values."""
    query_latent: int
    """d: width of the latent of queries; 0 for queries from the hidden states."""
    still: int
    """Width of the part of a query and key head that is not rotated."""
    rotated: int
    """r: width of the part that is rotated, with one key for all heads."""
    value: int
    """Width of a value head."""
    norm: Norms
    is_causal: bool
    is_capped: bool = False
    """Whether scores have a cap."""
    visible: float = 0.5
    """Share of the scores that a causal model needs, in the mean of its layers."""
    rank: int = 0
    """Of LoRA adapters; 0 without any."""

    @property
    def query_size(self) -> int:
        """q: width of all query heads together, and of all key heads."""
        return self.heads * (self.still + self.rotated)

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.heads * self.value

    @property
    def latents(self) -> int:
        """Width of all latents of a token, and of its rotated key."""
        return self.query_latent + self.latent + self.rotated

    @property
    def weights(self) -> list[Weight]:
        widths = {"still": self.still, "rotated": self.rotated, "value": self.value}
        latents = {"latent": self.latent, "query_latent": self.query_latent}
        weights = self.norm.weights("attention", self.hidden)
        for name, sizes in latent_products(self.hidden, self.heads, **latents, **widths).items():
            # A latent is normalized before the product that reads it, so that the norm has the product's inputs.
            if name.endswith("_up"):
                weights.append(weight(f"attention.{name.removesuffix('_up')}_norm.scale", sizes.inputs))
            weights += linear(f"attention.{name}", *sizes, bias=False, rank=self.rank)
        return weights

    @property
    def scores(self) -> Scores:
        width = self.still + self.rotated
        return Scores(
            heads=self.heads,
            queries=self.tokens,
            keys=self.tokens,
            width=width,
            is_causal=self.is_causal,
            groups=self.heads,
            is_capped=self.is_capped,
            visible=self.visible,
            narrower=width - self.value,
        )

    @property
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=self.tokens * self.hidden, inside=self.tokens * self.query_size)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the matmuls; those to the latents are repeated on every rank."""
        query, value = self.query_size / tensor_degree, self.value_size / tensor_degree
        queries = [Product(self.tokens, self.query_latent or self.hidden, query, reads_input=not self.query_latent)]
        if self.query_latent:
            queries.insert(0, Product(self.tokens, self.hidden, self.query_latent, is_repeated=True, reads_input=True))
        products = [
            *queries,
            Product(self.tokens, self.hidden, self.latent + self.rotated, is_repeated=True, reads_input=True),
            Product(self.tokens, self.latent, self.heads * self.still / tensor_degree + value),
            Product(self.tokens, value, self.hidden),
        ]
        adapters = [adapter for product in products for adapter in product.adapter(self.rank)]
        return [*adapters[:-1], *(replace(last, is_output=True) for last in adapters[-1:]), *products]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the products' results and of probabilities; Megatron's kernels also save the normalized
        latents and the keys of all heads."""
        c, tokens = plan.element_bytes, plan.local_tokens(self.tokens)
        heads = self.query_size + self.heads * self.still + self.value_size
        latents = self.latents
        if plan.residuals != "jax":
            heads, latents = heads + self.query_size, latents + self.query_latent + self.latent
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: c * tokens * heads / plan.mesh.model,
            LATENTS: c * tokens * latents / (plan.mesh.model if plan.sequence_parallel else 1),
            ATTENTION_OUTPUT: c * tokens * self.value_size / plan.mesh.model,
            PROBABILITIES: probability_bytes(self.scores, plan),
            STATISTICS: statistics_bytes(self.scores, plan),
            **self._adapter_bytes(plan),
        }

    def _adapter_bytes(self, plan: Plan) -> dict[str, float]:
        """Returns the bytes that LoRA adapters save; with sequence parallelism, of those to the latents only a rank's
        tokens."""
        ways = plan.mesh.model if plan.sequence_parallel else 1
        downs = 2 if self.query_latent else 1
        reads = self.hidden / ways + (self.query_latent or self.hidden) + self.latent
        reads += self.value_size / plan.tensor_degree
        return adapter_saved_bytes(self.rank, 3 + downs / ways, reads, self.tokens, plan)

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the keys of all heads and their gradient, and those of ordinary attention: gradients of
        scores, or of queries and values where these are not materialized, and gathered latents with their gradient."""
        # Keys of all heads are put together from latents and the rotated key they share, and so are their gradients.
        widths = 2 * self.query_size
        if not plan.keeps_scores and not plan.context_parallelism:
            widths += self.query_size + self.value_size
        keys = plan.element_bytes * plan.local_tokens(self.tokens) * widths / plan.mesh.model
        gathered = stream_bytes(self.tokens, self.latents, plan) if plan.sequence_parallel else 0.0
        return keys + 2 * gathered + gradient_bytes(self.scores, plan)

    def kv_elements(self, context: int) -> int:
        return (self.latent + self.rotated) * context

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        del plan
        return {"latent": self.latent, "rotated_width": self.rotated, "query_latent": self.query_latent}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sublayer's collectives, with those of the latents in place of its input's.

        Heads read entire latents, so that each rank has a part of their gradients. With sequence parallelism the
        latents of a rank's tokens are all-gathered, and their gradients reduce-scattered; the matrices to the latents
        have then gradients from a rank's tokens only.
        """
        read = [("latent", "latents of keys and values"), ("rotated_width", "rotated keys")]
        if self.query_latent:
            read.append(("query_latent", "latents of queries"))
        learns = self.rank > 0 or not stream.is_frozen
        lines = sublayer_collectives(stream, "attention", learns=learns)
        if self.query_latent:
            lines = [line for line in lines if (line.phase, line.kind) not in OF_INPUT]
        is_narrow = self.value != self.still + self.rotated
        lines += context_collectives(stream, has_narrow_values=is_narrow)
        # The gathered latents are not saved: gradients of weights need them again, a frozen sublayer only the
        # recompute.
        layers = f"{stream.side}{'layers' if learns else 'recomputed_layers'}"
        again = f"({layers} + {stream.side}grouped_layers)*{stream.turns}"
        times = stream.times if learns else stream.input_gradients
        for width, what in read:
            elements = f"batch*{stream.side}sequence*{width}"
            if not stream.split:
                lines.append(over_model(LAYER_BACKWARD, "all-reduce", times, elements, f"gradients of {what}"))
                continue
            lines += [
                over_model(LAYER_FORWARD, "all-gather", stream.forward_times, elements, what),
                over_model(LAYER_RECOMPUTE, "all-gather", again, elements, f"{what}, again"),
                over_model(LAYER_BACKWARD, "reduce-scatter", times, elements, f"gradients of {what}"),
            ]
        lines += adapter_collectives(stream, "attention", 2, self.rank)
        return [*lines, *self._gradient_sums(stream)] if stream.split and learns else lines

    def _gradient_sums(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the all-reduces of gradients from a rank's tokens, with sequence parallelism: of the matrices to the
        latents, or of their adapters, and of norms."""
        # In the compute dtype, as the matmul that computes them.
        widths = "latent + rotated_width" + (" + query_latent" if self.query_latent else "")
        if stream.is_frozen:
            elements = f"rank*({'2*' if self.query_latent else ''}hidden + {widths})"
            why = "gradients of the adapters of the matrices to the latents, from a rank's tokens"
            return [matrix_gradient_sums(stream, elements, why)]
        norms = "latent" + (" + query_latent" if self.query_latent else "")
        why = "gradients of the matrices to the latents, from a rank's tokens"
        return [
            *vector_gradient_sums(stream, self.norm, bias=False),
            local_gradient_sums(stream, f"{stream.side}layers*({norms})", "norms of latents"),
            matrix_gradient_sums(stream, f"hidden*({widths})", why),
        ]
