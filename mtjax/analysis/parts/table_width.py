"""Matrices between the tables of tokens and the hidden states, where their widths differ (OPT-350M)."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import LAYER_BACKWARD, Expectation
from mtjax.analysis.parts.part import Part, Product, ResidualStream, Weight, linear, over_model
from mtjax.layout.plan import Plan
from mtjax.layout.weights import replicated_product

TABLE_WIDTH = "table_width"
"""Symbol of the tables' width."""


@dataclass(frozen=True)
class TableProjectionPart(Part):
    """A replicated product from the tables' width to that of the hidden states, or back."""

    name: str
    """`project_in` or `project_out`."""
    table: int
    """Width of the tables."""
    hidden: int
    tokens: int
    """Of a sample."""

    @property
    def _sizes(self) -> tuple[int, int]:
        return (self.table, self.hidden) if self._is_before else (self.hidden, self.table)

    @property
    def _is_before(self) -> bool:
        return self.name == "project_in"

    @property
    def weights(self) -> list[Weight]:
        return linear(self.name, *replicated_product(*self._sizes), bias=False)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, *self._sizes, is_repeated=True)]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the product's input and result, on a rank's tokens."""
        ways = plan.mesh.model if plan.sequence_parallel else 1
        elements = plan.local_tokens(self.tokens) * (self.table + self.hidden) / ways
        return {"embeddings before their projection": plan.element_bytes * elements} if self._is_before else {}

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        del plan
        return {TABLE_WIDTH: self.table}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sum of the gradients that each rank computed from its tokens, with sequence parallelism."""
        if not stream.split or stream.is_frozen:
            return []
        # In the compute dtype, as the matmul that computes them. XLA: one operation for both matrices, in any phase.
        why, elements = f"gradient of {self.name}, from a rank's tokens", f"{TABLE_WIDTH}*hidden"
        hoisted = {"pooled": True, "hoisted": True}
        return [over_model(LAYER_BACKWARD, "all-reduce", stream.turns, elements, why, **hoisted)]
