"""The passes of cleaning over a corpus: see `clean`."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from mtjax.data.cleaning.document import CleanedChunk, Cleaner, CleanOptions, Drop, OverlapFinder, parse
from mtjax.data.cleaning.minhash import PERMUTATIONS
from mtjax.data.cleaning.near_duplicates import BANDS, Duplicate, find_duplicates
from mtjax.data.cleaning.overlap import TestGrams, grams_of, share
from mtjax.data.cleaning.removal_list import FoundIds
from mtjax.data.corpus.documents import DocumentChunk, Fault, TextFields, parsed
from mtjax.data.corpus.parallel import map_in_order
from mtjax.data.corpus.reader import chunks, expand, total_bytes
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError, require

NEAR_DUPLICATE, LIKE_REMOVED, UNUSABLE = "near-duplicate", "like a removed document", "unusable line"


@dataclass(frozen=True)
class CleanJob:
    """What to clean, into what, and how.

    Attributes:
      paths: text files, in the order that decides which of two duplicates is the first.
      output: the file that is written.
      options: what is done to each document.
      jaccard: similarity above which the later of two documents is dropped; 1 for no such comparison.
      remove_like: files of documents whose near-duplicates are dropped.
      overlap_with: test sets to look for.
      key_named: whether the user named the key of the text; without, a CSV file is refused.
      workers: processes.
      on_error: what a line that can't be used does: end the run, or be dropped.
    """

    paths: Sequence[str]
    output: Path
    options: CleanOptions
    jaccard: float = 0.7
    remove_like: Sequence[str] = ()
    overlap_with: Sequence[str] = ()
    key_named: bool = False
    workers: int = 0
    on_error: Literal["fail", "skip"] = "fail"


@dataclass
class _Seen:
    """What the first pass leaves: files in the working folder, and counts."""

    folder: Path
    removed: int = 0  # documents of the removal lists, whose signatures come first
    kept: int = 0
    documents: int = 0
    repaired: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    not_finite: int = 0
    found: FoundIds = field(default_factory=FoundIds)

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def signatures(self) -> np.ndarray:
        """Maps the signatures of removed and kept documents from disk: uint32[removed + kept, PERMUTATIONS]."""
        return _mapped(self.folder / "signatures", np.dtype(np.uint32)).reshape(-1, PERMUTATIONS)

    def positions(self) -> np.ndarray:
        """Maps file and line of each row from disk: int64[kept, 2]."""
        return _mapped(self.folder / "positions", np.dtype(np.int64)).reshape(-1, 2)


def clean(job: CleanJob, folder: Path) -> dict[str, Any]:
    """Cleans into `folder`: the output under its own name, and `dropped.jsonl`.

    Returns:
      The report: documents read, repaired, dropped by reason, and kept; rows with null for NaN; ids of removal lists
        that no document has, documents without an id or with one in another form; overlap of each test set.

    Raises:
      UserError: a file can't be read, a document can't be used, or none has an id where there are removal lists.
    """
    # First, so that a test set that can't be read is reported now, not after hours.
    tests = [grams_of(path, _texts_of(path, job)) for path in expand(job.overlap_with)]
    seen = _Seen(folder)
    with (folder / "dropped.jsonl").open("w", encoding="utf-8") as dropped:
        _first_pass(job, seen, dropped)
        # After all documents: those of one file may have none.
        seen.found.check(job.options.id_key)
        gone = _drop_duplicates(job, seen, dropped)
    hits = _second_pass(job, seen, gone, tests)
    overlap = {
        test.name: {"ngrams": int(test.counts.sum()), "share": share(test, hit)}
        for test, hit in zip(tests, hits, strict=True)
    }
    return {
        "output": str(job.output),
        "documents": seen.documents,
        "repaired": seen.repaired,
        "dropped": dict(seen.reasons),
        "kept": seen.kept - int(gone.sum()),
        "not_finite_as_null": seen.not_finite,
        "ids_not_found": len(job.options.removal_list.texts - seen.found.names),
        "ids_in_another_form": seen.found.other_form,
        "without_id": seen.found.without_id,
        "overlap": overlap,
    }


def _first_pass(job: CleanJob, seen: _Seen, dropped: IO[str]) -> None:
    cleaner = Cleaner(job.options)
    # All columns of tables, which are copied to the output.
    fields = TextFields((job.options.key,), job.key_named, others=True)
    with ExitStack() as stack:
        rows = stack.enter_context(seen.rows.open("wb"))
        signatures = stack.enter_context((seen.folder / "signatures").open("wb"))
        positions = stack.enter_context((seen.folder / "positions").open("wb"))
        # Ahead of all documents: what resembles a removed one comes later, and is what is dropped (`protected`).
        for path in job.remove_like:
            signed = cleaner.sign([text for text in _texts_of(path, job) if text.strip()])
            signatures.write(signed.tobytes())
            seen.removed += len(signed)
        progress = stack.enter_context(BytesProgress("cleaning", sum(total_bytes(p) for p in job.paths)))
        before = np.cumsum([0, *(total_bytes(path) for path in job.paths)])
        results = map_in_order(cleaner, chunks(job.paths, None, fields), job.workers)
        # Ends the worker processes, even if a bad document ends the run.
        stack.callback(results.close)
        text_bytes = 0
        for chunk, result in results:
            rows.writelines(result.rows)
            signatures.write(result.signatures.tobytes())
            files = np.full(len(result.lines), chunk.file, np.int64)
            positions.write(np.stack([files, result.lines], axis=1).tobytes())
            _count(job, chunk, result, seen, dropped)
            text_bytes += chunk.end - chunk.start
            progress.update(int(before[chunk.file]) + chunk.read, text_bytes)


def _count(job: CleanJob, chunk: DocumentChunk, result: CleanedChunk, seen: _Seen, dropped: IO[str]) -> None:
    for line, message in result.errors:
        if job.on_error == "fail":
            raise UserError(f"{chunk.where(line)}: {message}; --on-error skip leaves such {chunk.unit}s out")
        _write_drop(dropped, chunk.path, Drop(line, UNUSABLE, message))
    for drop in result.drops:
        _write_drop(dropped, chunk.path, drop)
    seen.reasons.update(drop.reason for drop in result.drops)
    # Counter keeps a key with 0, which the report would list.
    if result.errors:
        seen.reasons[UNUSABLE] += len(result.errors)
    seen.kept += len(result.rows)
    seen.repaired += result.repaired
    seen.not_finite += result.not_finite
    seen.found.add(result.found)
    seen.documents += len(result.rows) + len(result.drops) + len(result.errors)


def _write_drop(file: IO[str], path: str, drop: Drop, **more: Any) -> None:
    row = {"file": path, "line": drop.line, "reason": drop.reason, **drop.more, **more, "text": drop.text}
    file.write(json.dumps(row) + "\n")


def _drop_duplicates(job: CleanJob, seen: _Seen, dropped: IO[str]) -> np.ndarray:
    """Returns bool[kept]: which rows are dropped, each reported with the document that it resembles."""
    gone = np.zeros(seen.kept, bool)
    # No similarity is above 1.
    if job.jaccard >= 1:
        return gone
    signatures, positions = seen.signatures(), seen.positions()
    with BytesProgress("comparing", BANDS) as progress:
        duplicates = find_duplicates(signatures, job.jaccard, seen.removed, progress.update)
    for duplicate in sorted(duplicates, key=lambda d: d.document):
        row = duplicate.document - seen.removed
        gone[row] = True
        reason = LIKE_REMOVED if duplicate.original < seen.removed else NEAR_DUPLICATE
        seen.reasons[reason] += 1
        _report_duplicate(job, seen, positions, duplicate, reason, dropped)
    return gone


def _report_duplicate(
    job: CleanJob, seen: _Seen, positions: np.ndarray, duplicate: Duplicate, reason: str, dropped: IO[str]
) -> None:
    file, line = (int(n) for n in positions[duplicate.document - seen.removed])
    like: Any = duplicate.original  # its number in the removal lists
    if duplicate.original >= seen.removed:
        other_file, other_line = (int(n) for n in positions[duplicate.original - seen.removed])
        like = {"file": job.paths[other_file], "line": other_line}
    _write_drop(dropped, job.paths[file], Drop(line, reason, ""), like=like, similarity=duplicate.similarity)


def _second_pass(job: CleanJob, seen: _Seen, gone: np.ndarray, tests: Sequence[TestGrams]) -> list[np.ndarray]:
    """Writes the rows that stay; returns for each test set which of its n-grams they hold, bool[u]."""
    marks = [np.zeros(len(test.unique), bool) for test in tests]
    with _open_output(seen.folder / job.output.name) as out:
        staying = _staying(seen, gone, out)
        if not tests:
            # Reading it writes the rows: without a test set nothing else does.
            for _ in staying:
                pass
            return marks
        results = map_in_order(OverlapFinder(tests, job.options.key), staying, job.workers)
        for _, hits in results:
            for mark, hit in zip(marks, hits, strict=True):
                mark[hit] = True
    return marks


def _staying(seen: _Seen, gone: np.ndarray, out: IO[bytes]) -> Iterator[DocumentChunk]:
    """Yields chunks of the retained rows, and writes them."""
    number = 0
    for chunk in chunks([str(seen.rows)]):
        rows = [row for i, row in enumerate(chunk.documents, start=number) if not gone[i]]
        number += len(chunk.documents)
        out.writelines(rows)
        # Written before it is searched: the order of the output does not depend on the workers.
        yield replace(chunk, documents=rows)


@contextmanager
def _open_output(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            # No name and time inside, so that equal contents are equal bytes.
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
                yield cast("IO[bytes]", file)
        elif path.suffix == ".zst":
            with require("zstandard", "data").ZstdCompressor().stream_writer(raw, closefd=False) as file:
                yield file
        else:
            yield raw


def _texts_of(path: str, job: CleanJob) -> list[str]:
    """Returns the texts of a small file: a test set or a removal list.

    Raises:
      UserError: a line is not a document.
    """
    key, texts = job.options.key, []
    for chunk in chunks([path], None, TextFields((key,), job.key_named)):
        for line, document in parsed(chunk, lambda raw, chunk=chunk: parse(raw, chunk.is_json, key)):
            if isinstance(document, Fault):
                raise UserError(f"{chunk.where(line)}: {document.message}")
            texts.append(document[1])
    return texts


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    # An empty file can't be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
