"""Several indexed datasets put one after another into one, in a stream."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.corpus.indexed import CODES, IndexedDataset
from mtjax.data.corpus.made_with import check_same_maker, digest_in
from mtjax.data.corpus.meta import UNKNOWN, TokenizerRecord
from mtjax.data.corpus.resume_record import ResumeRecord
from mtjax.data.corpus.verify import check_crc
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.progress import BytesProgress, say
from mtjax.errors import UserError

SEQUENCES_AT_A_TIME = 1 << 14
TOKENS_AT_A_TIME = 1 << 24


def merge(datasets: Sequence[IndexedDataset], output: Path) -> None:
    """Writes the sequences and documents of `datasets`, in order, to the prefix `output`.

    Raises:
      UserError: only some are multimodal, they were made with different tokenizers, their types don't go together, or
        the tokens of one are not those that its checksum is of.
    """
    # An empty part of a run says nothing about modes.
    multimodal = {dataset.modes is not None for dataset in datasets if len(dataset)}
    if len(multimodal) > 1:
        raise UserError("some of the datasets have modes (multimodal data) and some have none; they can't be merged")
    recorded = _common_tokenizer(datasets)
    dtype = _common_dtype(datasets)
    # For its lock: without an identity nothing is saved.
    record = ResumeRecord({"": output}, None)
    with record.locked():
        try:
            with (
                IndexedWriter(output, dtype) as writer,
                BytesProgress("merging", sum(map(_bytes, datasets))) as progress,
            ):
                done = 0
                for dataset in datasets:
                    crc = 0
                    for piece in _pieces(dataset):
                        writer.add(*piece)
                        # All tokens are read anyway, so they are checked: a damaged input must not become an output
                        # with a valid checksum.
                        crc = zlib.crc32(piece[0].data, crc)
                        done += piece[0].nbytes
                        progress.update(done, done)
                    check_crc(dataset, crc)
                writer.finish(recorded)
        except BaseException:
            record.remove()
            raise


def _common_tokenizer(datasets: Sequence[IndexedDataset]) -> TokenizerRecord:
    """Returns what the merged dataset records of its tokenizer, and prints a note about what is not known.

    Raises:
      UserError: the datasets were made with different tokenizers.
    """
    known = [(dataset.prefix, dataset.meta) for dataset in datasets if dataset.meta and dataset.meta.vocab_size]
    if not known:
        return UNKNOWN
    if doubt := check_same_maker(known):
        say(f"note    {doubt}; they are taken for the same")
    silent = [dataset.prefix for dataset in datasets if not (dataset.meta and dataset.meta.vocab_size)]
    if silent:
        say(f"note    {silent[0]} has no record of its tokenizer, so the merged dataset has none either")
        return UNKNOWN
    metas = [meta for _, meta in known]
    digest = next((digest for meta in metas if (digest := digest_in(meta))), None)
    return TokenizerRecord(metas[0].tokenizer, metas[0].vocab_size, metas[0].eod, digest)


def _common_dtype(datasets: Sequence[IndexedDataset]) -> np.dtype[Any]:
    dtype = np.result_type(*(dataset.dtype for dataset in datasets)).newbyteorder("<")
    names = sorted({str(dataset.dtype) for dataset in datasets})
    # numpy promotes uint16 and int32 to int32, int64 and float to float64, in which ids above 2^53 would change.
    if dtype not in CODES or (dtype.kind == "f" and len(names) > 1):
        raise UserError(f"datasets of the types {', '.join(names)} can't be merged into one")
    return dtype


def _bytes(dataset: IndexedDataset) -> int:
    return dataset.num_tokens * dataset.dtype.itemsize


def _pieces(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yields full documents; a large one comes as its sequences, and ends with the last of them."""
    documents, begin = dataset.documents, 0
    while begin < dataset.num_documents:
        end = min(begin + SEQUENCES_AT_A_TIME, dataset.num_documents)
        first, last = int(documents[begin]), int(documents[end])
        counts = np.diff(documents[begin : end + 1])
        # At least once: documents without sequences are written, too.
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
