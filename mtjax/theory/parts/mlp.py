"""The MLP: column-parallel, activation, row-parallel (Figure 3a of arXiv 1909.08053)."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.theory.contract import Expectation
from mtjax.theory.parts.part import Elementwise, Part, Product, ResidualStream, Weight, adapter_products, linear, norm
from mtjax.theory.parts.sublayer import (
    adapters_keep,
    adapters_send,
    own_vector_sums,
    stream_bytes,
    sublayer_keeps,
    sublayer_sends,
)
from mtjax.theory.plan import Plan


@dataclass(frozen=True)
class MLP(Part):
    """A norm, a projection to the inner width, or two where it is gated, an activation, and a projection back."""

    hidden: int
    tokens: int
    """Of a sample."""
    inner: int
    """f: the inner width."""
    is_gated: bool
    norm: str
    bias: bool
    rank: int = 0
    """Of adapters; 0 without any."""

    @property
    def inputs(self) -> int:
        """g: projections into the inner width."""
        return 2 if self.is_gated else 1

    @property
    def weights(self) -> list[Weight]:
        embed, inner = {"embed": self.hidden}, {"mlp": self.inner}
        gate = {"gate": 2} if self.is_gated else {}
        return [
            *norm("mlp_norm", self.norm, self.hidden),
            *linear("mlp.up", embed, {**gate, **inner}, bias=self.bias, rank=self.rank),
            *linear("mlp.down", inner, embed, bias=self.bias, rank=self.rank),
        ]

    @property
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=self.tokens * self.hidden, mlp=self.tokens * self.inner)

    def products(self, model_ways: int = 1) -> list[Product]:
        inner = self.inner / model_ways
        columns = (self.hidden, self.inputs * inner, self.inputs)
        return [
            *adapter_products(self.rank, self.tokens, columns, (inner, self.hidden)),
            Product(self.tokens, self.hidden, self.inputs * inner),
            Product(self.tokens, inner, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Of JAX the first product, of Megatron also the activation's result."""
        arrays = self.inputs + (plan.residuals == "megatron")
        kept = sublayer_keeps(self.tokens, self.hidden, plan)
        return {
            **kept,
            "MLP": arrays * self._array(plan),
            **adapters_keep(
                self.rank, self.inputs + 1, self.hidden + self.inner / plan.tensor_degree, self.tokens, plan
            ),
        }

    def backward_peak_bytes(self, plan: Plan) -> float:
        """The activation's value and slope; where it is gated, what both are computed from, their gradients, and those
        of what is computed. With them live the gradient of what the MLP reads and, where sequences are split, what it
        reads, gathered again, and what attention reads, unless ranks share samples."""
        arrays, gathered = 7 if self.is_gated else 2, 0
        if plan.sequence_parallel:
            gathered = 1 if plan.context_parallelism else 2
        return arrays * self._array(plan) + (1 + gathered) * stream_bytes(self.tokens, self.hidden, plan)

    def pending_bytes(self, plan: Plan) -> float:
        """What it computed and the gradients of what it read, where XLA has something to send meanwhile; with split
        sequences also what it gathered."""
        if plan.mesh.size == 1:
            return 0.0
        gathered = stream_bytes(self.tokens, self.hidden, plan) if plan.sequence_parallel else 0.0
        return (1 + self.inputs) * self._array(plan) + gathered

    def _array(self, plan: Plan) -> float:
        return plan.element_bytes * plan.local_tokens(self.tokens) * self.inner / plan.mesh.model

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = [
            *sublayer_sends(stream, "the MLP", learns=learns),
            *adapters_send(stream, "the MLP", self.inputs, self.rank),
        ]
        return [*lines, *own_vector_sums(stream, self.norm, self.bias)] if stream.split else lines
