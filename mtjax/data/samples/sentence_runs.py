"""Runs of sentences for BERT and T5: which sentences make a sample, as Megatron's `build_mapping` cuts.

A run takes sentences until it has its target length, never leaves a single one behind, and never crosses documents.
"""

from dataclasses import dataclass

import numpy as np

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
    """One pass over the documents, all cut at the same time: the loop is as long as the longest document has runs.

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
        target = _targets(len(start), options, random)
        # The first sentence end at which the run has both its tokens and its sentences.
        cut = np.searchsorted(tokens, tokens[start] + target, side="left")
        cut = np.maximum(cut, start + options.min_sentences)
        cut = np.where(stop - cut > 1, cut, stop)
        rounds.append(np.stack([start + begin, cut + begin, target], axis=1))
        left = cut < stop
        start, stop = cut[left], stop[left]
    runs = np.concatenate(rounds) if rounds else np.empty((0, 3), np.int64)
    return runs[np.argsort(runs[:, 0], kind="stable")]


def _targets(count: int, options: RunOptions, random: np.random.RandomState) -> np.ndarray:
    short = random.random_sample(count) < options.short_probability
    drawn = random.randint(2, options.max_length + 1, count)
    return np.where(short, drawn, options.max_length)


def sample_runs(
    lengths: np.ndarray, documents: np.ndarray, options: RunOptions, num_samples: int | None, seed: int
) -> np.ndarray:
    """At least `num_samples` runs, each pass over the documents cut and shuffled anew: int64[runs, 3] like `cut_runs`.

    When `num_samples` is None, those of one pass.

    Empty when no document can be used.
    """
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
