"""The gated delta net, sharded by heads (`mtjax.models.mixers.delta_net`).

Symbols besides those of `mtjax.analysis.parts.part`: i width of all values, heads times theirs; H heads; G groups that
share queries and keys; N width of a key; K taps of the convolution; q tokens of a chunk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mtjax.analysis.contract import Expectation
from mtjax.analysis.parts.delta_kernels import DeltaSizes, delta_kernels
from mtjax.analysis.parts.loop import LoopOverPieces
from mtjax.analysis.parts.mamba import MambaPart, of_convolution, of_pieces
from mtjax.analysis.parts.part import Product, ResidualStream, Weight, adapter_products
from mtjax.analysis.parts.scan_kernels import ScanKernels
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.config.ssm import delta_chunks_at_once, ssm_chunk, ssm_groups
from mtjax.layout.plan import Plan
from mtjax.layout.weights import delta_weights

DELTA_INPUTS, DELTA_OUTPUT = "delta net inputs", "delta net output"


@dataclass(frozen=True)
class DeltaNetPart(MambaPart):
    """A norm and a gated delta net: `h (2i + 2GN + 2H) + ih + K (i + 2GN) + 2H + i/H + h` parameters."""

    @property
    def weights(self) -> list[Weight]:
        return self._weights_of("delta", delta_weights(self.model))

    def _width(self, tensor_degree: int) -> float:
        """Outputs of the first matmul on a rank."""
        shared = 2 * self.model.ssm_state * self._groups(tensor_degree)
        return 2 * (self.inner + self.heads) / tensor_degree + shared

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the projections, and the matmuls of the delta rule."""
        inner, tokens, key = self.inner / tensor_degree, self.tokens, self.model.ssm_state
        heads, chunk, pairs = self.heads / tensor_degree, ssm_chunk(self.model), self._groups(tensor_degree)
        columns, of_context = self._columns(tensor_degree), []
        # Two for each doubling of the blocks but the first; the backward pass has two for all of them.
        doublings = 2 * max(0, math.ceil(math.log2(chunk)) - 1)
        scanned = partial(Product, tokens, in_scan=True)
        inverse = [scanned(chunk, chunk * heads * doublings, gradients=2 / doublings)] if doublings else []
        if self.context > 1:
            # The convolution's last inputs of the pieces before a rank's; what is read of the state that comes into a
            # piece; states from piece to piece, whose backward pass computes them again.
            ends = (self.model.ssm_conv - 1) * (inner + 2 * key * pairs)
            of_context = [
                Product(2 * self.context, 2 * self.context, ends, in_scan=True, gradients=1),
                scanned(key, inner, is_unread=True),
                Product((2 * self.context - 2) * key, key, inner, in_scan=True, again=True),
            ]
        width = (self.hidden, self._width(tensor_degree), 1)
        return [
            *adapter_products(self.rank, tokens, width, (inner, self.hidden)),
            Product(tokens, self.hidden, self._width(tensor_degree), reads_input=True),
            # Sums of decays; products of a chunk's keys with each other and with queries.
            scanned(chunk, heads, gradients=1),
            scanned(key, chunk * pairs),
            scanned(key, chunk * pairs),
            # The inverse, with what tokens write and read of the state.
            *inverse,
            scanned(chunk, inner),
            scanned(chunk, heads * key),
            # From chunk to chunk: what tokens write less and read of the state, read of each other, and leave in it.
            scanned(key, 2 * columns, again=True),
            scanned(chunk, columns),
            scanned(key, columns),
            *of_context,
            Product(tokens, inner, self.hidden),
        ]

    def _columns(self, tensor_degree: int) -> float:
        """Columns of the states that pass through the chunks on a rank: with context parallelism, of a matrix of each
        head besides, for a state that comes in."""
        identity = self.heads * self.model.ssm_state if self.context > 1 else 0
        return (self.inner + identity) / tensor_degree

    def scan_kernels(self, plan: Plan) -> ScanKernels:
        degree, chunk, key = plan.mesh.model, ssm_chunk(self.model), self.model.ssm_state
        heads, groups = self.heads / degree, self._groups(degree)
        sizes = DeltaSizes(
            bytes=plan.element_bytes,
            inner=self.inner / degree,
            keys=heads * key,
            shared=groups * key,
            width=self._width(degree),
            pairs=chunk * heads,
            scores=chunk * groups,
            doublings=max(0, math.ceil(math.log2(chunk)) - 1),
            taps=self.model.ssm_conv,
        )
        return delta_kernels(sizes, plan.local_tokens(self.tokens), over_context=plan.mesh.context > 1)

    def _most_chunks(self, samples: int, heads: int) -> int:
        return delta_chunks_at_once(self.model, samples, heads)

    def over_context(self, degree: int) -> "DeltaNetPart":
        return replace(self, context=degree)

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the first matmul's output and of the delta rule's, which is recomputed."""
        own = plan.element_bytes * plan.local_tokens(self.tokens)
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            DELTA_INPUTS: own * self._width(plan.mesh.model),
            DELTA_OUTPUT: own * self.inner / plan.mesh.model,
            **adapter_saved_bytes(self.rank, 2, self.hidden + self.inner / plan.tensor_degree, self.tokens, plan),
        }

    def step_loops(self, plan: Plan) -> Sequence[LoopOverPieces]:
        """Returns the loop that passes the state from chunk to chunk, and with context parallelism that from piece to
        piece."""
        chunk, key, value = ssm_chunk(self.model), self.model.ssm_state, self.model.ssm_head_dim
        batch, tokens, ways = plan.microbatch_size * self.heads / plan.mesh.model, self.tokens, plan.mesh.context
        over_pieces = []
        if plan.context_parallelism:  # two pieces of each sample side by side, and the matrices of `_columns`
            # Pieces are exchanged by heads, so that each rank passes the states of its share of heads through all
            # pieces.
            step = (key, key, value, math.ceil(batch / ways))
            # The backward pass has the loop again, and two gradients in another.
            over_pieces = [LoopOverPieces(2 * ways - 2, (step,), (step,), (step,) * 2, kernels=([0] * 4, [0] * 9))]
            batch, tokens, value = 2 * batch, tokens / (2 * ways), value + key
        reads, takes = (2 * chunk, key, value, batch), (chunk + key, chunk, value, batch)
        back, size = (reads, reads, takes, takes), plan.element_bytes * batch * chunk * value
        sums = [number * size for number in (4, 5, 6)], [number * size for number in (4, 4, 6, 7, 8)]
        kernels = [*[0] * 6, *sums[0]], [*[0] * 12, *sums[1]]
        return [LoopOverPieces(math.ceil(tokens / chunk), (reads, takes), (reads,), back, kernels), *over_pieces]

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes at the largest of three moments: the backward pass of the loop over chunks, that of the
        inverse, and the inverse's recompute, before them. Each has the product's convolved channels, and, of what is
        between the tokens of a chunk, the products of keys with keys and with queries."""
        c, degree, chunk, key = plan.element_bytes, plan.mesh.model, ssm_chunk(self.model), self.model.ssm_state
        heads, inner, shared = self.heads / degree, self.inner / degree, key * self._groups(degree)
        pairs, alike = chunk * heads, 4 * chunk * self._groups(degree)
        # What a step of the loop reads, for each token, in the compute dtype: `_Chunk`'s readers and takers.
        read = c * heads * (3 * key + chunk)
        # The inverse in float32, and twice in the compute dtype, for values and for keys.
        inverse = (4 + 2 * c) * pairs
        loop = 2 * (read + 4 * inner) + 4 * inner * key / chunk + inverse + 2 * alike
        if plan.context_parallelism:  # the matrices of `_columns`, what is read of them, and its gradient
            loop += heads * key * (4 * key / chunk + 2 * c)
        # Two products with the inverse, and gradients of what read it.
        solver = read + 4 * inner + inverse + (2 * 4 + 3 * c) * pairs + 2 * alike
        # A selection of blocks for each doubling, and two products.
        forward = 4 * (max(0, math.ceil(math.log2(chunk)) - 1) + 2) * pairs + alike
        outside = c * (inner + 2 * shared) + 2 * c * shared
        if plan.recompute != "full":
            # XLA: takes the saved product out of its stack, and, before the inverse's recompute, writes the zeros in
            # which the gradients of what the loop reads begin, and copies them; keys' products wait, too.
            outside += c * self._width(degree)
            forward += 2 * (2 * c * heads * key + 4 * inner) + 2 * alike
        if self.scans_in_blocks(plan):
            # What all blocks read, its gradients and those of the output; and the gate in float32.
            outside += c * (2 * (inner + 2 * shared) + inner) + 2 * 4 * inner
        tokens, at_once = plan.local_tokens(self.tokens), self._tokens_at_once(plan)
        peak = max(loop + 4 * c * inner, solver + 3 * c * inner, forward)
        gathered = (2 if plan.splits_stream else 1) * stream_bytes(self.tokens, self.hidden, plan)
        return tokens * outside + at_once * peak + self._assembled_bytes(plan) + gathered

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        model, degree, ways = self.model, plan.mesh.model, plan.mesh.context
        heads = plan.microbatch_size * self.heads // degree
        return {
            "taps": model.ssm_conv,
            "shared_width": 2 * ssm_groups(model) * model.ssm_state,
            "value_width": model.ssm_head_dim,
            "state_width": model.ssm_state,
            "passed_heads": math.ceil(heads / ways) * ways,
            "rank_channels": self.inner // degree + 2 * int(self._groups(degree)) * model.ssm_state,
        }

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        name, learns = "the gated delta net", self.rank > 0 or not stream.is_frozen
        lines = sublayer_collectives(stream, name, learns=learns)
        lines += adapter_collectives(stream, name, 1, self.rank)
        lines += vector_gradient_sums(stream, self.norm, bias=False) if stream.split else []
        lines += _of_pieces(stream) if stream.across else []
        if stream.is_frozen:
            if self.rank and stream.shares_groups:
                shared = f"{stream.side}layers*shared_width*rank"
                lines.append(local_gradient_sums(stream, shared, "queries and keys of shared groups"))
            return lines
        lines.append(local_gradient_sums(stream, f"{stream.side}layers*value_width", "norms of the heads' values"))
        if stream.shares_groups:
            shared = f"{stream.side}layers*shared_width*(hidden + taps)"
            lines.append(local_gradient_sums(stream, shared, "queries and keys of shared groups"))
        return lines


def _of_pieces(stream: ResidualStream) -> list[Expectation]:
    """Returns what context parallel ranks send each other of every piece of a sample: the convolution's last inputs,
    and, by heads, what the piece leaves for any state that comes in, and the state that does."""
    matrices, states = (
        "2*passed_heads*state_width*(state_width + value_width)",
        "2*passed_heads*state_width*value_width",
    )
    exchanged = ("all-to-all", "all-to-all")
    return [
        *of_convolution(stream),
        *of_pieces(stream, exchanged, matrices, "float32", "matrices that pieces multiply a state by, and add"),
        *of_pieces(stream, exchanged, states, "compute", "states that come into pieces"),
    ]
