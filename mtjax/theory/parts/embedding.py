"""What turns tokens into the residual stream."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.theory.contract import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, LOSS_FORWARD, Expectation
from mtjax.theory.parts.part import NORM_VECTORS, Part, ResidualStream, Weight, norm, over_model, weight
from mtjax.theory.parts.sublayer import own_token_sums
from mtjax.theory.plan import Plan


@dataclass(frozen=True)
class Lookup(Part):
    """Rows of the vocabulary-parallel table, added up over the ranks that own them."""

    rows: int
    hidden: int
    side: str = ""
    """Whose tokens: what the words of their number begin with."""
    owns_table: bool = True
    """False where another lookup's table is read."""
    has_neighbour: bool = False
    """Whether another lookup stands beside it in the program, so that the compiler may send the rows of both as one."""

    @property
    def weights(self) -> list[Weight]:
        return [weight("embedding", {"vocab": self.rows, "embed": self.hidden})] if self.owns_table else []

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        elements, why = f"batch*{self.side}sequence*hidden", "rows that other ranks own"
        # Stages keep what the first stack reads, and make what another reads again.
        forward = stream.embedding_turns if self.owns_table else stream.forward_turns
        if stream.split:
            forwards = over_model(EMBEDDING_FORWARD, "reduce-scatter", forward, elements, why)
            back = "gradient of what was scattered"
            backwards = over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, elements, back)
            return [forwards] if stream.is_frozen else [forwards, backwards]
        packed = {"pooled": True, "also": LOSS_FORWARD} if self.has_neighbour else {}
        return [over_model(EMBEDDING_FORWARD, "all-reduce", forward, elements, why, **packed)]


@dataclass(frozen=True)
class Positions(Part):
    """A table of learned positions, which every rank holds."""

    tokens: int
    hidden: int
    sides: tuple[str, ...] = ("",)
    """Of the streams that it is added to."""

    @property
    def weights(self) -> list[Weight]:
        return [weight("positions", {"positions": self.tokens, "embed": self.hidden})]

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        why = "gradient of the positions"
        gathers = [
            over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, f"{side}sequence*hidden", why)
            for side in self.sides
        ]
        return gathers if stream.split and not stream.is_frozen else []


@dataclass(frozen=True)
class TokenTypes(Part):
    """A table of kinds of tokens, which every rank holds."""

    kinds: int
    hidden: int

    @property
    def weights(self) -> list[Weight]:
        return [weight("token_types", {"token_types": self.kinds, "embed": self.hidden})] if self.kinds else []

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        has_sums = stream.split and self.kinds and not stream.is_frozen
        return [own_token_sums(stream, f"{self.kinds}*hidden", "token types")] if has_sums else []


@dataclass(frozen=True)
class RelativeBias(Part):
    """A number per head and kind of distance, added to the scores of every layer of a stack (arXiv 1910.10683)."""

    buckets: int
    heads: int
    tokens: int
    """Of a sample of that stack."""
    owner: str
    """`encoder` or `decoder`."""

    @property
    def weights(self) -> list[Weight]:
        return [weight(f"{self.owner}.relative.table", {"buckets": self.buckets, "heads": self.heads})]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """float32 biases of all pairs of tokens, made once for all layers, and the sum of their gradients."""
        return {"relative positions": 2 * 4 * self.heads * self.tokens**2 / plan.mesh.model}


@dataclass(frozen=True)
class Norm(Part):
    """A norm outside the layers: on the embeddings, or after a stack."""

    path: str
    """Its dotted name."""
    kind: str
    hidden: int

    @property
    def weights(self) -> list[Weight]:
        return norm(self.path, self.kind, self.hidden)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        vectors = len(NORM_VECTORS[self.kind])
        has_sums = stream.split and not stream.is_frozen
        return [own_token_sums(stream, f"{vectors}*hidden", f"the norm {self.path}")] if has_sums else []
