"""The MLP: column-parallel, activation, row-parallel (Figure 3a of arXiv 1909.08053)."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import Expectation
from mtjax.analysis.parts.part import (
    Elementwise,
    Norms,
    Part,
    Product,
    ResidualStream,
    Weight,
    adapter_products,
    linear,
)
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.layout.plan import Plan
from mtjax.layout.weights import mlp_products


@dataclass(frozen=True)
class MLPPart(Part):
    """A norm, a projection to the inner width (two in a gated MLP), an activation, and a projection back."""

    hidden: int
    tokens: int
    """Of a sample."""
    inner: int
    """f: the inner width."""
    is_gated: bool
    norm: Norms
    bias: bool
    rank: int = 0
    """Of LoRA adapters; 0 without any."""

    @property
    def inputs(self) -> int:
        """g: projections into the inner width."""
        return 2 if self.is_gated else 1

    @property
    def weights(self) -> list[Weight]:
        weights = self.norm.weights("mlp", self.hidden)
        for name, sizes in mlp_products(self.hidden, self.inner, is_gated=self.is_gated).items():
            weights += linear(f"mlp.{name}", *sizes, bias=self.bias, rank=self.rank)
        return weights

    @property
    def elementwise(self) -> Elementwise:
        inner = self.tokens * self.inner
        return Elementwise(stream=self.tokens * self.hidden, mlp=inner, gate=inner if self.is_gated else 0)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        inner = self.inner / tensor_degree
        columns = (self.hidden, self.inputs * inner, self.inputs)
        return [
            *adapter_products(self.rank, self.tokens, columns, (inner, self.hidden)),
            Product(self.tokens, self.hidden, self.inputs * inner, reads_input=True),
            Product(self.tokens, inner, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the first matmul's output, with Megatron's kernels also of the activation's output."""
        arrays = self.inputs + (plan.residuals == "megatron")
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            "MLP": arrays * self._array(plan),
            **adapter_saved_bytes(
                self.rank, self.inputs + 1, self.hidden + self.inner / plan.tensor_degree, self.tokens, plan
            ),
        }

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the activation's value and derivative and of gathered inputs, at the peak."""
        # A gated MLP holds both projections, their gradients, and the gradient of their product, too.
        arrays, gathered = 7 if self.is_gated else 2, 0
        if plan.splits_stream:  # the MLP's gathered input, and attention's without context parallelism
            gathered = 1 if plan.context_parallelism else 2
        # 1: the gradient of the MLP's input.
        return arrays * self._array(plan) + (1 + gathered) * stream_bytes(self.tokens, self.hidden, plan)

    def pending_bytes(self, plan: Plan) -> float:
        """Returns the bytes of activations and input gradients that weight gradients need after the input gradient."""
        # XLA: delays weight gradients only where there are collectives to overlap them with.
        if plan.mesh.size == 1:
            return 0.0
        gathered = stream_bytes(self.tokens, self.hidden, plan) if plan.splits_stream else 0.0
        return (1 + self.inputs) * self._array(plan) + gathered

    def _array(self, plan: Plan) -> float:
        """Returns the bytes of an array [tokens, f] on a device."""
        return plan.element_bytes * plan.local_tokens(self.tokens) * self.inner / plan.mesh.model

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = [
            *sublayer_collectives(stream, "the MLP", learns=learns),
            *adapter_collectives(stream, "the MLP", self.inputs, self.rank),
        ]
        return [*lines, *vector_gradient_sums(stream, self.norm, self.bias)] if stream.split else lines
