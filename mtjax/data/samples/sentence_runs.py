"""Runs of sentences for BERT and T5: which sentences make a sample, as Megatron's `build_mapping` cuts.

A run takes sentences until it has its target length, never leaves a single one behind, and never crosses documents.
"""

from dataclasses import dataclass

import numpy as np

from mtjax.data.cache import check_room
from mtjax.data.corpus.indexed import IndexedDataset, checked_ids
from mtjax.data.samples.sample import Bounds
from mtjax.errors import UserError

# LONG_SENTENCE_LEN in Megatron's helpers.cpp: a document with a longer sentence is not used.
LONGEST_SENTENCE = 512


@dataclass(frozen=True)
class RunOptions:
    """How documents are cut into runs.

    Attributes:
      max_length: tokens of a full run.
      min_sentences: fewest sentences of a run; documents with fewer give none.
      short_probability: share of runs whose target is drawn from 2..max_length, so that short inputs are seen too.
    """

    max_length: int
    min_sentences: int
    short_probability: float = 0.1


def cut_runs(
    lengths: np.ndarray, documents: np.ndarray, options: RunOptions, random: np.random.RandomState
) -> np.ndarray:
    """Cuts all documents into runs at the same time: the loop is as long as the longest document has runs.

    Args:
      lengths: int32[sentences], tokens of each.
      documents: int64[documents + 1], first sentence of each document and the end of the last; may start anywhere.
      options: lengths and probabilities.
      random: source of short targets.

    Returns:
      int64[runs, 3]: first sentence, one past the last, and the target length, in the order of the text.
    """
    begin, end = int(documents[0]), int(documents[-1])
    tokens = np.concatenate([[0], np.cumsum(lengths[begin:end], dtype=np.int64)])
    too_long = np.concatenate([[0], np.cumsum(lengths[begin:end] > LONGEST_SENTENCE, dtype=np.int64)])
    starts, stops = documents[:-1] - begin, documents[1:] - begin
    usable = (stops - starts >= options.min_sentences) & (too_long[stops] == too_long[starts])
    start, stop = starts[usable], stops[usable]
    rounds = []
    while len(start):
        # Drawn round by round, not document by document: the lengths differ from Megatron's, but their distribution is
        # the same.
        target = _targets(len(start), options, random)
        # The first sentence end at which the run has both its tokens and its sentences.
        cut = np.searchsorted(tokens, tokens[start] + target, side="left")
        cut = np.maximum(cut, start + options.min_sentences)
        # As in Megatron, one sentence that is left joins the run: alone it would be no pair of segments for BERT.
        cut = np.where(stop - cut > 1, cut, stop)
        rounds.append(np.stack([start + begin, cut + begin, target], axis=1))
        left = cut < stop
        start, stop = cut[left], stop[left]
    runs = np.concatenate(rounds) if rounds else np.empty((0, 3), np.int64)
    # In the order of the text, not of the rounds.
    return runs[np.argsort(runs[:, 0], kind="stable")]


def _targets(count: int, options: RunOptions, random: np.random.RandomState) -> np.ndarray:
    short = random.random_sample(count) < options.short_probability
    drawn = random.randint(2, options.max_length + 1, count)
    return np.where(short, drawn, options.max_length)


def sample_runs(
    lengths: np.ndarray, documents: np.ndarray, options: RunOptions, num_samples: int | None, seed: int
) -> np.ndarray:
    """Returns at least `num_samples` runs, each pass over the documents cut and shuffled anew: int64[runs, 3].

    Those of one pass when `num_samples` is None; none where no document can be used.
    """
    if options.max_length < 2:
        raise UserError(f"samples have {options.max_length} tokens besides special ones: raise --sequence-length")
    if num_samples is not None:
        # Rows of 24 bytes, of which `concatenate` holds two copies.
        check_room(None, 48 * num_samples, 0, f"the order of {num_samples:,} samples")
    random = np.random.RandomState(seed)
    passes, total = [], 0
    while not passes or (num_samples is not None and total < num_samples):
        runs = cut_runs(lengths, documents, options, random)
        if len(runs) == 0:
            return runs
        random.shuffle(runs)
        passes.append(runs)
        total += len(runs)
    return np.concatenate(passes)


class SentenceRuns:
    """Runs of sentences from documents `bounds[0]` to `bounds[1]` of a dataset that has a sequence per sentence.

    The samples of BERT and T5 derive from it.
    """

    def __init__(
        self,
        sentences: IndexedDataset,
        bounds: Bounds,
        num_samples: int | None,
        vocab_size: int,
        options: RunOptions,
        seed: int,
    ) -> None:
        """Cuts the documents into runs.

        Args:
          sentences: the corpus.
          bounds: first document, and one past the last.
          num_samples: samples that will be needed; there may be more. None goes through the text exactly once.
          vocab_size: ids of the text are below this.
          options: how the documents are cut.
          seed: of the order of the runs; sample i draws from `seed + i`.

        Raises:
          UserError: no document can be used.
        """
        self.sentences, self.vocab_size, self._seed = sentences, vocab_size, seed
        documents = sentences.documents[bounds[0] : bounds[1] + 1]
        self.runs = sample_runs(sentences.lengths, documents, options, num_samples, seed)
        if len(self.runs) == 0:
            fewest = options.min_sentences
            raise UserError(
                f"{sentences.prefix}: none of the documents {bounds[0]} to {bounds[1]} has at least {fewest} "
                f"sentence{'s' * (fewest > 1)}, all of at most {LONGEST_SENTENCE} tokens; was it made with "
                "--split-sentences?"
            )

    def __len__(self) -> int:
        return len(self.runs)

    def run(self, index: int) -> tuple[np.ndarray, np.ndarray, int, np.random.RandomState]:
        """Returns the text of sample `index`, its sentences' lengths, its target length and its random generator.

        Raises:
          UserError: a token is not in the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin, end, target = self.runs[index].tolist()
        text = checked_ids([self.sentences.get(i) for i in range(begin, end)], self.vocab_size, self.sentences.prefix)
        return text, self.sentences.lengths[begin:end], target, np.random.RandomState((self._seed + index) % 2**32)
