"""Multi-token prediction (arXiv 2412.19437, section 2.2): what its layers have in addition to a decoder's layer.

Their embeddings are looked up again, and their losses computed like the model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, Expectation
from mtjax.analysis.parts.embedding import LookupPart
from mtjax.analysis.parts.part import (
    Elementwise,
    Part,
    Product,
    ResidualStream,
    Weight,
    linear,
    norm,
    over_model,
)
from mtjax.analysis.parts.sublayer import local_gradient_sums, matrix_gradient_sums
from mtjax.layout.plan import Plan
from mtjax.layout.weights import replicated_product

INPUTS_AHEAD = "embeddings and hidden states of multi-token prediction"
"""The kind of saved activations."""
AHEAD = "mtp_"
"""Prefix of the symbols and modules of multi-token prediction."""


@dataclass(frozen=True)
class LookupAheadPart(LookupPart):
    """A lookup of later tokens in the embedding table, with the head: once per microbatch also in a pipeline."""

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        elements, why = "batch*sequence*hidden", "embeddings of later tokens, from the vocabulary shards"
        if not stream.split:
            return [over_model(EMBEDDING_FORWARD, "all-reduce", stream.turns, elements, why)]
        return [
            over_model(EMBEDDING_FORWARD, "reduce-scatter", stream.turns, elements, why),
            over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, elements, "gradient of embeddings"),
        ]


@dataclass(frozen=True)
class CombinedPart(Part):
    """The norms of embeddings and hidden states, the replicated product of both, and the final norm."""

    hidden: int
    tokens: int
    """Of a sample."""
    vectors: tuple[str, ...]
    """Names of the parameters of each of the three norms."""

    @property
    def weights(self) -> list[Weight]:
        names = ("embedding_norm", "hidden_norm", "final_norm")
        norms = [vector for name in names for vector in norm(name, self.vectors, self.hidden)]
        return [*norms, *linear("projection", *replicated_product(self.hidden, self.hidden, sources=2), bias=False)]

    @property
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=2 * self.tokens * self.hidden)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, 2 * self.hidden, self.hidden, is_repeated=True)]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of both inputs, of the layer's output, and of its normalized output."""
        elements = plan.local_tokens(self.tokens) * self.hidden / (plan.mesh.model if plan.sequence_parallel else 1)
        return {INPUTS_AHEAD: 4 * plan.element_bytes * elements}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sums of gradients that each rank computed from its tokens, with sequence parallelism."""
        if not stream.split:
            return []
        vectors = 3 * len(self.vectors)
        norms = local_gradient_sums(stream, f"{stream.side}layers*{vectors}*hidden", "norms of multi-token prediction")
        # In the compute dtype, as the matmul that computes them.
        why = "gradients of the projections of multi-token prediction, from a rank's tokens"
        return [*([norms] if vectors else []), matrix_gradient_sums(stream, "2*hidden*hidden", why)]
