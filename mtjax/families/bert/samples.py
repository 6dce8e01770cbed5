"""BERT samples: two runs of sentences, perhaps swapped, with masked n-grams of whole words; or one run alone, for a
model that does not learn the order of sentences.

As Megatron's `BERTMaskedWordPieceDataset`, section 5 of arXiv 1909.08053 (sentence order instead of next sentence).
Sample i draws from `seed + i`, so that any sample can be made alone.
"""

from dataclasses import dataclass

import numpy as np
from rich.text import Text

from mtjax.config import Config
from mtjax.config.sizes import most_masked
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.family import SENTENCES, FamilySamples, Share
from mtjax.data.samples.masking import Span, choose_spans, harmonic, whole_words, word_starts
from mtjax.data.samples.sample import Bounds, Sample
from mtjax.data.samples.sentence_runs import RunOptions, SentenceRuns
from mtjax.data.samples.styled import MASKED, PLAIN, SECOND, SPECIAL
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

# Megatron's label of tokens without loss.
IGNORED = -1
# [CLS] and two [SEP], also for a single run, which has one [SEP]: runs are as long in both.
SPECIAL_TOKENS = 3
LONGEST_NGRAM = 3


@dataclass(frozen=True)
class BertOptions:
    """What a BERT sample looks like.

    Attributes:
      sequence_length: tokens in a sample, special ones and padding included.
      seed: of order, pairs and masks.
      short_probability: share of samples with a random shorter target length.
      sentence_order: whether a sample has two runs, swapped or not; otherwise it has one, of token type 0.
    """

    sequence_length: int
    seed: int = 1234
    short_probability: float = 0.1
    sentence_order: bool = True


class BertDataset(SentenceRuns):
    """Sentence pairs with masks."""

    def __init__(
        self,
        sentences: IndexedDataset,
        bounds: Bounds,
        num_samples: int | None,
        tokenizer: Tokenizer,
        options: BertOptions,
    ) -> None:
        """Cuts the documents into runs.

        Raises:
          UserError: the vocabulary lacks BERT's special tokens, or no document can be used.
        """
        ids = {name: tokenizer.special(name) for name in ("[CLS]", "[SEP]", "[MASK]", "[PAD]")}
        missing = [name for name, index in ids.items() if index is None]
        if missing:
            lacking = ", ".join(missing)
            raise UserError(f"the vocabulary lacks {lacking}, which BERT needs: give --tokenizer bert:FILE")
        self.cls, self.sep, self.mask, self.pad = (int(index or 0) for index in ids.values())
        self.options = options
        self._starts = word_starts(tokenizer)
        self._draw = harmonic(LONGEST_NGRAM)
        fewest = 2 if options.sentence_order else 1
        runs = RunOptions(options.sequence_length - SPECIAL_TOKENS, fewest, options.short_probability)
        super().__init__(sentences, bounds, num_samples, tokenizer.vocab_size, runs, options.seed)

    def __getitem__(self, index: int) -> Sample:
        """Returns one sample.

        Returns:
          `tokens` int32[s] with masks, `labels` int32[s] (-1 where nothing is to guess), `loss_mask` float32[s],
          `token_types` int32[s] (0 in the first run, 1 in the second), `padding_mask` int32[s] (1 on tokens), and
          `sentence_order` int32[] (1 when the runs are swapped; not of samples with one run).
        """
        text, lengths, target, random = self.run(index)
        if not self.options.sentence_order:
            # Megatron cuts a single run by the rule of pairs, too, which draws from which end tokens are cut.
            text, _ = truncate_pair(text, text[:0], target, random)
            tokens = np.concatenate([[self.cls], text, [self.sep]]).astype(np.int32)
            return self._padded(*self._masked(tokens, random), np.zeros(len(tokens), np.int32))
        # At a sentence boundary; with two sentences there is one, for which Megatron draws nothing.
        pivot = random.randint(1, len(lengths)) if len(lengths) > 2 else 1
        first, second = np.split(text, [lengths[:pivot].sum()])
        swapped = bool(random.random_sample() < 0.5)
        if swapped:
            first, second = second, first
        first, second = truncate_pair(first, second, target, random)
        tokens = np.concatenate([[self.cls], first, [self.sep], second, [self.sep]]).astype(np.int32)
        # [CLS] and the first [SEP] belong to the first run.
        types = np.repeat(np.array([0, 1], np.int32), [len(first) + 2, len(second) + 1])
        return self._padded(*self._masked(tokens, random), types) | {"sentence_order": np.array(swapped, np.int32)}

    def _masked(self, tokens: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        special = (tokens == self.cls) | (tokens == self.sep)
        words = whole_words(tokens, self._starts, special)
        spans = choose_spans(words, most_masked(len(tokens)), self._draw, random)
        return mask_tokens(tokens, spans, self.mask, self.vocab_size, random)

    def _padded(self, tokens: np.ndarray, labels: np.ndarray, types: np.ndarray) -> Sample:
        size = self.options.sequence_length
        pad = size - len(tokens)
        labels = np.pad(labels, (0, pad), constant_values=IGNORED)
        return {
            "tokens": np.pad(tokens, (0, pad), constant_values=self.pad),
            "labels": labels,
            "loss_mask": (labels != IGNORED).astype(np.float32),
            "token_types": np.pad(types, (0, pad)),
            "padding_mask": (np.arange(size) < len(tokens)).astype(np.int32),
        }


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Takes tokens off the longer side, at its front or back by coin, until both have `length` together."""
    (a, b), (c, d) = (0, len(first)), (0, len(second))
    for front in random.random_sample(max(0, len(first) + len(second) - length)) < 0.5:
        if b - a > d - c:
            a, b = (a + 1, b) if front else (a, b - 1)
        else:
            c, d = (c + 1, d) if front else (c, d - 1)
    return first[a:b], second[c:d]


def mask_tokens(
    tokens: np.ndarray, spans: list[Span], mask: int, vocab_size: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Masks tokens in `spans` (80% mask, 10% any token, 10% unchanged); returns the tokens and labels, -1 elsewhere."""
    labels = np.full(len(tokens), IGNORED, np.int32)
    positions = np.concatenate([np.arange(a, b) for a, b in spans]) if spans else np.empty(0, np.int64)
    labels[positions] = tokens[positions]
    coin = random.random_sample(len(positions))
    other = random.randint(0, vocab_size, len(positions))
    hidden = tokens.copy()
    # BERT's 80% [MASK], 10% random and 10% unchanged tokens (arXiv 1810.04805): the model can't know which were chosen.
    hidden[positions] = np.where(coin < 0.8, mask, np.where(coin < 0.9, other, tokens[positions]))
    return hidden, labels


def open_bert(config: Config, share: Share) -> BertDataset:
    """Opens the BERT samples that a config describes, of a share of a corpus.

    Raises:
      UserError: the vocabulary lacks BERT's special tokens, or no document can be used.
    """
    model, seed = config.model, config.training.seed
    options = BertOptions(model.sequence_length, seed, sentence_order=model.sentence_order)
    return BertDataset(share.corpus, share.bounds, share.num_samples, share.tokenizer, options)


def render(sample: Sample, tokenizer: Tokenizer) -> Text:
    """Renders the tokens, masked ones with their labels, the two runs of sentences in different colours."""
    specials = [i for name in ("[CLS]", "[SEP]", "[PAD]") if (i := tokenizer.special(name)) is not None]
    used = int(sample["padding_mask"].sum())
    is_swapped = "sentence_order" in sample and sample["sentence_order"]
    text = Text("the second run came first in the text\n" if is_swapped else "in the order of the text\n")
    tokens, labels, types = (sample[name][:used].tolist() for name in ("tokens", "labels", "token_types"))
    for token, label, kind in zip(tokens, labels, types, strict=True):
        if label != IGNORED:
            text.append(f" {tokenizer.token(token)}:{tokenizer.token(label)}", MASKED)
        else:
            style = SPECIAL if token in specials else SECOND if kind else PLAIN
            name = tokenizer.token(token)
            text.append(name[2:] if name.startswith("##") else f" {name}", style)
    return text


SAMPLES = FamilySamples(
    SENTENCES,
    open_bert,
    render,
    legend=(("special", SPECIAL), ("hidden:to guess", MASKED), ("first run", PLAIN), ("second run", SECOND)),
)
