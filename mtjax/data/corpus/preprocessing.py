"""From text files to indexed datasets: read, encode on all cores, write in order, record the progress.

The output depends on the text, the tokenizer and the options, never on the number of workers or on interruptions.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from mtjax.data.corpus.documents import DocumentChunk, TextFields
from mtjax.data.corpus.encode import ChunkEncoder, EncodedChunk, EncodeOptions
from mtjax.data.corpus.indexed import token_dtype
from mtjax.data.corpus.meta import TokenizerRecord
from mtjax.data.corpus.parallel import map_in_order
from mtjax.data.corpus.parts import CorpusPart, record_of, spans_of
from mtjax.data.corpus.reader import DocumentSpan, Position, chunks, total_bytes
from mtjax.data.corpus.resume_record import PreprocessingState, ProcessedCounts, ResumeRecord
from mtjax.data.corpus.writer import IndexedWriter, publish
from mtjax.data.progress import BytesProgress, say
from mtjax.data.tokens.identity import content_digest
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

SECONDS_PER_SAVE = 5.0


@dataclass(frozen=True)
class PreprocessingJob:
    """What to preprocess, into what, and how.

    Attributes:
      paths: text files, read in this order.
      outputs: key -> prefix of its dataset.
      tokenizer: text to ids.
      options: keys, end of document, sentences.
      workers: processes that encode; 0 encodes in this one, over all cores where the tokenizer can.
      on_error: whether a document that can't be used ends the run, or is reported and left out.
      identity: all that the output depends on, as JSON values: an interrupted job continues if it is the same. Without
        it every run starts afresh.
      tokenizer_name: written next to the dataset, so that it can be opened without naming it again.
      keys_named: whether the user named the keys; without, a CSV file is refused.
      task: what the progress line shows.
      part: which part of the text is taken; None for all of it.
      seconds_per_save: how much work an interruption may cost.
    """

    paths: Sequence[str]
    outputs: Mapping[str, Path]
    tokenizer: Tokenizer
    options: EncodeOptions
    workers: int = 0
    on_error: Literal["fail", "skip"] = "fail"
    identity: Mapping[str, Any] | None = None
    tokenizer_name: str | None = None
    keys_named: bool = False
    task: str = "preprocessing"
    part: CorpusPart | None = None
    seconds_per_save: float = SECONDS_PER_SAVE


def prefixes(output: Path, options: EncodeOptions) -> dict[str, Path]:
    """Returns key -> the dataset's prefix: `{output}_{key}_{document|sentence}`, as Megatron names them."""
    level = "sentence" if options.split_sentences else "document"
    return {key: output.with_name(f"{output.name}_{key.replace('/', '_')}_{level}") for key in options.keys}


def preprocess(job: PreprocessingJob) -> ProcessedCounts:
    """Writes the indexed datasets of a job; returns the counts of what was processed.

    Raises:
      UserError: a file is corrupted, a document can't be used, or the output can't be written. What was done until then
        is kept if the job can be continued, and deleted otherwise.
    """
    record = ResumeRecord(job.outputs, job.identity)
    with record.locked():
        saved = record.read()
        if saved is None:
            record.remove()
        elif not saved.sealed:
            say(f"continuing after {saved.counts.documents:,} documents of an interrupted run")
        state = saved or PreprocessingState()
        if not state.sealed:
            try:
                _encode_into(job, state, record)
            except BaseException:
                # Without a record, the files that this run has left can't be continued.
                if record.read() is None:
                    record.remove()
                raise
        # Also after a crash between two renames: those that are done are skipped.
        for prefix in job.outputs.values():
            publish(prefix)
        record.remove()
    return state.counts


def _encode_into(job: PreprocessingJob, state: PreprocessingState, record: ResumeRecord) -> None:
    """Takes the job from `state` to sealed, bringing `state` and its record up to date on the way."""
    dtype = token_dtype(job.tokenizer.vocab_size)
    spans = [DocumentSpan(path) for path in job.paths] if job.part is None else spans_of(job.paths, job.part)
    counts, before, last_save = state.counts, _bytes_before(spans), time.monotonic()
    with contextlib.ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedWriter(prefix, dtype, state.writers.get(key)))
            for key, prefix in job.outputs.items()
        }
        progress = stack.enter_context(BytesProgress(job.task, before[-1], counts.text_bytes))
        source = chunks(spans, state.position, TextFields(job.options.keys, job.keys_named))
        encoded = map_in_order(ChunkEncoder(job.tokenizer, job.options), source, job.workers)
        # Ends worker processes before the writers are closed.
        stack.callback(encoded.close)
        for chunk, result in encoded:
            _report(chunk, result, job.on_error)
            for key, writer in writers.items():
                writer.add(*result.arrays[key])
            counts.documents += result.documents
            counts.skipped += len(result.errors)
            counts.text_bytes += result.text_bytes
            done = before[chunk.file] + chunk.read
            progress.update(done, counts.text_bytes)
            # The position is that of the next chunk, and the files end with this one: both are written together or not
            # at all.
            if time.monotonic() - last_save > job.seconds_per_save:
                state.position, state.share = _after(chunk), done / before[-1] if before[-1] else 0.0
                state.writers = {key: writer.position() for key, writer in writers.items()}
                record.write(state)
                last_save = time.monotonic()
        # A part may be empty, where its bytes are within one document.
        if job.part is None:
            _refuse_empty(job, writers, record)
        tokenizer = job.tokenizer
        made_with = TokenizerRecord(job.tokenizer_name, tokenizer.vocab_size, tokenizer.eod, content_digest(tokenizer))
        for key, writer in writers.items():
            part = job.part and record_of(job.part, key, job.options, job.on_error, job.paths)
            writer.seal(made_with, part and asdict(part))
        # From here on a crash costs nothing: only names are missing.
        state.sealed = True
        record.write(state)


def _refuse_empty(job: PreprocessingJob, writers: Mapping[str, IndexedWriter], record: ResumeRecord) -> None:
    """Refuses a dataset without a single token, and forgets the run: to continue it would change nothing.

    Raises:
      UserError: names the key that has no text.
    """
    for key, writer in writers.items():
        if not writer.position()["bin"]:
            record.remove()
            others = f" and {len(job.paths) - 1} more files" if len(job.paths) > 1 else ""
            raise UserError(
                f"{job.paths[0]}{others}: there is no text under the key {key!r}, so there are no tokens to write"
            )


def _after(chunk: DocumentChunk) -> Position:
    lines = sum(document.count(b"\n") for document in chunk.documents)
    return Position(chunk.file, chunk.end, chunk.first_line + lines)


def _report(chunk: DocumentChunk, result: EncodedChunk, on_error: str) -> None:
    for line, message in result.errors:
        text = f"{chunk.where(line)}: {message}"
        if on_error == "fail":
            raise UserError(f"{text}; --on-error skip leaves such {chunk.unit}s out")
        say(f"skipped {text}")


def _bytes_before(spans: Sequence[DocumentSpan]) -> list[int]:
    """Returns the bytes before each file, and in all of them; what is not local counts as nothing."""
    sizes = [(total_bytes(span.path) if span.end is None else span.end) - span.begin for span in spans]
    return list(accumulate((max(size, 0) for size in sizes), initial=0))
