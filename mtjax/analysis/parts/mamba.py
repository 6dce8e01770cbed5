"""Mamba-2: a state-space layer, sharded by heads (`mtjax.models.mixers.mamba`).

Symbols besides those of `mtjax.analysis.parts.part`: i inner width, heads times their width; H heads; G groups that
share B and C; N width of the state; K taps of the convolution; q tokens of a chunk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, Dtype, Expectation, Kind
from mtjax.analysis.parts.part import (
    Elementwise,
    Norms,
    Part,
    Product,
    ResidualStream,
    Weight,
    adapter_products,
    linear,
    over_model,
    weights_of,
)
from mtjax.analysis.parts.scan_kernels import ScanKernels, ScanSizes, scan_kernels
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.config import Model
from mtjax.config.adapters import ADAPTER, joint_adapter_sizes
from mtjax.config.ssm import chunks_at_once, ssm_chunk, ssm_groups, ssm_heads
from mtjax.layout.plan import Plan
from mtjax.layout.rules import CONTEXT
from mtjax.layout.weights import Sizes, mamba_weights, recurrent_inputs, recurrent_output

STATE_SPACE_INPUTS, STATE_SPACE_OUTPUT = "state-space inputs", "state-space output"


@dataclass(frozen=True)
class MambaPart(Part):
    """A norm and a Mamba-2 mixer: `h (2i + 2GN + H) + ih + (K + 1)(i + 2GN) + 3H + i + h` parameters."""

    model: Model
    norm: Norms
    rank: int = 0
    """Of LoRA adapters; 0 without any."""
    context: int = 1
    """Context parallel ranks whose work is counted."""

    @property
    def hidden(self) -> int:
        """h."""
        return self.model.hidden_size

    @property
    def tokens(self) -> int:
        """Of a sample."""
        return self.model.sequence_length

    @property
    def heads(self) -> int:
        """H."""
        return ssm_heads(self.model)

    @property
    def inner(self) -> int:
        """i."""
        return self.heads * self.model.ssm_head_dim

    @property
    def weights(self) -> list[Weight]:
        return self._weights_of("mamba", mamba_weights(self.model))

    def _weights_of(self, mixer: str, sizes: Mapping[str, Sizes]) -> list[Weight]:
        """Returns the weights of a mixer with a recurrent state, from their dimensions, with those of its norms and
        output, and its adapters: that of the first product has a B for each of its parts."""
        own = weights_of(sizes, f"{mixer}.")
        output = linear(f"{mixer}.output", *recurrent_output(self.model), bias=False, rank=self.rank)
        weights = [*self.norm.weights(mixer, self.hidden), *own, *output]
        if not self.rank:
            return weights
        outputs = {name: part.outputs for name, part in recurrent_inputs(sizes).items()}
        adapter = joint_adapter_sizes(self.hidden, self.rank, outputs)
        return [*weights, *weights_of(adapter, f"{mixer}.inputs.{ADAPTER}.")]

    @property
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=self.tokens * self.hidden)

    def _groups(self, tensor_degree: int) -> float:
        """Groups whose B and C a rank computes."""
        return max(ssm_groups(self.model) / tensor_degree, 1)

    def _width(self, tensor_degree: int) -> float:
        """Outputs of the first matmul on a rank."""
        shared = 2 * self.model.ssm_state * self._groups(tensor_degree)
        return (2 * self.inner + self.heads) / tensor_degree + shared

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the projections, and the scan's matmuls."""
        inner, state, tokens = self.inner / tensor_degree, self.model.ssm_state, self.tokens
        chunk = ssm_chunk(self.model)
        chunks = min(chunks_at_once(self.model, 1, self.heads // tensor_degree), tokens / chunk)
        # What pieces of samples leave behind is computed before the scan, and passed on by every rank.
        pieces, scanned = 2 * self.context, partial(Product, in_scan=True)
        decays = scanned(tokens, chunk, self.heads / tensor_degree, gradients=1)
        before = [
            decays,
            scanned(tokens, state, inner),
            scanned(pieces * (self.context + 1), pieces, inner * state),
        ]
        columns = (self.hidden, self._width(tensor_degree), 1)
        return [
            *adapter_products(self.rank, tokens, columns, (inner, self.hidden)),
            Product(tokens, self.hidden, self._width(tensor_degree), reads_input=True),
            # Sums of decays; scores of a chunk's tokens, once for a group of heads; what they read of each other.
            decays,
            scanned(tokens, state, chunk * self._groups(tensor_degree)),
            scanned(tokens, chunk, inner, is_unread=True),
            # What tokens leave in the state, and read of it; states from chunk to chunk.
            scanned(tokens, state, inner),
            scanned(tokens, state, inner),
            scanned(tokens, chunks, inner * state / chunk),
            *(before if self.context > 1 else []),
            Product(tokens, inner, self.hidden),
        ]

    def scans_in_blocks(self, plan: Plan) -> bool:
        return self._tokens_at_once(plan) < plan.local_tokens(self.tokens)

    def _tokens_at_once(self, plan: Plan) -> float:
        """Returns the tokens of a microbatch whose chunks a rank computes at once."""
        chunk, tokens = ssm_chunk(self.model), plan.local_tokens(self.tokens)
        count = math.ceil(tokens / plan.microbatch_size / chunk)
        # The largest divisor of the chunks: a loop's blocks are equal.
        most = min(count, self._most_chunks(plan.microbatch_size, self.heads // plan.mesh.model))
        return tokens * next(number for number in range(most, 0, -1) if count % number == 0) / count

    def _most_chunks(self, samples: int, heads: int) -> int:
        """Returns the most chunks of each of so many samples that a rank with so many heads computes at once."""
        return chunks_at_once(self.model, samples, heads)

    def scan_kernels(self, plan: Plan) -> ScanKernels | None:
        degree, chunk, state = plan.mesh.model, ssm_chunk(self.model), self.model.ssm_state
        inner, groups = self.inner / degree, self._groups(degree)
        sizes = ScanSizes(
            bytes=plan.element_bytes,
            inner=inner,
            shared=groups * state,
            width=self._width(degree),
            pairs=chunk * self.heads / degree,
            scores=chunk * groups,
            states=inner * state / chunk,
            taps=self.model.ssm_conv,
            chunk=chunk,
            state=state,
        )
        tokens = plan.local_tokens(self.tokens)
        blocks = round(tokens / self._tokens_at_once(plan))
        full_recompute = plan.recompute == "full"
        return scan_kernels(sizes, tokens, blocks, over_context=plan.mesh.context > 1, full_recompute=full_recompute)

    def over_context(self, degree: int) -> "MambaPart":
        return replace(self, context=degree)

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the first matmul's output and of the scan's; the scan is recomputed."""
        own = plan.element_bytes * plan.local_tokens(self.tokens)
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            STATE_SPACE_INPUTS: own * self._width(plan.mesh.model),
            STATE_SPACE_OUTPUT: own * self.inner / plan.mesh.model,
            **adapter_saved_bytes(self.rank, 2, self.hidden + self.inner / plan.tensor_degree, self.tokens, plan),
        }

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes at the larger of two moments, of the gated norm's backward pass and of the scan's.

        XLA: one group is laid out with the tokens innermost, in float32 around the norm.
        """
        c, degree, state = plan.element_bytes, plan.mesh.model, self.model.ssm_state
        inner, shared, chunk = self.inner / degree, state * self._groups(degree), ssm_chunk(self.model)
        pairs, states = chunk * self.heads / degree, inner * state / chunk
        tokens, at_once, channels = plan.local_tokens(self.tokens), self._tokens_at_once(plan), inner + 2 * shared
        in_blocks = at_once < tokens
        # Of the norm: what the scan reads and writes, weights between tokens, and states.
        norm = tokens * ((4 * 4 + 7 * c) * inner + c * channels)
        norm += 0 if in_blocks else at_once * (c * pairs + (4 + c) * states)
        # Of the scan: gradients of what the norm read, and its output; of the tokens at once products of B and C, too.
        scan = tokens * c * (3 * inner + (2 * channels + inner if in_blocks else 0))
        products = 3 * c * inner + (4 + 2 * c) * shared + 4 * chunk * shared / state
        scan += at_once * (products + 2 * c * pairs + (8 + c) * states)
        gathered = (2 if plan.splits_stream else 1) * stream_bytes(self.tokens, self.hidden, plan)
        return tokens * c * channels + max(norm, scan) + self._assembled_bytes(plan) + gathered

    def _assembled_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the assembled weight of the first product."""
        return plan.element_bytes * self.hidden * self._width(plan.mesh.model)

    def state_bytes(self, tensor_degree: int, element_bytes: float) -> float:
        """Returns the bytes of the float32 state and of the convolution's last inputs."""
        inner, state = self.inner / tensor_degree, self.model.ssm_state
        channels = inner + 2 * state * self._groups(tensor_degree)
        return 4 * inner * state + element_bytes * (self.model.ssm_conv - 1) * channels

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        degree, state = plan.mesh.model, self.model.ssm_state
        heads = self.heads // degree
        inner = heads * self.model.ssm_head_dim
        return {
            "taps": self.model.ssm_conv,
            "groups": ssm_groups(self.model),
            "shared_width": 2 * ssm_groups(self.model) * state,
            "rank_states": inner * state,
            "rank_ssm_heads": heads,
            "rank_channels": inner + 2 * int(self._groups(degree)) * state,
        }

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        name, learns = "the Mamba-2 mixer", self.rank > 0 or not stream.is_frozen
        lines = sublayer_collectives(stream, name, learns=learns)
        lines += adapter_collectives(stream, name, 1, self.rank)
        lines += vector_gradient_sums(stream, self.norm, bias=False) if stream.split else []
        if stream.shares_groups:
            lines += _of_shared_groups(stream, has_norm=self.model.ssm_norm, learns=learns)
        return [*lines, *_of_states(stream)] if stream.across else lines


def _of_shared_groups(stream: ResidualStream, *, has_norm: bool, learns: bool) -> list[Expectation]:
    """Returns the collectives of groups that several ranks share: squares for the gated norm, if it has one, and the
    gradients of the parameters of B and C."""
    why, elements = "squares of shared groups for the gated norm", "batch*sequence*groups"
    line = partial(over_model, kind="all-reduce", elements=elements, dtype="float32", pooled=True)
    also: dict[str, Any] = {"also": LAYER_RECOMPUTE} if stream.is_frozen else {}
    inputs = "rank" if stream.is_frozen else "(hidden + taps + 1)"
    own = f"{stream.side}layers*shared_width*{inputs}"
    squares = [
        line(LAYER_FORWARD, count=stream.forward_times, why=why),
        # XLA: with adapters, it may be sent together with what they send in the backward pass.
        line(LAYER_BACKWARD if stream.is_frozen else LAYER_RECOMPUTE, count=stream.times, why=f"{why}, again", **also),
        line(LAYER_BACKWARD, count=stream.times, why=f"gradients of {why}", hoisted=True),
    ]
    sums = [local_gradient_sums(stream, own, "B and C of shared groups")] if learns else []
    return [*(squares if has_norm else []), *sums]


def _of_states(stream: ResidualStream) -> list[Expectation]:
    """Returns what context parallel ranks send each other of every piece of a sample: the convolution's last inputs,
    the state that the piece leaves, and the decay of one that comes in."""
    arrays = (("rank_states", "states that all pieces leave"), ("rank_ssm_heads", "decays of all pieces"))
    lines = of_convolution(stream)
    for size, why in arrays:
        lines += of_pieces(stream, _GATHERED, f"2*batch*context_degree*{size}", "float32", why)
    return lines


_GATHERED: tuple[Kind, Kind] = ("all-gather", "reduce-scatter")


def of_convolution(stream: ResidualStream) -> list[Expectation]:
    """Returns the lines of the convolution's last inputs of all pieces."""
    elements = "2*batch*context_degree*(taps - 1)*rank_channels"
    lines = of_pieces(stream, _GATHERED, elements, "compute", "last inputs of the convolution of all pieces")
    if stream.across is None or not stream.across.keeps_documents_apart:
        return lines
    line = partial(Expectation, axis=CONTEXT, dtype="int32", pooled=True, hoisted=True, also=LAYER_RECOMPUTE)
    elements, why = "2*batch*context_degree*(taps - 1)", "their document ids, the same for all layers"
    return [*lines, line(LAYER_FORWARD, "all-gather", count=f"3*{stream.times}", elements=elements, why=why)]


def of_pieces(
    stream: ResidualStream, kinds: tuple[Kind, Kind], elements: str, dtype: Dtype, why: str
) -> list[Expectation]:
    """Returns the lines of an array of pieces of samples that context parallel ranks send each other.

    Args:
      stream: of the layer.
      kinds: of the collective, and of that of the gradient.
      elements: formula.
      dtype: of the array.
      why: what it is.
    """
    line = partial(Expectation, axis=CONTEXT, elements=elements, dtype=dtype, pooled=True)
    return [
        line(LAYER_FORWARD, kinds[0], count=stream.forward_times, why=why),
        line(LAYER_RECOMPUTE, kinds[0], count=stream.times, why=f"{why}, again"),
        line(LAYER_BACKWARD, kinds[1], count=stream.times, why=f"gradients of the {why}"),
    ]
