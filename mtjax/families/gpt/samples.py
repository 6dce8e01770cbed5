"""GPT samples from an indexed dataset, token for token those of Megatron's `GPTDataset`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.text import Text

from mtjax.config import Config
from mtjax.data.cache import Cache, cached_arrays, check_room
from mtjax.data.corpus.indexed import IndexedDataset, checked_ids
from mtjax.data.samples.family import DOCUMENTS, FamilySamples, Share
from mtjax.data.samples.order import Concatenated
from mtjax.data.samples.sample import Bounds, Dataset, Sample
from mtjax.data.samples.styled import NO_LOSS, PLAIN, SPECIAL, styled
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.families.gpt.sample_index import document_index, plan_epochs, sample_index, shuffle_index

FILL = -1  # no token: what Megatron fills up with where the tokenizer has no token for it


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
      keep_partial: keep a last sample with fewer tokens, filled up with id 0, without loss on what is filled.
      extra_token: read one token more, as the label of the last; otherwise that label is 0, without loss.
    """

    sequence_length: int
    eod: int
    vocab_size: int
    seed: int = 1234
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    keep_partial: bool = False
    extra_token: bool = True


class GPTDataset:
    """Samples of `sequence_length` tokens from the sequences `begin` to `end` of an indexed dataset."""

    def __init__(
        self,
        tokens: IndexedDataset,
        bounds: Bounds,
        num_samples: int | None,
        options: GPTOptions,
        cache: Cache | None = None,
    ) -> None:
        """Builds the indices, or takes them from `cache`.

        Args:
          tokens: the corpus.
          bounds: first sequence, and one past the last.
          num_samples: samples that will be needed; there may be more. None goes through the text exactly once.
          options: what a sample looks like.
          cache: where the indices are kept; in memory when None.

        Raises:
          UserError: no sequences or no tokens between the bounds.
        """
        self.tokens, self.options = tokens, options
        begin, end = bounds
        total = int(tokens.lengths[begin:end].sum(dtype=np.int64))
        if total < 1 + options.extra_token:
            raise UserError(
                f"{tokens.prefix}: sequences {begin} to {end} of {len(tokens)} have {total} tokens, too few for a "
                "sample; give more text, or another --split"
            )
        self.plan = plan_epochs(
            total,
            options.sequence_length,
            num_samples,
            extra_token=options.extra_token,
            keep_partial=options.keep_partial,
        )
        self._load(bounds, cache)

    def _load(self, bounds: Bounds, cache: Cache | None) -> None:
        options, plan = self.options, self.plan
        random = np.random.RandomState(options.seed)

        def build(folder: Path | None) -> dict[str, np.ndarray]:
            passed = plan.epochs * (bounds[1] - bounds[0])
            what = f"the order of {plan.samples:,} samples in {plan.epochs:,} passes over the text"
            # Bytes in memory, then on disk. On disk a document is an int32, a sample a pair of int32 and its place in
            # the order, a uint32; memory also has the running sums of lengths, int64, and copies for shuffling.
            check_room(cache, 20 * passed + 8 * plan.samples, 4 * passed + 12 * plan.samples, what)
            documents = document_index(*bounds, plan, random)
            out = folder / "sample_index.npy" if folder else None
            samples = sample_index(
                self.tokens.lengths,
                documents,
                options.sequence_length,
                plan.samples,
                out,
                extra_token=options.extra_token,
            )
            order = shuffle_index(plan, random)
            return {"document_index": documents, "sample_index": samples, "shuffle_index": order}

        parts = {
            "corpus": self.tokens.fingerprint(),
            "bounds": bounds,
            # The plan, not the requested number: requests that need the same passes share an index.
            "plan": asdict(plan),
            "sequence_length": options.sequence_length,
            "seed": options.seed,
            "extra_token": options.extra_token,
        }
        indices = cached_arrays(cache, "gpt-index", parts, build)
        self.document_index = indices["document_index"]
        self.sample_index = indices["sample_index"]
        self.shuffle_index = indices["shuffle_index"]

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        text = self.text(int(self.shuffle_index[index]))
        return gpt_sample(text, self.options)

    def text(self, index: int) -> np.ndarray:
        """Returns the tokens of sample `index` before shuffling, padded with `FILL`: int32[sequence_length + extra]."""
        (first, offset), (last, end) = self.sample_index[index].tolist(), self.sample_index[index + 1].tolist()
        # A sample's last label is the first token of the next sample.
        end += self.options.extra_token
        if first == last:
            parts = [self.tokens.get(int(self.document_index[first]), offset, end - offset)]
        else:
            parts = [self.tokens.get(int(self.document_index[first]), offset)]
            parts += [self.tokens.get(int(self.document_index[i])) for i in range(first + 1, last)]
            parts += [self.tokens.get(int(self.document_index[last]), 0, end)]
        # An id beyond the vocabulary, of a corpus made with another tokenizer, would read any row of the table.
        text = checked_ids(parts, self.options.vocab_size, self.tokens.prefix)
        size = self.options.sequence_length + self.options.extra_token
        return np.pad(text, (0, size - len(text)), constant_values=FILL)


def gpt_sample(text: np.ndarray, options: GPTOptions) -> Sample:
    """Inputs, labels, loss mask and positions of `text`, int32[sequence_length + extra_token]."""
    tokens, labels = (text[:-1], text[1:]) if options.extra_token else (text, np.append(text[1:], np.int32(FILL)))
    ends = tokens == options.eod
    positions = np.arange(len(tokens), dtype=np.int32)
    # The end of a document belongs to the document; the next token starts the next one.
    starts = np.concatenate([[False], ends[:-1]])
    sample = {
        # An id that exists, so that the embedding's lookup stays inside the table; its loss is masked.
        "tokens": np.where(tokens == FILL, np.int32(0), tokens),
        "labels": np.where(labels == FILL, np.int32(0), labels),
        "loss_mask": (labels != FILL).astype(np.float32),
        "position_ids": positions,
    }
    if options.eod_mask_loss:
        # By the input, as in Megatron: the end of a document is learned as a label, what follows it is not.
        sample["loss_mask"][ends] = 0.0
    if options.reset_position_ids:
        # Minus the position of the newest start so far, in place of Megatron's loop.
        sample["position_ids"] = positions - np.maximum.accumulate(np.where(starts, positions, 0)).astype(np.int32)
    if options.reset_attention_mask:
        sample["segment_ids"] = np.cumsum(starts, dtype=np.int32)
    return sample


def open_gpt(config: Config, share: Share) -> Dataset:
    """Opens the GPT samples that a config describes, of a share of a corpus.

    Raises:
      UserError: the share has no text.
    """
    options = GPTOptions(
        sequence_length=config.model.sequence_length,
        eod=share.tokenizer.eod,
        vocab_size=share.tokenizer.vocab_size,
        seed=config.training.seed,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
        # Megatron keeps a partial sample of validation text only.
        keep_partial=share.split == "valid" and not config.data.drop_last_partial_validation_sequence,
        extra_token=config.data.add_extra_token_to_sequence,
    )
    return extended_gpt(share, options)


def extended_gpt(share: Share, options: GPTOptions) -> Dataset:
    """Opens the samples of a share: Megatron's for the first requested number, then further passes over its documents.

    Samples that earlier starts of the run requested keep their order. Each appended part is shuffled with its own seed,
    and begins when all passes before it are complete.

    Raises:
      UserError: the share has no text.
    """
    parts: list[Dataset] = []
    for number, total in enumerate((*share.earlier, share.num_samples)):
        done = sum(map(len, parts))
        # An earlier start requested more: its samples suffice.
        if parts and (total is None or total <= done):
            continue
        # With the first seed, appended passes would repeat the order of the first ones.
        seed = appended_seed(options.seed, number) if parts else options.seed
        wanted = None if total is None else total - done
        parts.append(GPTDataset(share.corpus, share.bounds, wanted, replace(options, seed=seed), share.cache))
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def appended_seed(seed: int, number: int) -> int:
    """Returns the seed of the passes that were appended to a run's order for its `number`-th number of samples."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def render(sample: Sample, tokenizer: Tokenizer) -> Text:
    """Renders the text, with ends of documents and tokens without loss in colour."""
    special = sample["tokens"] == tokenizer.eod
    styles = np.where(sample["loss_mask"] == 0, NO_LOSS, np.where(special, SPECIAL, PLAIN))
    return styled(sample["tokens"], styles, tokenizer)


SAMPLES = FamilySamples(DOCUMENTS, open_gpt, render, legend=(("end of document", SPECIAL), ("no loss", NO_LOSS)))
