"""`mtjax data preprocess`: text files to Megatron's indexed datasets.

Streams, so memory does not grow with the corpus; uses all cores; gives the same bytes whatever the number of workers;
after a kill, the same command continues where it stopped.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import amount, at_least
from mtjax.data.commands.inputs import input_files, with_all
from mtjax.data.commands.megatron_names import with_own_names
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.indexed import IndexedDataset, bin_path
from mtjax.data.corpus.parts import MOST, complete_parts, is_made, parse_part, record_of
from mtjax.data.corpus.preprocessing import PreprocessingJob, prefixes, preprocess
from mtjax.data.corpus.resume_record import ResumeRecord, refuse_existing
from mtjax.data.progress import say
from mtjax.data.tokens.tokenizer import digest_of, end_note, open_tokenizer
from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Turns text files into PREFIX_KEY_document.bin and .idx, which --data takes.

    Example: mtjax data preprocess --input 'corpus/*.jsonl.gz' --output data/books --tokenizer gpt2:vocab/ --append-eod
    """

    input: tuple[str, ...]
    """Files, folders, globs or URLs: JSON lines (.jsonl, .json), CSV and TSV, Parquet, datasets that Hugging Face's
    `datasets` saved, or plain text (anything else); also compressed with gzip, zstd, bz2 or xz. Several have
    spaces or commas between them."""
    output: Path
    """Prefix of what is written: PREFIX_KEY_document.bin and .idx, or PREFIX_KEY_sentence with --split-sentences. Also
    --output-prefix, as in Megatron."""
    tokenizer: str
    """hf:tokenizer.json, hf:DIR (a Hugging Face folder), gpt2:DIR (encoder.json + vocab.bpe), bert:vocab.txt or
    sentencepiece:FILE. Megatron's --tokenizer-type, --tokenizer-model, --vocab-file and --merge-file work instead."""
    text_key: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--json-keys"])] = ()
    """Keys of the JSON objects, or columns of the tables, whose text is taken; each makes a dataset. a.b is the key b
    inside a. When not given, text; CSV and TSV files need it. Also --json-keys, as in Megatron."""
    eod_token: str | None = None
    """The token that ends documents, such as '<eos>'; when not given, the one that the tokenizer's files name."""
    parse_special: bool = False
    """Read names of special tokens in the text as these tokens, for corpora in a chat format; otherwise they are plain
    text."""
    append_eod: bool = False
    """End each document with the end-of-document token: what GPT needs."""
    split_sentences: bool = False
    """Make each sentence a sequence: what BERT and T5 need."""
    language: str = "en"
    """Whose rules split sentences: an ISO 639 code."""
    part: str | None = None
    """3/64 does the third of 64 parts, in any order and on any machine; `mtjax data merge --parts` makes one dataset of
    them, with the bytes of a run without --part, and `mtjax data parts` shows how far they are."""
    ray: str | None = None
    """Address of a Ray cluster (auto, HOST:PORT, ray://HOST:PORT, or local for this machine): runs the parts there, one
    per core, and merges them. Input, output and tokenizer must be in folders that all machines share."""
    parts: int | None = at_least(1, None, most=MOST)
    """Number of parts with --ray; one per GiB of text when not given."""
    merge: bool = True
    """With --ray: merge the parts when all are complete, and delete them."""
    workers: Annotated[int | None, tyro.conf.arg(help="Processes that encode; one per core when not given.")] = (
        at_least(0, None, most=1024)
    )
    on_error: Literal["fail", "skip"] = "fail"
    """What happens to a line that isn't JSON, or lacks the key: it ends the run, or is reported and left out."""
    overwrite: bool = False
    """Replace a dataset of the same name."""
    resume: bool = True
    """Continue where an interrupted run of the same command stopped."""
    save_every: float = amount(5.0)
    """Seconds of work that an interruption may cost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""

    def body() -> None:
        words, note = with_own_names(with_all(argv, "--input"))
        options = read(Options, words, "mtjax data preprocess")
        if note:
            say(f"note    {note}")
        run(options)

    return run_main(body)


def run(options: Options) -> None:
    """Preprocesses as the options say.

    Raises:
      UserError: input, tokenizer or output can't be used.
    """
    if options.ray is not None:
        import_module("mtjax.data.commands.on_ray").run_on_ray(options)
        return
    if options.parts is not None:
        raise UserError(f"--parts {options.parts} needs --ray; one part on this machine is --part 1/{options.parts}")
    job = job_of(options)
    # A job of an array that is submitted again finds most parts complete.
    if job.part is not None and not options.overwrite and made_already(job):
        say(f"{job.part} is complete already; --overwrite makes it again")
    else:
        run_job(options, job)
    if job.part is not None:
        say(f"{len(complete_parts(options.output, job.part.of))} of {job.part.of} parts are complete")


def job_of(options: Options) -> PreprocessingJob:
    """Returns the job that the options name, and says what a user should know of the tokenizer.

    Raises:
      UserError: input or tokenizer can't be used.
    """
    workers = (os.cpu_count() or 1) if options.workers is None else options.workers
    if len(set(options.text_key)) != len(options.text_key):
        raise UserError(f"--text-key {' '.join(options.text_key)} names a key twice")
    part = None if options.part is None else parse_part(options.part)
    paths = input_files(options.input)
    tokenizer = open_tokenizer(options.tokenizer, options.eod_token)
    if note := end_note(tokenizer):
        say(f"note    {note}")
    encoding = EncodeOptions(
        keys=options.text_key or EncodeOptions.keys,
        append_eod=options.append_eod,
        split_sentences=options.split_sentences,
        language=options.language,
        parse_special=options.parse_special,
    )
    return PreprocessingJob(
        paths=paths,
        outputs=prefixes(options.output if part is None else part.prefix(options.output), encoding),
        tokenizer=tokenizer,
        options=encoding,
        workers=workers,
        on_error=options.on_error,
        identity=_identity(options, paths) | ({} if part is None else {"part": [*part]}),
        tokenizer_name=absolute_tokenizer(options.tokenizer),
        keys_named=bool(options.text_key),
        task="preprocessing" if part is None else str(part),
        part=part,
        seconds_per_save=options.save_every,
    )


def made_already(job: PreprocessingJob) -> bool:
    """Returns whether the part of a job is there, as a job that is repeated finds it."""
    assert job.part is not None
    records = [record_of(job.part, key, job.options, job.on_error, job.paths) for key in job.outputs]
    made = all(is_made(record, job.outputs[record.key], job.tokenizer) for record in records)
    # A record beside finished files: the run was interrupted between two of its keys.
    return made and ResumeRecord(job.outputs, job.identity).read() is None


def run_job(options: Options, job: PreprocessingJob) -> None:
    """Preprocesses, and prints what came out.

    Raises:
      UserError: the text can't be used, or the output exists or can't be written.
    """
    outputs = job.outputs
    record = ResumeRecord(outputs, job.identity)
    # What exists may be an output of the run that is continued.
    if not options.overwrite and (record.read() is None or not options.resume):
        refuse_existing(list(outputs.values()))
    if not options.resume:
        record.remove()
    start = time.monotonic()
    counts = preprocess(job)
    seconds = time.monotonic() - start
    left_out = f", {counts.skipped:,} left out" if counts.skipped else ""
    say(f"{counts.documents:,} documents{left_out}, {counts.text_bytes / 1e6:,.1f} MB of text in {seconds:.1f} s")
    for prefix in outputs.values():
        dataset = IndexedDataset(prefix)
        print(f"{bin_path(prefix)}: {dataset.num_tokens:,} tokens in {len(dataset):,} sequences, {dataset.dtype}")


def _identity(options: Options, paths: Sequence[str]) -> dict[str, Any]:
    """Returns all that the output depends on: a run with another identity does not continue these partial files."""
    statuses = [Path(path).stat() if "://" not in path else None for path in paths]
    files = [[p, s and s.st_size, s and s.st_mtime_ns] for p, s in zip(paths, statuses, strict=True)]
    # Without the number of workers, on which no byte depends.
    chosen = [options.text_key, options.append_eod, options.split_sentences, options.language, options.on_error]
    chosen += [options.eod_token, options.parse_special]
    # Sizes and times, not contents: to hash a corpus would take as long as to read it.
    return {"files": files, "tokenizer": digest_of(options.tokenizer), "options": chosen}


def absolute_tokenizer(tokenizer: str) -> str:
    """Returns the name of a tokenizer with the absolute path of its file."""
    kind, colon, path = tokenizer.rpartition(":")
    return f"{kind}{colon}{Path(path).expanduser().absolute()}"
