"""Preprocessing in parts, of which every machine can make any: which documents a part has, and whether parts belong
together.

The stored bytes of all files, one after another, are cut at N equal distances. A document belongs to the part in which
it begins. JSON lines that are not compressed are cut between lines, and Parquet between row groups; any other file
belongs whole to the part in which it begins. So the parts in order are the corpus, whatever their number.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mtjax.data.cache import digest
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.indexed import IndexedDataset, is_indexed
from mtjax.data.corpus.meta import meta_path, read_meta
from mtjax.data.corpus.packed import open_packed
from mtjax.data.corpus.reader import DocumentSpan, is_json
from mtjax.data.corpus.tables import PARQUET_MAGIC
from mtjax.data.corpus.writer import partial_path
from mtjax.data.tokens.identity import content_digest
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError, require

CUTS = 1
"""Version of the rule by which a corpus is cut."""
# Five digits in names, which then sort by number.
MOST = 99_999
NAME = re.compile(r"-(\d{5})-of-(\d{5})_(.+)")
"""What follows the prefix in the name of a part's dataset."""
NAMED = 5
"""Missing parts that a message names."""


class CorpusPart(NamedTuple):
    """Part `number` of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"

    def prefix(self, output: Path) -> Path:
        """Returns the prefix of this part's datasets."""
        return output.with_name(f"{output.name}-{self.number:05d}-of-{self.of:05d}")


@dataclass(frozen=True)
class PartRecord:
    """What a part's dataset says about the run of which it is a part, whatever machine made it.

    Attributes:
      number: of the part, from 1.
      of: number of parts.
      key: of the text.
      settings: those that decide the tokens, by option.
      files: digest of the names and sizes of all text files.
    """

    number: int
    of: int
    key: str
    settings: Mapping[str, Any]
    files: str

    @property
    def part(self) -> CorpusPart:
        """Which part it is."""
        return CorpusPart(self.number, self.of)


def parse_part(text: str) -> CorpusPart:
    """Reads `3/64`.

    Raises:
      UserError: it is not a part; says how parts are counted.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UserError(f"--part {text} must be a part and the number of parts, such as 3/64")
    part = CorpusPart(int(match[1]), int(match[2]))
    if not 1 <= part.of <= MOST:
        raise UserError(f"--part {text}: the number of parts must be between 1 and {MOST:,}")
    if not 1 <= part.number <= part.of:
        raise UserError(
            f"--part {text}: parts are counted from 1/{part.of} to {part.of}/{part.of}; for an array of jobs that "
            "counts from 0, add 1 to its number"
        )
    return part


def record_of(part: CorpusPart, key: str, options: EncodeOptions, on_error: str, paths: Sequence[str]) -> PartRecord:
    """Returns the record of a part's dataset: two machines may have the same files in other folders."""
    settings = {
        # As options are typed, so that messages can name them.
        "--text-key": list(options.keys),
        "--append-eod": options.append_eod,
        "--split-sentences": options.split_sentences,
        "--language": options.language,
        "--parse-special": options.parse_special,
        "--on-error": on_error,
    }
    # Names without folders: see the docstring. Not their contents, which every part would have to read in full.
    named = [[PurePosixPath(path).name, size] for path, size in zip(paths, stored_sizes(paths), strict=True)]
    return PartRecord(*part, key, settings, digest({"files": named, "cuts": CUTS}))


def stored_sizes(paths: Sequence[str]) -> list[int | None]:
    """Returns the bytes of files as they are stored; None for one at a URL whose server doesn't say.

    Raises:
      UserError: a file is gone.
    """
    sizes: dict[str, int | None] = {}
    remote = [path for path in paths if "://" in path]
    for scheme in dict.fromkeys(path.partition("://")[0] for path in remote):
        there = [path for path in remote if path.startswith(f"{scheme}://")]
        fs = require("fsspec", "data").url_to_fs(there[0])[0]
        # Together, for protocols that can ask for several at a time.
        sizes |= zip(there, fs.sizes([fs._strip_protocol(path) for path in there]), strict=True)
    try:
        return [sizes[path] if path in sizes else Path(path).stat().st_size for path in paths]
    except OSError as e:
        raise UserError(f"{e.filename} can't be read: {e.strerror}") from e


def spans_of(paths: Sequence[str], part: CorpusPart) -> list[DocumentSpan]:
    """Returns the documents of a part, as ranges of the files that have them.

    Args:
      paths: of all files, in order.
      part: which one.

    Raises:
      UserError: a file at the border of the part can't be read.
    """
    sizes = stored_sizes(paths)
    if None in sizes:  # files are cut only by their sizes
        chosen = range(*(len(paths) * k // part.of for k in (part.number - 1, part.number)))
        return [DocumentSpan(paths[number]) for number in chosen]
    total = sum(size or 0 for size in sizes)
    begin, end = (total * k // part.of for k in (part.number - 1, part.number))
    spans, at = [], 0
    for path, size in zip(paths, sizes, strict=True):
        size = size or 0
        # The bytes of this file that are in the part.
        first, last = max(begin - at, 0), min(end - at, size)
        at += size
        if first >= last:
            continue
        # A file that is all of the part's needs no look at whether it can be divided.
        if first == 0 and last == size:
            spans.append(DocumentSpan(path))
        elif _is_divisible(path):
            spans.append(DocumentSpan(path, first, None if last == size else last))
        # The part in which it begins has all of it, those in which it goes on have none.
        elif first == 0:
            spans.append(DocumentSpan(path))
    return spans


def _is_divisible(path: str) -> bool:
    """Returns whether one can begin to read in the middle of a file."""
    try:
        with open_packed(path) as file:
            if file.content is not file.raw or not file.raw.seekable():
                return False
            return file.head.startswith(PARQUET_MAGIC) or is_json(path)
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e


def part_datasets(output: Path) -> dict[str, dict[CorpusPart, Path]]:
    """Returns the prefixes of the finished parts of `output`, by the end of their names, such as `text_document`."""
    return _parts_named(output, ".idx")


def part_progress(output: Path) -> dict[str, dict[CorpusPart, Path]]:
    """Returns the records of the parts of `output` that are not finished, by the end of their names."""
    hidden = partial_path(output, "progress").name.removeprefix(f".{output.name}")
    return _parts_named(output.with_name(f".{output.name}"), hidden)


def _parts_named(output: Path, end: str) -> dict[str, dict[CorpusPart, Path]]:
    found: dict[str, dict[CorpusPart, Path]] = {}
    for path in sorted(output.parent.glob(f"*{end}")):
        name = path.name.removesuffix(end).removeprefix(output.name)
        if path.name.startswith(output.name) and (match := NAME.fullmatch(name)):
            prefix = path if end.startswith(".progress") else path.with_name(path.name.removesuffix(end))
            found.setdefault(match[3], {})[CorpusPart(int(match[1]), int(match[2]))] = prefix
    return found


def complete_parts(output: Path, of: int) -> set[int]:
    """Returns the numbers of the parts of which all datasets are finished: the run may have several keys."""
    finished = [{part.number for part in found if part.of == of} for found in part_datasets(output).values()]
    begun = {part.number for found in part_progress(output).values() for part in found if part.of == of}
    # A part with a record is between its keys: some of its datasets have their names already.
    return set.intersection(*finished) - begun if finished else set()


def is_made(record: PartRecord, prefix: Path, tokenizer: Tokenizer) -> bool:
    """Returns whether a part's dataset is there, and was made with these settings."""
    meta = read_meta(prefix) if is_indexed(prefix) else None
    if meta is None or meta.part != asdict(record):
        return False
    # The settings are in the record; of the tokenizer's content only its own digest tells.
    return (meta.tokenizer_digest, meta.eod) == (content_digest(tokenizer), tokenizer.eod)


def in_order(datasets: Sequence[IndexedDataset]) -> list[IndexedDataset]:
    """Returns datasets in the order in which they are merged: the parts of a run by their number, others as given.

    Raises:
      UserError: some are parts and some aren't, parts are of different runs, or one is missing or there twice.
    """
    records = [(dataset, _record(dataset)) for dataset in datasets]
    parts = [(dataset, record) for dataset, record in records if record is not None]
    if not parts:
        return list(datasets)
    if len(parts) < len(records):
        whole = next(dataset for dataset, record in records if record is None)
        raise UserError(
            f"{parts[0][0].prefix} is {parts[0][1].part}, and {whole.prefix} is not a part: merge the parts of a run "
            "alone, and then the result with others"
        )
    for other in parts[1:]:
        if why := _difference(parts[0], other):
            raise UserError(f"{parts[0][0].prefix} and {other[0].prefix} are not parts of one run: {why}")
    by_number: dict[int, IndexedDataset] = {}
    for dataset, record in parts:
        if (twice := by_number.setdefault(record.number, dataset)) is not dataset:
            raise UserError(f"{twice.prefix} and {dataset.prefix} are both {record.part}: leave one of them out")
    of = parts[0][1].of
    missing = [number for number in range(1, of + 1) if number not in by_number]
    if missing:
        raise UserError(
            f"{_listed(missing)} of the {of} parts of {parts[0][0].prefix} {'is' if len(missing) == 1 else 'are'} "
            f"missing: run mtjax data preprocess with --part {missing[0]}/{of}{' and so on' if missing[1:] else ''}"
        )
    if not any(dataset.num_tokens for dataset in datasets):
        raise UserError(f"none of the {of} parts of {parts[0][0].prefix} has a token: there is nothing to merge")
    return [by_number[number] for number in sorted(by_number)]


def _listed(numbers: Sequence[int]) -> str:
    more = len(numbers) - NAMED
    shown = ", ".join(map(str, numbers[:NAMED])) + (f" and {more} more" if more > 0 else "")
    return f"{'part' if len(numbers) == 1 else 'parts'} {shown}"


def _record(dataset: IndexedDataset) -> PartRecord | None:
    if dataset.meta is None or dataset.meta.part is None:
        return None
    try:
        return PartRecord(**dataset.meta.part)
    except TypeError as e:
        raise UserError(f"{meta_path(dataset.prefix)} is corrupted: its record of a part has other fields ({e})") from e


def _difference(one: tuple[IndexedDataset, PartRecord], other: tuple[IndexedDataset, PartRecord]) -> str | None:
    """Returns what differs between the runs of two parts, None where they are of the same."""
    return next(_differences(*one, *other), None)


def _differences(
    dataset: IndexedDataset, record: PartRecord, other: IndexedDataset, theirs: PartRecord
) -> Iterator[str]:
    if record.of != theirs.of:
        yield f"one is {record.part}, the other {theirs.part}"
    if record.key != theirs.key:
        yield f"one has the text under the key {record.key!r}, the other under {theirs.key!r}"
    for option, value in record.settings.items():
        if (their := theirs.settings.get(option)) != value:
            yield f"one was made with {_typed(option, value)}, the other with {_typed(option, their)}"
    assert dataset.meta is not None
    assert other.meta is not None
    if dataset.meta.tokenizer_digest != other.meta.tokenizer_digest:
        names = (dataset.meta.tokenizer, other.meta.tokenizer)
        yield f"one was made with the tokenizer {names[0]}, the other with another, {names[1]}"
    if dataset.meta.eod != other.meta.eod:
        yield f"documents end with token {dataset.meta.eod} in one, and with token {other.meta.eod} in the other"
    if record.files != theirs.files:
        yield "they were made from text files with other names or sizes"


def _typed(option: str, value: Any) -> str:
    if isinstance(value, bool):
        return option if value else f"--no-{option[2:]}"
    return f"{option} {' '.join(value) if isinstance(value, list) else value}"
