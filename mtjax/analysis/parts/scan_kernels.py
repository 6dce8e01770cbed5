"""Kernels of a Mamba-2 mixer other than its projections: each takes as long as the bytes that it moves, the matmuls of
the scan included, whose tiles are small.

Read off programs compiled for H100s (jax 0.10.2): layers `MM` of Nemotron-H 8B in one block of tokens; layers `MMMM` of
Mamba-2 2.7B in two, without recompute and with full; what context parallel ranks add, off one of 131,072 tokens on
8 x 8 ranks. An array that a kernel reads counts in full, also where it reads a slice of it, as in the roofline of
`mtjax.inspect`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EqualKernels(NamedTuple):
    """A number of equal kernels."""

    size: float
    """Bytes that one of them reads and writes; 0: a kernel as long as its launch."""
    times: float = 1


class MatmulOutputs(NamedTuple):
    """Outputs of matmuls that are among the kernels, and have an overhead if they have less than a wave of tiles."""

    rows: float
    columns: float
    batches: float
    times: float


class ScanKernels(NamedTuple):
    """Kernels of one layer and microbatch on a device."""

    forward: Sequence[EqualKernels]
    backward: Sequence[EqualKernels]
    """With what it computes again: all but the projections, and only with full recompute what tokens read."""
    short: tuple[Sequence[MatmulOutputs], Sequence[MatmulOutputs]] = ((), ())
    """Matmuls of each that may have less than a wave of tiles."""

    @property
    def both(self) -> tuple[Sequence[EqualKernels], Sequence[EqualKernels]]:
        """Those of the forward pass, and of the backward pass."""
        return self.forward, self.backward


@dataclass(frozen=True)
class ScanSizes:
    """Elements per token on a device."""

    bytes: int
    """Of an element in the compute type."""
    inner: float
    """Heads times their width."""
    shared: float
    """B of all groups; C is as wide."""
    width: float
    """Outputs of the first matmul."""
    pairs: float
    """Weights between the tokens of a chunk, of all heads."""
    scores: float
    """The same of a group: products of B and C."""
    states: float
    """States of a chunk's end, over the chunk's tokens."""
    taps: int
    """Of the convolution."""
    chunk: int
    """Tokens of a chunk."""
    state: int
    """Width of a state."""

    @property
    def channels(self) -> float:
        """What is convolved: values, B and C."""
        return self.inner + 2 * self.shared

    @property
    def states_of_chunks(self) -> list[float]:
        """Bytes of the matmuls up to what a chunk's tokens read of the state: scores; states that chunks leave; these,
        passed on; and read."""
        c, state = self.bytes, 4 * self.states
        leaves, read = c * (self.shared + self.inner), c * (self.states + self.inner + self.shared)
        return [2 * c * self.shared + 4 * self.scores, leaves + state, state + c * self.states, read]

    @property
    def read_in_chunks(self) -> list[float]:
        """Bytes of the weights, of values laid out by chunks, and of what tokens read of each other."""
        weights, values = self.bytes * self.pairs, self.bytes * self.inner
        return [weights + 4 * self.scores, 2 * values, weights + 2 * values]

    @property
    def scan(self) -> list[float]:
        """Bytes of the scan's kernels, forward."""
        return [*self.read_in_chunks, *self.states_of_chunks]

    @property
    def forward(self) -> list[float]:
        """Bytes of what is outside the scan: the convolution of values, of B and of C; the sum of the scan's output and
        the skip; the gated norm."""
        read, values = self.bytes * self.width, self.bytes * self.inner
        shared = read + self.bytes * self.shared
        return [read + 2 * values, shared, shared, 4 * values, 4 * values, 3 * values]

    @property
    def again(self) -> list[float]:
        """Bytes of what the backward pass computes again outside the scan: the gate and the skip in float32, and the
        convolution."""
        wide, values, read = 4 * self.inner, self.bytes * self.inner, self.bytes * self.width
        gate = [wide + 3 * values, wide + 2 * values, 2 * wide, wide + 2 * values, wide]
        return [*gate, read + 2 * values, read + 2 * self.bytes * self.shared, 2 * self.bytes * self.channels]

    @property
    def gradients(self) -> list[float]:
        """Bytes of gradients outside the scan: of the convolution, which takes one kernel for each tap, and of the
        gated norm and the skip."""
        c, wide, values, channels = self.bytes, 4 * self.inner, self.bytes * self.inner, self.channels
        taps = [(4 + c) * channels] * (self.taps - 1)
        joined = 4 * self.taps * channels + values + c * self.width
        conv = [joined, (4 + 2 * c) * channels, *taps, 4 * channels, 2 * c * channels]
        gate = [6 * values, wide + 3 * values, wide + 3 * values, 5 * values, 3 * values, wide, 2 * values]
        return [*conv, *gate]

    @property
    def scan_gradients(self) -> list[float]:
        """Bytes of the scan's gradients: of weights and decays, of states, of B and C, and transposes before them."""
        c, state, scores = self.bytes, 4 * self.states, 4 * self.scores
        weights, values, shared = c * self.pairs, c * self.inner, c * self.shared
        of_weights = [2 * weights + scores, weights + 2 * scores, weights + scores, weights + scores]
        of_weights += 2 * [weights + 2 * values]
        passed = [*3 * [2 * state], *2 * [state + c * self.states]]
        left = [values + state + 2 * shared, values + state + shared]
        read = 2 * [c * self.states + values + shared]
        of_shared = [*2 * [2 * shared + scores], 2 * scores, *2 * [3 * shared]]
        return [*of_weights, *passed, *left, *read, *of_shared, 4 * values, 3 * values, 2 * values, 2 * values]

    @property
    def of_pieces(self) -> tuple[list[float], list[float]]:
        """Bytes of what context parallel ranks add, forward and backward: the convolution's inputs after those of the
        piece before, states that chunks and pieces leave, computed before the scan, and their gradients."""
        c, state = self.bytes, 4 * self.states
        once = [c * (self.shared + self.inner) + state, state, 1.5 * state, 2 * c * self.channels]
        gradients = [once[0] + 0.5 * state] * 2 + [state] * 2 + [3.5 * state] * 2
        return once, [*once, *gradients, *[2.5 * c * self.inner] * 3, once[-1]]

    @property
    def states_of_block(self) -> list[float]:
        """Bytes of what a pass over a block of tokens adds for states, where the scan is a loop over blocks: they are
        transposed before they are passed on, in float32, and again after it, where the state before the block is added,
        and then cast."""
        state, narrow = 4 * self.states, self.bytes * self.states
        return [2 * state, 2 * state, state - narrow, state + narrow]

    def of_blocks(self, *, full_recompute: bool) -> tuple[list[float], list[float]]:
        """Returns the bytes of a block's kernels in a loop over blocks, forward, and backward without gradients.

        The backward pass runs the loop again, of which only the states before each block are left without full
        recompute, and computes each block once more. Passes slice values, and their gradients, out of the sample's
        arrays, lay them out by chunks, and write results into such arrays.
        """
        values, state = self.bytes * self.inner, 4 * self.states
        forward = [*self.scan, *self.states_of_block, 2 * values, 2 * values, 4 * values]
        leaves, passed = self.states_of_chunks[1:3]
        before = [leaves, passed, 2 * state, 2 * state, state - self.bytes * self.states, 2 * values]
        # The weights are among the kernels of gradients, and what tokens read of each other is not read again.
        again = [*self.states_of_chunks, *self.states_of_block, *3 * [2 * values], 6 * values, 3 * values]
        first = [*forward[:-3], 2 * values, 4 * values] if full_recompute else before
        return forward, [*first, *again]


SMALL = (9, 33)
"""Kernels as long as their launch, forward and backward: decays, sums over tokens, gradients of vectors."""
SMALL_OF_BLOCK = (10, 33)
"""Those of each block, where there are several."""
SMALL_OF_PIECES = (8, 30)
"""Those that context parallel ranks add."""


def _short(
    sizes: ScanSizes, tokens: float, blocks: int, *, full_recompute: bool
) -> tuple[list[MatmulOutputs], list[MatmulOutputs]]:
    """Returns the matmuls of decays with a triangle and those of B with C, forward; and backward, with the gradients of
    B and C, of scores and of states. Arguments are those of `scan_kernels`."""
    chunk, chunks = sizes.chunk, tokens / blocks / sizes.chunk
    decays = MatmulOutputs(chunk, chunks * sizes.pairs / chunk, 1, blocks)
    scores = MatmulOutputs(chunk, chunk, chunks * sizes.scores / chunk, blocks)
    gradients = scores._replace(columns=sizes.state, times=4 * blocks)
    again = [decays, scores, decays, gradients]
    if blocks > 1:
        again += [decays, scores] if full_recompute else [decays]
    return [decays, scores], again


def scan_kernels(
    sizes: ScanSizes, tokens: float, blocks: int, *, over_context: bool, full_recompute: bool
) -> ScanKernels:
    """Returns the kernels of a mixer.

    Args:
      sizes: per token on a device.
      tokens: of a microbatch on the device.
      blocks: of tokens over which the scan is a loop; its backward pass computes each again, after the states before.
      over_context: whether samples are sharded over context parallel ranks.
      full_recompute: whether the backward pass also computes again what tokens read.
    """
    outside, again = [*sizes.forward], [*sizes.again, *sizes.gradients]
    scan, back = [*sizes.scan], [*sizes.states_of_chunks]
    # A loop over blocks saves the states before each, and its backward pass runs a block again before its gradients.
    if blocks > 1:
        scan, back = sizes.of_blocks(full_recompute=full_recompute)
    elif full_recompute:
        back += sizes.read_in_chunks[1:]
    back += sizes.scan_gradients
    more = SMALL_OF_PIECES if over_context else (0, 0)
    if over_context:
        outside, again = ([*own, *pieces] for own, pieces in zip((outside, again), sizes.of_pieces, strict=True))
    per_block = SMALL_OF_BLOCK if blocks > 1 else (0, 0)
    launches = [sum(counts) for counts in zip(SMALL, (blocks * own for own in per_block), more, strict=True)]
    forward, backward = (
        [
            *(EqualKernels(tokens * n) for n in once),
            *(EqualKernels(tokens * n / blocks, blocks) for n in each),
            EqualKernels(0, number),
        ]
        for once, each, number in zip((outside, again), (scan, back), launches, strict=True)
    )
    return ScanKernels(forward, backward, _short(sizes, tokens, blocks, full_recompute=full_recompute))
