"""Kernels of a gated delta net other than its projections and the loop over chunks: each takes as long as the bytes
that it moves, the matmuls of the inverse included, which are float32.

Read off a program of layers `GG` with the sizes of Qwen3-Next, one sample of 8,192 tokens, compiled for an H100 (jax
0.10.2). As in `mtjax.analysis.parts.scan_kernels`, an array that a kernel reads counts in full.
"""

from dataclasses import dataclass

from mtjax.analysis.parts.scan_kernels import EqualKernels, ScanKernels

SMALL = (12, 40)
"""Kernels as long as their launch, forward and backward: decays, sums over tokens, gradients of vectors."""


@dataclass(frozen=True)
class DeltaSizes:
    """Elements per token on a device."""

    bytes: int
    """Of an element in the compute type."""
    inner: float
    """Heads times the width of their values."""
    keys: float
    """Heads times the width of a key."""
    shared: float
    """Keys of all groups; queries are as wide."""
    width: float
    """Outputs of the first matmul."""
    pairs: float
    """Weights between the tokens of a chunk, of all heads."""
    scores: float
    """The same of a group: products of its keys, or with its queries."""
    doublings: int
    """Steps of the inverse with two products each."""
    taps: int
    """Of the convolution."""

    @property
    def channels(self) -> float:
        """What is convolved: values, queries and keys."""
        return self.inner + 2 * self.shared

    @property
    def chunks(self) -> list[float]:
        """Bytes of what needs no state, but for the inverse: products of keys with keys and with queries, what tokens
        write, and what the loop's steps read."""
        c, pairs, scores = self.bytes, self.bytes * self.pairs, 4 * self.scores
        keys, shared = c * self.keys, c * self.shared
        writes = [pairs + (c + 4) * self.inner, pairs + shared + keys]
        return [2 * shared + scores, 2 * shared + scores, *writes, 3 * keys + shared, pairs + keys + scores + shared]

    def inverse(self, first: float, other: float, last: float) -> list[float]:
        """Returns the bytes of the inverse; arguments: arrays of pairs that its first, other and last selections read
        and write."""
        pairs, steps = 4 * self.pairs, self.doublings
        return [first * pairs, *[3 * pairs] * (2 * steps), *[other * pairs] * max(0, steps - 1), last * pairs]

    @property
    def forward(self) -> list[float]:
        """Bytes of the forward pass: convolution, lengths of queries and keys, and the gated norm, too."""
        c = self.bytes
        outside = [2 * c * self.channels] * 2 + [2 * c * self.shared] * 3 + [4 * c * self.inner] * 2
        return [*outside, *self.inverse(8.5, 3.4, 3), *self.chunks]

    @property
    def again(self) -> list[float]:
        """Bytes of what the backward pass computes again."""
        c, scores = self.bytes, 4 * self.scores
        gate = [number * c * self.inner for number in (1.5, 2.5, 4, 4, 6)]
        outside = [2 * c * self.channels] * 2 + [2 * c * self.shared] * 2
        return [*outside, *gate, 8 * self.pairs + scores, *self.inverse(9, 3.8, 5), *self.chunks]

    @property
    def gradients(self) -> list[float]:
        """Bytes of gradients: of the gated norm, of what the loop's steps read, of the inverse, of keys and queries,
        and of the convolution."""
        c, pairs, scores = self.bytes, self.bytes * self.pairs, 4 * self.scores
        values, keys, shared = c * self.inner, c * self.keys, c * self.shared
        saved = [2 * c * self.width, *[2 * values] * 2, *[values] * 3]
        gate = [number * values for number in (2, 2, 3, 3, 3, 4, 4, 8, 11)]
        written = [4 * self.pairs + pairs + (c + 4) * self.inner] * 2 + [pairs + shared + keys] * 2
        of_loop = [2 * keys, 2 * keys, 2 * keys, 4 * keys, 3 * values]
        of_keys = [*[2 * shared + 2 * scores] * 4, *[number * keys for number in (1, 1, 2, 2, 2, 4.5)]]
        of_inverse = [number * 4 * self.pairs for number in (2, 3, 3, 2.5, 2.5, 6.75)]
        # XLA: a kernel for each tap, each of which reads and writes the sum in float32.
        conv = [(4 + 2 * c) * self.channels, *[(4 + c) * self.channels] * (self.taps - 1), 2.5 * c * self.channels]
        return [*saved, *gate, *written, *of_loop, *of_keys, *of_inverse, *conv, 8 * c * self.width]

    @property
    def passage(self) -> tuple[list[float], list[float]]:
        """Bytes of what context parallel ranks read of the states that come into their pieces, forward and backward:
        the loop's outputs in two parts, the product, and the sum."""
        values, keys = self.bytes * self.inner, self.bytes * self.keys
        forward = [values + keys, 2 * values, 2 * keys, keys + 3 * values, 4 * values]
        return forward, [*forward[:3], keys + values, keys + values, 2 * values, 2 * (values + keys)]


def delta_kernels(sizes: DeltaSizes, tokens: float, *, over_context: bool) -> ScanKernels:
    """Returns the kernels of a mixer; `tokens`: of a microbatch on the device."""
    more, back = sizes.passage if over_context else ([], [])
    passes = ([*sizes.forward, *more], [*sizes.again, *sizes.gradients, *back])
    forward, backward = (
        [*(EqualKernels(tokens * size) for size in each), EqualKernels(0, number)]
        for each, number in zip(passes, SMALL, strict=True)
    )
    return ScanKernels(forward, backward)
