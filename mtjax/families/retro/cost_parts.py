"""Retro's components: chunked cross-attention, the encoder of neighbours, and what they read.

N = samples x chunks x neighbours x tokens of a neighbour: the tokens of all neighbours of a microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import (
    EMBEDDING_BACKWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_RECOMPUTE,
    OTHER,
    Expectation,
)
from mtjax.analysis.parts.attention import AttentionPart, CrossAttentionPart
from mtjax.analysis.parts.embedding import NormPart
from mtjax.analysis.parts.mlp import MLPPart
from mtjax.analysis.parts.part import Part, ResidualStream, Scores, Weight, over_model
from mtjax.analysis.parts.sublayer import stream_bytes, sublayer_collectives, vector_gradient_sums
from mtjax.families.retro.layout import ENCODER_FIRST
from mtjax.layout.plan import Plan

READ = f"batch*{ENCODER_FIRST}_sequence*hidden"
"""Formula: elements of the neighbours' hidden states of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class _InEncoderPart(Part):
    """A component of the encoder's layers, which have a dropout rate of their own."""

    rate: float

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        has_dropout = self.rate > 0
        return super().saved_bytes(replace(plan, dropout=has_dropout, attention_dropout=has_dropout))


@dataclass(frozen=True, kw_only=True)
class NeighbourAttentionPart(_InEncoderPart, AttentionPart):
    """A norm and self-attention within each neighbour."""

    neighbour: int
    """Tokens of a neighbour."""

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.neighbour, self.head_dim, self.is_causal, self.kv_heads)


@dataclass(frozen=True, kw_only=True)
class NeighbourMLPPart(_InEncoderPart, MLPPart):
    """A norm and an MLP of neighbours."""


@dataclass(frozen=True, kw_only=True)
class AskingPart(_InEncoderPart, CrossAttentionPart):
    """A norm and attention from the tokens of neighbours to the chunk that asked for them."""

    chunk: int
    """Tokens of a chunk."""

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.chunk, self.head_dim, is_causal=False, groups=self.heads)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sublayer's collectives, and those of the chunks that it reads."""
        lines = sublayer_collectives(stream, "the encoder's cross-attention", learns=not stream.is_frozen)
        elements, what = "batch*sequence*hidden", "chunks that the encoder reads"
        if not stream.split:
            return lines  # the gradient of the chunks is in a line of `Chunked`, and so is their all-gather
        return [
            *lines,
            over_model(LAYER_RECOMPUTE, "all-gather", stream.times, elements, f"{what}, again"),
            *vector_gradient_sums(stream, self.norm, self.biases[1]),
        ]


@dataclass(frozen=True, kw_only=True)
class ChunkedPart(CrossAttentionPart):
    """A norm, but in the first layer that has it, and attention from a decoder's tokens to encoded neighbours."""

    neighbours: int
    """Tokens of all neighbours of a chunk."""
    layers: str
    """Formula: layers that read the neighbours; empty in all stacks but one, which counts for all."""
    loops: int
    """Loops over layers that read the neighbours, each of which may send once what all its layers read."""
    ends_backward: bool = False
    """Whether nothing below is trained, so that the backward pass ends here and in the encoder."""

    @property
    def weights(self) -> list[Weight]:
        return [replace(weight, name=weight.name.replace("cross", "chunked", 1)) for weight in super().weights]

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.neighbours, self.head_dim, is_causal=False, groups=self.heads)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sublayer's collectives, and those of the encoded neighbours that it reads."""
        name = "chunked cross-attention"
        lines = sublayer_collectives(stream, name, learns=not stream.is_frozen)
        if self.layers:
            # XLA: the encoder reads what the first chunked cross-attention reads. One gradient is sent.
            first, *lines, last_line = lines
            each = f"{stream.turns}*{stream.elements}"
            both = {"count": "1", "elements": f"2*{each}", "pooled": True}
            gathered = (
                replace(first, **both, also=OTHER, why=f"{first.why} and the encoder's") if stream.split else first
            )
            why = f"{last_line.why} and the encoder's, once for their sum"
            lines += [gathered, replace(last_line, **both, sent=each, hoisted=True, also=self._also(stream), why=why)]
        lines += vector_gradient_sums(stream, self.norm, self.biases[1]) if stream.split else []
        if not self.layers:
            return lines
        each, what = f"{stream.turns}*{READ}", "encoded neighbours"
        # XLA: may merge the collectives of all layers, which read the same array.
        every = f"{self.layers}*{each}"
        merged = {"pooled": True, "hoisted": True, "sent": f"{1 + self.loops}*{each}"}
        if not stream.split:
            why = f"gradient of {what}, once for the sum of a loop's layers"
            settings = {**merged, "also": self._also(stream)}
            return [*lines, over_model(LAYER_BACKWARD, "all-reduce", "1", every, why, **settings)]
        return [
            *lines,
            over_model(LAYER_FORWARD, "all-gather", "1", every, f"{what}, once a loop", also=OTHER, **merged),
            over_model(LAYER_RECOMPUTE, "all-gather", f"{self.layers}*{stream.turns}", READ, f"{what}, again"),
            over_model(LAYER_BACKWARD, "reduce-scatter", f"{self.layers}*{stream.turns}", READ, f"gradient of {what}"),
        ]

    def _also(self, stream: ResidualStream) -> str:
        # XLA: names one all-reduce of the backward pass after the recompute of attention's output.
        return LAYER_RECOMPUTE if self.ends_backward and not stream.split else ""


@dataclass(frozen=True)
class UnreadPart(Part):
    """The weights of a component that does not run: nothing reads neighbours."""

    of: Part

    @property
    def weights(self) -> list[Weight]:
        return self.of.weights


@dataclass(frozen=True)
class NeighbourPositionsPart(Part):
    """The positions of neighbours, from the decoder's table."""

    tokens: int
    """Of a neighbour."""
    hidden: int

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        why = "gradients of neighbours' positions"
        gather = over_model(EMBEDDING_BACKWARD, "all-gather", stream.turns, f"{self.tokens}*hidden", why)
        return [gather] if stream.split and not stream.is_frozen else []


@dataclass(frozen=True)
class FirstNormPart(NormPart):
    """The norm before the first chunked cross-attention, whose result the encoder reads, too; and what is alive from
    there on: this result, the embedded and the encoded neighbours."""

    tokens: int
    read: int
    """Tokens of all neighbours of a sample."""

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        ways = plan.mesh.model if plan.splits_stream else 1
        return {
            "stream and neighbours between the encoder and the decoder": stream_bytes(
                self.tokens + self.read, self.hidden, plan
            )
            / ways
        }
