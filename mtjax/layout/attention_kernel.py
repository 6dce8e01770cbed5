"""Choice of a run's attention kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mtjax.config import Config
from mtjax.config.families import is_decoder, kind_of
from mtjax.config.sizes import head_dim, windowed_layers
from mtjax.layout.mesh import MeshShape

Kernel = Literal["cudnn", "pallas", "blocks", "xla"]
"""cuDNN's flash attention; our own; XLA's, with the scores of a few queries at a time; XLA's, with all scores."""

ContextMethod = Literal["ring", "all-gather"]
"""How context parallel ranks exchange keys and values."""

Capability = tuple[int, int]
"""Compute capability of GPUs."""
HOPPER: Capability = (9, 0)
"""cuDNN's limits are wider from here on; assumed where the GPUs are not known."""

AMPERE: Capability = (8, 0)
NO_PACKED: Capability = (11, 0)
"""From here on cuDNN's kernels of packed documents are not known to have a backward pass."""
PACKED_TOKENS, PACKED_WIDTHS = range(2048, 8192 + 1, 64), (64, 128)
"""Tokens of samples and widths of heads for which `auto` takes cuDNN's kernel for documents: shorter samples often have
more of them than `documents_at_most`, and what it saves for the backward pass grows with the square of the sample."""
LONGEST_WHOLE, LARGEST_WHOLE = 8192, 2**30
"""Tokens of a sample, and its scores on a rank, up to which all scores are computed at once; blocks of more take less
time (docs/notes/speed.md)."""
# Finite, so that the difference of two masked scores is 0 and not NaN.
HIDDEN_SCORE = -1e30
"""Score of a masked key, and log-sum of a row without keys: its exponential is 0."""
EITHER, WINDOWED = "either", "windowed"
"""Scopes of a branch between two attention kernels: of usual and of other samples, and of layers with a window and
without."""

PALLAS_BLOCK = 64
"""Queries and keys of a block of the kernel `pallas`."""
PALLAS_WIDEST = 128
"""Widest heads of that kernel: a block of wider ones does not fit a multiprocessor's registers."""
MEASURED_WIDTH = 64
"""Heads for which it was measured on a GPU."""
FORWARD, KEYS_BACKWARD, QUERIES_BACKWARD = "attention_forward", "attention_backward_keys", "attention_backward_queries"
"""Names of that kernel's parts in a compiled program."""
CAUSAL = "_causal"
"""Ends these names where attention is causal."""
QUERIES_AT_A_TIME = 512
"""Queries whose scores XLA's kernel holds at a time with context parallelism."""
SCORES_AT_A_TIME, LEAST_QUERIES_AT_A_TIME = 2**25, 64
"""Scores of a rank that the kernel `blocks` holds at a time, if these are of at least so many queries per head."""
SPANS = 4
"""Spans of a causal sample that the kernel `blocks` attends to with the keys up to their ends: 5/8 of all scores."""


@dataclass(frozen=True)
class ContextParallelism:
    """How attention is computed over context parallel ranks."""

    method: ContextMethod
    keeps_documents_apart: bool = False
    """Whether attention is masked at document boundaries."""
    sends_rounded: bool = False
    """Whether the ring sends gradients of keys in the compute dtype. XLA: in a ring of two with cuDNN's kernel it moves
    the conversion to float32 after the collective-permute."""


def choose_kernel(
    config: Config, platform: str, capability: Capability = HOPPER, mesh: MeshShape | None = None
) -> tuple[Kernel, str | None]:
    """Chooses the attention kernel of a run.

    Args:
      config: the run.
      platform: of its devices.
      capability: of its GPUs.
      mesh: where known; without context parallelism when None.

    Returns:
      The kernel, and if it is not the requested one, the reason.
    """
    requested, context = config.model.attention, 1 if mesh is None else mesh.context
    if requested == "xla":
        return "xla", None
    reason = next(_without_flash(config), None)
    if requested == "blocks":
        return ("xla", reason) if reason else ("blocks", None)
    if requested == "pallas":
        here = reason or next(_not_pallas(config, platform, capability, context), None)
        return ("xla" if reason else "blocks", here) if here else ("pallas", None)
    if requested == "auto" and not reason and _gains_by_pallas(config, platform, capability, context):
        return "pallas", None
    # What rules out cuDNN on all GPUs leaves `xla`, as the other kernels are no better there; what rules it out for
    # this run or these GPUs leaves `blocks`, unless all scores together are small.
    never = next(_never_cudnn(config, platform), None) or reason
    here = never or next(_not_cudnn(config, capability, context), None)
    if here is None:
        return "cudnn", None
    tokens, ways = config.model.sequence_length, 1 if mesh is None else mesh.model
    is_small = tokens <= LONGEST_WHOLE and config.model.num_heads / ways * tokens**2 <= LARGEST_WHOLE
    is_whole = never is not None or is_small
    return "xla" if is_whole else "blocks", here if requested == "cudnn" else None


def _without_flash(config: Config) -> Iterator[str]:
    """Yields what no kernel does that keeps only some of the scores."""
    model = config.model
    if kind_of(model) == "encoder-decoder":
        yield f"it adds no bias to the scores, and family is {model.family}"
    if kind_of(model) == "retrieval":
        yield f"it has no cross-attention, and family is {model.family}"


def _never_cudnn(config: Config, platform: str) -> Iterator[str]:
    """Yields what rules out cuDNN's kernel on all GPUs, where others are not better than `xla`."""
    model, training = config.model, config.training
    if platform not in ("gpu", "cuda"):
        yield "it runs on GPUs only"
    if model.attention_dropout > 0:
        yield f"it has no dropout on probabilities, and attention_dropout is {model.attention_dropout}"
    if training.compute_dtype == "float32":
        yield f"it needs a 16-bit compute_dtype, and compute_dtype is {training.compute_dtype}"
    if training.deterministic:
        yield "its backward pass is not reproducible, and deterministic is true"
    if not is_decoder(model):
        yield f"it is causal and does not mask padding, and family is {model.family}"


def _without_largest_scores(config: Config) -> Iterator[str]:
    """Yields what needs the largest scores, which kernels that keep scores to themselves do not return."""
    if config.optimizer.qk_clip:
        yield f"it does not keep the largest scores, and qk_clip is {config.optimizer.qk_clip:g}"


def _not_cudnn(config: Config, capability: Capability, context: int) -> Iterator[str]:
    """Yields what rules out cuDNN's kernel on these GPUs."""
    yield from _without_largest_scores(config)
    width, widest, tokens = head_dim(config.model), 256 if capability >= HOPPER else 128, config.model.sequence_length
    if width % 8 or width > widest:
        yield f"it needs head sizes up to {widest} that are multiples of 8, and this one is {width}"
    if config.model.kv_lora_rank and (capability < HOPPER or context > 1 or config.data.reset_attention_mask):
        yield (
            "it has values narrower than keys on Hopper and newer only, without context parallelism and without "
            "reset_attention_mask (kv_lora_rank)"
        )
    if config.data.reset_attention_mask and context > 1:
        yield "it has no mask at document boundaries with context parallelism (reset_attention_mask)"
    if config.data.reset_attention_mask and not HOPPER <= capability < NO_PACKED:
        yield "it has a mask at document boundaries on GPUs of compute capability 9 and 10 only (reset_attention_mask)"
    is_windowed = any(windowed_layers(config.model))
    # Compared on an H100 for up to 8 documents in 2,048 tokens and heads of 128 (docs/gpu.md).
    is_chosen = (
        capability == HOPPER
        and tokens in PACKED_TOKENS
        and width in PACKED_WIDTHS
        and not is_windowed
        and config.finetuning.task != "chat"  # short conversations are often more than `documents_at_most`
    )
    if config.data.reset_attention_mask and config.model.attention != "cudnn" and not is_chosen:
        yield "its mask at document boundaries must be asked for"
    if is_windowed and context > 1:
        yield "it has no sliding window with context parallelism (attention_window)"
    if config.model.position == "alibi":
        yield "it adds no bias to the scores, and position is alibi"
    if config.model.attention_softcap is not None:
        yield f"it has no cap of scores, and attention_softcap is {config.model.attention_softcap}"
    if config.model.attention_sinks and (context > 1 or config.data.reset_attention_mask):
        yield "it has no sinks with context parallelism or within documents (attention_sinks)"


def _not_pallas(config: Config, platform: str, capability: Capability, context: int) -> Iterator[str]:
    """Yields what rules out the kernel `pallas`, for which `blocks` takes its place: its masks are the same."""
    model = config.model
    yield from _without_largest_scores(config)
    if platform not in ("gpu", "cuda"):
        yield "it runs on GPUs only"
    if capability < AMPERE:
        yield "it needs GPUs of compute capability 8.0 or newer"
    if config.training.compute_dtype == "float32":
        yield "it needs a 16-bit compute_dtype, and compute_dtype is float32"
    if model.sequence_length % PALLAS_BLOCK:
        yield f"it needs samples of a multiple of {PALLAS_BLOCK} tokens, and sequence_length is {model.sequence_length}"
    if head_dim(model) > PALLAS_WIDEST:
        yield f"it needs head sizes up to {PALLAS_WIDEST}, and this one is {head_dim(model)}"
    if context > 1:
        yield "it has no context parallelism"
    without = {
        "latent attention (kv_lora_rank)": model.kv_lora_rank,
        "sliding window (attention_window)": any(windowed_layers(model)),
        "bias, and position is alibi": model.position == "alibi",
        "cap of scores (attention_softcap)": model.attention_softcap is not None,
        "sinks (attention_sinks)": model.attention_sinks,
    }
    yield from (f"it has no {name}" for name, is_set in without.items() if is_set)


def _gains_by_pallas(config: Config, platform: str, capability: Capability, context: int) -> bool:
    """Returns whether `auto` takes the kernel `pallas` for its dropout: for heads and GPUs that were measured
    (docs/gpu.md)."""
    model = config.model
    was_measured = (
        capability == HOPPER
        and is_decoder(model)
        and model.sequence_length <= LONGEST_WHOLE
        and head_dim(model) == MEASURED_WIDTH
        and model.num_kv_heads in (None, model.num_heads)
        and not config.data.reset_attention_mask
        and not config.training.deterministic
    )
    return model.attention_dropout > 0 and was_measured and not any(_not_pallas(config, platform, capability, context))


def padded_width(width: int) -> int:
    """Returns the width with which the kernel `pallas` computes heads of a width: Triton's sizes are powers of two."""
    # Triton's matmuls need at least 16.
    return max(16, 1 << (width - 1).bit_length())


def queries_at_a_time(rows: float, keys: float) -> int:
    """Returns the queries of a sample whose scores the kernel `blocks` holds at a time: a power of two.

    Args:
      rows: samples times heads of a rank.
      keys: of a sample.
    """
    queries = QUERIES_AT_A_TIME
    while queries > LEAST_QUERIES_AT_A_TIME and queries * rows * keys > SCORES_AT_A_TIME:
        queries //= 2
    return queries


def spans_of(queries: int, at_a_time: int) -> int:
    """Returns the spans of a causal sample of which the kernel `blocks` leaves out the keys after each span.

    Args:
      queries: of a sample.
      at_a_time: of these whose scores are held at a time.
    """
    # Shorter samples gain nothing: a span must have more queries than are computed at a time.
    return SPANS if queries % (SPANS * at_a_time) == 0 and queries > SPANS * at_a_time else 1


def documents_at_most(tokens: int) -> int:
    """Returns the documents of a sample for which cuDNN's kernel has statistics; samples with more are attended to in
    blocks by XLA's."""
    # Memory for statistics is proportional to this number: enough for documents of 256 tokens on average.
    return max(tokens // 256, 2)
