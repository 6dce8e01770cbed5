"""`mtjax data clean`: the cleaning of section 4.1 of arXiv 1909.08053, in a stream and on all cores.

First pass: repair unicode, drop short documents and those on removal lists, sign the rest. Then near-duplicates are
found among the signatures. Second pass: write what stays, and look for the test sets' 8-grams in it.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import at_least
from mtjax.data.cleaning.document import CleanOptions
from mtjax.data.cleaning.passes import CleanJob, clean
from mtjax.data.cleaning.removal_list import read_removal_list
from mtjax.data.commands.inputs import input_files, with_all
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Cleans text: unicode repair, minimum length, near-duplicates, removal lists, overlap with test sets.

    Writes OUTPUT, OUTPUT.dropped.jsonl (what went, and why) and OUTPUT.report.json (counts).
    Example: mtjax data clean --input 'raw/*.jsonl.gz' --output clean.jsonl.gz --overlap-with wikitext103.test.jsonl
    """

    input: tuple[str, ...]
    """Files, folders, globs or URLs: JSON lines (.jsonl, .json), CSV and TSV, Parquet, datasets that Hugging Face's
    `datasets` saved, or plain text (anything else); also compressed with gzip, zstd, bz2 or xz."""
    output: Path
    """A .jsonl file to write, compressed when it ends in .gz or .zst."""
    text_key: Annotated[str | None, tyro.conf.arg(aliases=["--json-key"])] = None
    """Key of the JSON objects, or column of the tables, with the text; a.b is the key b inside a. Other keys are copied
    as they are. When not given, text; CSV and TSV files need it."""
    tokenizer: str | None = None
    """Counts tokens for --min-tokens, KIND:PATH as in preprocess; words are counted when not given."""
    min_tokens: int = at_least(0, 128)
    """Shorter documents are dropped; 0 drops none."""
    fix_unicode: bool = True
    """Repair wrongly decoded text with ftfy."""
    jaccard: float = 0.7
    """Of documents whose sets of word n-grams are more similar than this, the first is kept; 1 keeps all."""
    shingle_words: int = at_least(1, 5, most=1000)
    """Words in such an n-gram."""
    remove_ids: tuple[Path, ...] = ()
    """Files with a document's id on each line: those documents are dropped. An id that is a number in the document also
    matches other forms of it (2.0 is 2); text must be the same."""
    id_key: str = "id"
    """Key of the JSON objects under which --remove-ids finds the id. Documents without an id are kept and counted;
    if no document has one, it is an error."""
    remove_like: tuple[str, ...] = ()
    """Files of documents (say, a test set's articles): documents more similar to one than --jaccard are dropped."""
    overlap_with: tuple[str, ...] = ()
    """Test sets: the report says which share of each one's word 8-grams occurs in the cleaned corpus."""
    workers: int | None = at_least(0, None, most=1024)
    """Processes; one per core when not given."""
    on_error: Literal["fail", "skip"] = "fail"
    """What happens to a line that isn't JSON, or lacks the key: it ends the run, or is dropped."""
    overwrite: bool = False
    """Replace an earlier output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, with_all(argv, "--input", "--remove-like"), "mtjax data clean")))


def run(options: Options) -> None:
    """Cleans as the options say, and prints the counts.

    Raises:
      UserError: input or options can't be used, or the output exists.
    """
    workers = (os.cpu_count() or 1) if options.workers is None else options.workers
    if not 0 < options.jaccard <= 1:
        raise UserError(f"--jaccard {options.jaccard} must be above 0 and at most 1")
    if options.output.exists() and not options.overwrite:
        raise UserError(f"{options.output} exists; choose another --output, or replace it with --overwrite")
    cleaning = CleanOptions(
        key=options.text_key or CleanOptions.key,
        fix_unicode=options.fix_unicode,
        min_tokens=options.min_tokens,
        tokenizer=open_tokenizer(options.tokenizer) if options.tokenizer else None,
        shingle_words=options.shingle_words,
        id_key=options.id_key,
        removal_list=read_removal_list(options.remove_ids),
    )
    job = CleanJob(
        paths=input_files(options.input),
        output=options.output,
        options=cleaning,
        jaccard=options.jaccard,
        remove_like=input_files(options.remove_like),
        overlap_with=options.overlap_with,
        key_named=options.text_key is not None,
        workers=workers,
        on_error=options.on_error,
    )
    Console(highlight=False).print(_table(_clean_into_place(job)))


def _clean_into_place(job: CleanJob) -> dict[str, Any]:
    """Cleans in a hidden folder next to the output, and renames what came out; leaves nothing behind on failure."""
    # Beside the output, so that the last step is a rename within one file system.
    folder = job.output.with_name(f".{job.output.name}.{os.getpid()}.cleaning")
    try:
        # Fails now if the folder can't be written, not after hours of work.
        job.output.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as e:
        raise UserError(f"{job.output} can't be written: {e.strerror}") from e
    try:
        report = clean(job, folder)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        for name, final in (("dropped.jsonl", ".dropped.jsonl"), ("report.json", ".report.json")):
            # The corpus comes last: where it is, its report is, too.
            (folder / name).replace(Path(f"{job.output}{final}"))
        (folder / job.output.name).replace(job.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _table(report: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=f"{report['output']}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("documents read", f"{report['documents']:,}")
    table.add_row("unicode repaired", f"{report['repaired']:,}")
    for reason, count in report["dropped"].items():
        table.add_row(f"dropped: {reason}", f"{count:,}")
    table.add_row("documents kept", f"{report['kept']:,}")
    # A list of another corpus, or of ids in another form, would leave in what it should remove.
    for name, what in (
        ("ids_not_found", "ids to remove that no document has"),
        ("ids_in_another_form", "ids removed in another form (2.0 is 2)"),
        ("without_id", "documents without an id, which --remove-ids can't find"),
        ("not_finite_as_null", "documents with NaN or an infinite number, written as null"),
    ):
        if report[name]:
            table.add_row(what, f"{report[name]:,}")
    for name, overlap in report["overlap"].items():
        table.add_row(f"8-grams of {name} in the corpus", f"{overlap['share']:.1%} of {overlap['ngrams']:,}")
    return table
