"""Embeddings: token lookup, positions, token types, relative bias, and norms outside the layers."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, LOSS_FORWARD, Expectation
from mtjax.analysis.parts.part import Part, ResidualStream, Weight, norm, over_model, weight, weights_of
from mtjax.analysis.parts.sublayer import local_gradient_sums
from mtjax.analysis.parts.width import final_norm_collectives
from mtjax.layout.plan import Plan
from mtjax.layout.weights import embedding_weights, relative_table


@dataclass(frozen=True)
class LookupPart(Part):
    """A lookup in the vocabulary-parallel table: each rank looks up its rows, and the results are all-reduced."""

    rows: int
    hidden: int
    side: str = ""
    """Prefix of the symbol of its tokens: `decoder_` for `decoder_sequence`."""
    owns_table: bool = True
    """False where it reads another lookup's table."""
    width: str = "hidden"
    """Symbol of the table's width."""
    read_again: bool = False
    """Whether the backward pass of what follows reads the rows."""
    has_neighbour: bool = False
    """Whether another lookup is next to it in the program, so that XLA may combine the all-reduces of both."""

    @property
    def weights(self) -> list[Weight]:
        return weights_of(embedding_weights(self.hidden, rows=self.rows)) if self.owns_table else []

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        elements, why = f"batch*{self.side}sequence*{self.width}", "embeddings from the vocabulary shards"
        # Pipeline stages save the first stack's embeddings, and recompute those of a second stack.
        count = stream.embedding_turns if self.owns_table else stream.forward_turns
        is_staged = stream.embedding_turns != stream.turns
        if self.read_again and is_staged and not stream.is_frozen:
            count = f"({count} + {stream.turns})"
        if stream.split:
            forward = over_model(EMBEDDING_FORWARD, "reduce-scatter", count, elements, why)
            backward = over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, elements, "gradient of embeddings")
            return [forward] if stream.is_frozen else [forward, backward]
        packed = {"pooled": True, "also": LOSS_FORWARD} if self.has_neighbour else {}
        return [over_model(EMBEDDING_FORWARD, "all-reduce", count, elements, why, **packed)]


@dataclass(frozen=True)
class PositionsPart(Part):
    """A replicated table of learned positions."""

    tokens: int
    hidden: int
    sides: tuple[str, ...] = ("",)
    """Prefixes of the residual streams that it is added to."""

    @property
    def weights(self) -> list[Weight]:
        return weights_of(embedding_weights(self.hidden, positions=self.tokens))

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        why = "gradients of positions"
        gathers = [
            over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, f"{side}sequence*hidden", why)
            for side in self.sides
        ]
        return gathers if stream.split and not stream.is_frozen else []


@dataclass(frozen=True)
class TokenTypesPart(Part):
    """A replicated table of token types."""

    kinds: int
    hidden: int

    @property
    def weights(self) -> list[Weight]:
        return weights_of(embedding_weights(self.hidden, token_types=self.kinds))

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        # Where the sequence is not sharded every rank has the gradients of all tokens.
        has_sums = stream.split and self.kinds and not stream.is_frozen
        return [local_gradient_sums(stream, f"{self.kinds}*hidden", "token types")] if has_sums else []


@dataclass(frozen=True)
class RelativeBiasPart(Part):
    """A bias per head and bucket of distances, added to the scores of every layer of a stack (arXiv 1910.10683)."""

    buckets: int
    heads: int
    tokens: int
    """Of a sample in that stack."""
    owner: str
    """`encoder` or `decoder`."""

    @property
    def weights(self) -> list[Weight]:
        return [weight(f"{self.owner}.relative.table", relative_table(self.buckets, self.heads))]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of float32 biases of all pairs of tokens, computed once for all layers, and the sum of
        their gradients."""
        return {"relative positions": 2 * 4 * self.heads * self.tokens**2 / plan.mesh.model}


@dataclass(frozen=True)
class NormPart(Part):
    """A norm outside the layers: on the embeddings, or after a stack."""

    path: str
    """Its dotted name."""
    vectors: tuple[str, ...]
    hidden: int

    @property
    def weights(self) -> list[Weight]:
        return norm(self.path, self.vectors, self.hidden)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        vectors = len(self.vectors)
        if stream.width_sums:
            return final_norm_collectives(stream, self.path, vectors)
        has_sums = stream.split and vectors and not stream.is_frozen
        return [local_gradient_sums(stream, f"{vectors}*hidden", f"the norm {self.path}")] if has_sums else []
