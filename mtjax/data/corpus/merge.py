"""Several indexed datasets put one after another into one, in a stream."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.corpus.indexed import CODES, IndexedDataset
from mtjax.data.corpus.resume_record import ResumeRecord
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.progress import ProgressLine
from mtjax.errors import UserError

SEQUENCES_AT_A_TIME = 1 << 14
TOKENS_AT_A_TIME = 1 << 24


def merge(datasets: Sequence[IndexedDataset], output: Path) -> None:
    """Writes the sequences and documents of `datasets`, in order, to the prefix `output`.

    Raises:
      UserError: only some are multimodal, they were made with different tokenizers, or their types don't go together.
    """
    multimodal = {dataset.modes is not None for dataset in datasets if len(dataset)}
    if len(multimodal) > 1:
        raise UserError("some of the datasets have modes (multimodal data) and some have none; they can't be merged")
    facts = {(d.meta.tokenizer, d.meta.vocab_size, d.meta.eod) if d.meta else (None, None, None) for d in datasets}
    sizes = {size for _, size, _ in facts if size is not None}
    if len(sizes) > 1:
        raise UserError(f"the datasets were made with vocabularies of {' and '.join(map(str, sorted(sizes)))} tokens")
    dtype = _common_dtype(datasets)
    record = ResumeRecord({"": output}, None)
    with record.locked():
        try:
            with (
                IndexedWriter(output, dtype) as writer,
                ProgressLine("merging", sum(map(_bytes, datasets))) as progress,
            ):
                done = 0
                for dataset in datasets:
                    for piece in _pieces(dataset):
                        writer.add(*piece)
                        done += piece[0].nbytes
                        progress.update(done, done)
                writer.finish(*(facts.pop() if len(facts) == 1 else (None, None, None)))
        except BaseException:
            record.remove()
            raise


def _common_dtype(datasets: Sequence[IndexedDataset]) -> np.dtype[Any]:
    dtype = np.result_type(*(dataset.dtype for dataset in datasets)).newbyteorder("<")
    names = sorted({str(dataset.dtype) for dataset in datasets})
    if dtype not in CODES or (dtype.kind == "f" and len(names) > 1):
        raise UserError(f"datasets of the types {', '.join(names)} can't be merged into one")
    return dtype


def _bytes(dataset: IndexedDataset) -> int:
    return dataset.num_tokens * dataset.dtype.itemsize


def _pieces(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Whole documents at a time; one that is large comes as its sequences, and ends with the last of them."""
    documents, begin = dataset.documents, 0
    while begin < dataset.num_documents:
        end = min(begin + SEQUENCES_AT_A_TIME, dataset.num_documents)
        first, last = int(documents[begin]), int(documents[end])
        counts = np.diff(documents[begin : end + 1])
        for at in range(first, max(last, first + 1), SEQUENCES_AT_A_TIME):
            stop = min(at + SEQUENCES_AT_A_TIME, last)
            ended = counts if stop == last else counts[:0]
            yield from _sequences(dataset, at, stop, ended)
        begin = end


def _sequences(
    dataset: IndexedDataset, begin: int, end: int, documents: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Sequences `begin` to `end` and the documents that end with them; their tokens in pieces."""
    nothing = np.empty(0, np.int32)
    lengths = dataset.lengths[begin:end]
    modes = None if dataset.modes is None else dataset.modes[begin:end]
    yield nothing, lengths, documents, modes
    for at in range(0, int(lengths.sum(dtype=np.int64)), TOKENS_AT_A_TIME):
        start = (int(dataset.offsets[begin]) // dataset.dtype.itemsize) + at
        stop = int(dataset.offsets[begin]) // dataset.dtype.itemsize + int(lengths.sum(dtype=np.int64))
        yield dataset.flat(start, min(start + TOKENS_AT_A_TIME, stop)), nothing, nothing, None
