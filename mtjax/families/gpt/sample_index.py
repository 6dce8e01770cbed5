"""The order of GPT samples: the same document, sample and shuffle indices as Megatron-LM, built without a loop.

Documents are shuffled, concatenated and cut into samples of `sequence_length` tokens, each with one more for the label
(so neighbours share a token), and the samples are shuffled. See `megatron/core/datasets/gpt_dataset.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.cache import reserve

# Megatron's constant.
SEPARATE_BELOW = 0.80
# Entries that are computed at a time: 32 MB of int64.
CHUNK = 1 << 22


@dataclass(frozen=True)
class EpochPlan:
    """How many samples there are, and whether the last pass over the documents is shuffled separately.

    Attributes:
      epochs: passes over the documents.
      samples: samples that all passes give; at least the requested number.
      first_samples: samples of all passes but the last, when that is shuffled separately; otherwise `samples`.
    """

    epochs: int
    samples: int
    first_samples: int

    @property
    def separate(self) -> bool:
        """Whether the last pass is shuffled separately, because only a small part of it is needed."""
        return self.first_samples != self.samples


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    *,
    extra_token: bool = True,
    keep_partial: bool = False,
) -> EpochPlan:
    """Returns the fewest passes over `tokens_per_epoch` tokens that give `num_samples` samples; one pass when None.

    With several passes, of which the last gives fewer than 80% of its samples, the last is shuffled separately, so
    that no document is seen an extra time before all others.

    Args:
      tokens_per_epoch: tokens in one pass, at least 1.
      sequence_length: tokens in a sample.
      num_samples: samples that are needed.
      extra_token: a sample reads one token more, for the label of its last.
      keep_partial: the last sample may have fewer tokens.
    """
    extra = int(extra_token)
    wanted = 1 if num_samples is None else num_samples * sequence_length + extra
    epochs = max(1, -(-wanted // tokens_per_epoch))
    full = (epochs * tokens_per_epoch - extra) // sequence_length
    samples = _with_partial(epochs * tokens_per_epoch - extra, sequence_length) if keep_partial else full
    if num_samples is None or epochs == 1:
        return EpochPlan(epochs, samples, samples)
    # Samples of all passes but the last, as Megatron counts: one that goes on into the last pass belongs to that pass.
    first = ((epochs - 1) * tokens_per_epoch - extra) // sequence_length
    per_epoch = (tokens_per_epoch - extra) // sequence_length
    separate = num_samples - first < int(SEPARATE_BELOW * per_epoch)
    return EpochPlan(epochs, samples, first if separate else samples)


def _with_partial(tokens: int, sequence_length: int) -> int:
    """Returns the number of samples in `tokens`, including one that is cut short.

    In 32-bit floats, as Megatron divides: beyond 2^24 tokens it may count one more or less than there are.
    """
    return int(np.ceil(np.float32(tokens) / np.float32(sequence_length)))


def document_index(begin: int, end: int, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """Returns int32[epochs x documents]: documents `begin`..`end` once per pass, shuffled over all passes together.

    A last pass that is separate is shuffled by itself and comes last.
    """
    documents = np.arange(begin, end, dtype=np.int32)
    # The draws are Megatron's, in its order (documents of all passes, documents of the last, then samples): one more or
    # less would give another order of samples with the same seed.
    together = np.tile(documents, plan.epochs - plan.separate)
    random.shuffle(together)
    if not plan.separate:
        return together
    random.shuffle(documents)
    return np.concatenate([together, documents])


def sample_index(
    lengths: np.ndarray,
    documents: np.ndarray,
    sequence_length: int,
    samples: int,
    out: Path | None = None,
    *,
    extra_token: bool = True,
) -> np.ndarray:
    """Returns where each sample starts, and where the last one ends.

    Sample k starts at token `k x sequence_length` of the concatenated documents. That is a binary search in the running
    sum of lengths, done in pieces so that memory stays bounded.

    Args:
      lengths: int32[sequences], tokens of every document of the corpus.
      documents: the document index.
      sequence_length: tokens in a sample.
      samples: how many.
      out: a `.npy` file to write; in memory when None.
      extra_token: a sample reads one token more. Without it an entry is where the sample before ends, which may be the
        end of a document.

    Returns:
      [samples + 1, 2]: position in `documents` and offset in tokens, int32, or int64 where that is too small.
    """
    fits = len(documents) < 2**31 and (len(lengths) == 0 or int(lengths.max()) < 2**31)
    dtype = np.dtype(np.int32 if fits else np.int64)
    shape = (samples + 1, 2)
    index: np.ndarray = np.empty(shape, dtype) if out is None else np.lib.format.open_memmap(out, "w+", dtype, shape)
    if out is not None:
        reserve(out)
    # int64: the tokens of all passes exceed 2^31 long before documents do.
    edges = np.zeros(len(documents) + 1, np.int64)
    ends = edges[1:]
    total = 0
    for at in range(0, len(documents), CHUNK):
        piece = ends[at : at + CHUNK]
        np.cumsum(lengths[documents[at : at + CHUNK]], dtype=np.int64, out=piece)
        piece += total
        total = int(piece[-1])
    for at in range(0, samples + 1, CHUNK):
        tokens = np.arange(at, min(at + CHUNK, samples + 1), dtype=np.int64) * sequence_length
        # The first document that ends after the token holds it: empty documents end where they start.
        document = np.searchsorted(ends, tokens, side="right" if extra_token else "left")
        beyond = tokens > total - extra_token  # a partial sample ends with the last document
        document[beyond] = len(documents) - 1
        index[at : at + CHUNK, 0] = document
        index[at : at + CHUNK, 1] = np.where(beyond, total - extra_token, tokens) - edges[document]
    index[0] = 0  # the walk starts at the first document, be it empty
    return index


def shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """Returns the order of samples, uint32[samples] (else int64); a last pass shuffled separately stays last."""
    # numpy's shuffle draws alike for both types; Megatron chooses them so.
    dtype: type[Any] = np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.samples, dtype=dtype)
    random.shuffle(order[: plan.first_samples])
    if plan.separate:
        random.shuffle(order[plan.first_samples :])
    return order
