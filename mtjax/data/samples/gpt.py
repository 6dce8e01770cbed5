"""GPT samples from an indexed dataset, token for token those of Megatron's `GPTDataset`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mtjax.data.cache import cached_folder
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.gpt_index import document_index, plan_epochs, sample_index, shuffle_index
from mtjax.errors import UserError

Sample = dict[str, np.ndarray]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class GPTOptions:
    """What a GPT sample looks like.

    Attributes:
      sequence_length: tokens in a sample.
      eod: the id that ends a document.
      vocab_size: ids must be below this.
      seed: of the order of documents and samples.
      reset_position_ids: count positions from 0 after each end of document.
      reset_attention_mask: give `segment_ids`, one per document in the sample; attention stays within a segment.
      eod_mask_loss: no loss where the input is an end of document.
    """

    sequence_length: int
    eod: int
    vocab_size: int
    seed: int = 1234
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


class GPTDataset:
    """Samples of `sequence_length` tokens from the sequences `begin` to `end` of an indexed dataset."""

    def __init__(
        self, tokens: IndexedDataset, bounds: tuple[int, int], num_samples: int, options: GPTOptions, cache: Path | None
    ) -> None:
        """Builds the indices, or takes them from `cache`.

        Args:
          tokens: the corpus.
          bounds: first sequence, and one past the last.
          num_samples: samples that will be needed; there may be more.
          options: what a sample looks like.
          cache: folder of prepared data; indices stay in memory when None.

        Raises:
          UserError: no sequences or no tokens between the bounds.
        """
        self.tokens, self.options = tokens, options
        begin, end = bounds
        total = int(tokens.lengths[begin:end].sum(dtype=np.int64))
        if total < 2:
            raise UserError(
                f"{tokens.prefix}: sequences {begin} to {end} of {len(tokens)} have {total} tokens, too few for a "
                "sample; give more text, or another --split"
            )
        self.plan = plan_epochs(total, options.sequence_length, num_samples)
        self._load(bounds, cache)

    def _load(self, bounds: tuple[int, int], cache: Path | None) -> None:
        options, plan = self.options, self.plan
        random = np.random.RandomState(options.seed)
        if cache is None:
            self.document_index = document_index(*bounds, plan, random)
            lengths = self.tokens.lengths
            self.sample_index = sample_index(lengths, self.document_index, options.sequence_length, plan.samples)
            self.shuffle_index = shuffle_index(plan, random)
            return

        def build(folder: Path) -> None:
            documents = document_index(*bounds, plan, random)
            np.save(folder / "document_index.npy", documents)
            out = folder / "sample_index.npy"
            sample_index(self.tokens.lengths, documents, options.sequence_length, plan.samples, out)
            np.save(folder / "shuffle_index.npy", shuffle_index(plan, random))

        parts = {
            "corpus": self.tokens.fingerprint(),
            "bounds": bounds,
            "plan": asdict(plan),
            "sequence_length": options.sequence_length,
            "seed": options.seed,
        }
        folder = cached_folder(cache, "gpt-index", parts, build)
        self.document_index = np.load(folder / "document_index.npy", mmap_mode="r")
        self.sample_index = np.load(folder / "sample_index.npy", mmap_mode="r")
        self.shuffle_index = np.load(folder / "shuffle_index.npy", mmap_mode="r")

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        text = self.text(int(self.shuffle_index[index]))
        return gpt_sample(text, self.options)

    def text(self, index: int) -> np.ndarray:
        """int32[sequence_length + 1]: the tokens of sample `index` before shuffling, its label's last one included."""
        (first, offset), (last, end) = self.sample_index[index].tolist(), self.sample_index[index + 1].tolist()
        if first == last:
            parts = [self.tokens.get(int(self.document_index[first]), offset, end - offset + 1)]
        else:
            parts = [self.tokens.get(int(self.document_index[first]), offset)]
            parts += [self.tokens.get(int(self.document_index[i])) for i in range(first + 1, last)]
            parts += [self.tokens.get(int(self.document_index[last]), 0, end + 1)]
        text = np.concatenate(parts).astype(np.int32)
        check_ids(text, self.options.vocab_size, self.tokens.prefix)
        return text


def check_ids(ids: np.ndarray, vocab_size: int, prefix: Path) -> None:
    """Refuses ids that the vocabulary doesn't have: a wrong tokenizer or a damaged file, which would train on garbage.

    Raises:
      UserError: names the first one.
    """
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        raise UserError(
            f"{prefix}.bin holds the token {ids[int(np.argmax(wrong))]}, and the vocabulary has {vocab_size}: it was "
            "made with another tokenizer, or is damaged"
        )


def gpt_sample(text: np.ndarray, options: GPTOptions) -> Sample:
    """Inputs, labels, loss mask and positions of `text`, int32[sequence_length + 1]."""
    tokens, labels = text[:-1], text[1:]
    ends = tokens == options.eod
    positions = np.arange(len(tokens), dtype=np.int32)
    # The end of a document belongs to the document; the next token starts the next one.
    starts = np.concatenate([[False], ends[:-1]])
    sample = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": np.ones(len(tokens), np.float32),
        "position_ids": positions,
    }
    if options.eod_mask_loss:
        sample["loss_mask"][ends] = 0.0
    if options.reset_position_ids:
        sample["position_ids"] = positions - np.maximum.accumulate(np.where(starts, positions, 0)).astype(np.int32)
    if options.reset_attention_mask:
        sample["segment_ids"] = np.cumsum(starts, dtype=np.int32)
    return sample


def stack(samples: Sequence[Sample]) -> Sample:
    """Samples as one batch: each array gets a leading axis."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
