"""Whatever a corpus is packed in, all commands read the text of its JSON lines."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import shutil
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtjax.config import Config, Data
from mtjax.data.commands import clean, merge, preprocess
from mtjax.data.corpus import tables
from mtjax.data.corpus.indexed import IndexedDataset, bin_path, idx_path
from mtjax.data.run_text import RunText
from mtjax.data.samples.family import samples_of
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from tests.data.corpora import texts

TEXTS = [*texts(40), 'a "quoted", text\twith\ttabs\nand lines\r\n', "ünïcode \U0001f642 \u2028 中文", "plain"]
ROWS = [{"id": i, "text": text, "meta": {"source": {"body": text}}} for i, text in enumerate(TEXTS)]


def lines(rows=ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def delimited(delimiter: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([["id", "text"], *([row["id"], row["text"]] for row in ROWS)])
    return file.getvalue().encode()


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def zstd_with_a_window_of_2_gib(content: bytes) -> bytes:
    """A frame of raw blocks whose header asks for the window of `zstd --long=31`."""
    blocks = [content[i : i + 100_000] for i in range(0, len(content), 100_000)]
    headers = [(len(block) << 3 | (i == len(blocks) - 1)).to_bytes(3, "little") for i, block in enumerate(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\xa8" + b"".join(h + b for h, b in zip(headers, blocks, strict=True))


def file(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return write


def halves(pack: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    at = len(lines()) // 2
    return lambda: pack(lines()[:at]) + pack(lines()[at:])


def table(rows=ROWS):
    return pytest.importorskip("pyarrow").Table.from_pylist(rows)


def parquet(folder: Path) -> Path:
    from pyarrow import parquet

    parquet.write_table(table(), folder / "rows", row_group_size=7)  # known by content
    return folder / "rows"


def folder_of_parquet(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "rows/b").mkdir(parents=True)
    for name, part in (("a-00000-of-00002.parquet", ROWS[:20]), ("b/a-00001-of-00002.parquet", ROWS[20:])):
        parquet.write_table(table(part), folder / "rows" / name)
    (folder / "rows/README.md").write_text("# Rows")
    (folder / "rows/_SUCCESS").write_text("")
    (folder / "rows/.hidden.parquet").write_text("")
    return folder / "rows"


def arrow_stream(path: Path, rows) -> None:
    import pyarrow

    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table(rows).schema) as writer:
        writer.write_table(table(rows), max_chunksize=6)


def arrow_file(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    with (
        pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table().schema) as writer,
    ):
        writer.write_table(table(), max_chunksize=6)
    return folder / "rows.arrow"


def saved_to_disk(folder: Path) -> Path:
    """As `datasets` 5.2 writes it; the order is that of state.json."""
    pytest.importorskip("pyarrow")
    (folder / "rows").mkdir()
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name, part in zip(names, (ROWS[:20], ROWS[20:]), strict=True):
        arrow_stream(folder / "rows" / name, part)
    (folder / "rows/dataset_info.json").write_text("{}")
    (folder / "rows/state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder / "rows"


def cache_of_datasets(folder: Path) -> Path:
    """As in ~/.cache/huggingface/datasets, with the result of a `map` next to it."""
    pytest.importorskip("pyarrow")
    leaf = folder / "rows/default-0123/0.0.0/4567"
    leaf.mkdir(parents=True)
    arrow_stream(leaf / "json-train-00000-of-00002.arrow", ROWS[:20])
    arrow_stream(leaf / "json-train-00001-of-00002.arrow", ROWS[20:])
    arrow_stream(leaf / "cache-89ab.arrow", ROWS[:1])
    (leaf / "dataset_info.json").write_text("{}")
    return folder / "rows"


def two_splits_saved(folder: Path) -> Path:
    saved = saved_to_disk(folder)
    (folder / "all").mkdir()
    saved.rename(folder / "all/train")
    (folder / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    shutil.copytree(folder / "all/train", folder / "all/test")
    return folder / "all/train"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "gzip in capitals": file("x.jsonl.GZ", lambda: gzip.compress(lines())),
    ".gzip": file("x.jsonl.gzip", lambda: gzip.compress(lines())),
    ".zstd": file("x.jsonl.zstd", lambda: zstd(lines())),
    ".bz2": file("x.jsonl.bz2", lambda: bz2.compress(lines())),
    ".xz": file("x.jsonl.xz", lambda: lzma.compress(lines())),
    "gzip without a suffix": file("x.jsonl", lambda: gzip.compress(lines())),
    "text with the suffix of gzip": file("x.jsonl.gz", lines),
    "gzip of gzip": file("x.jsonl.gz", lambda: gzip.compress(gzip.compress(lines()))),
    "two members of gzip": file("x.jsonl.gz", halves(gzip.compress)),
    "two frames of zstd": file("x.jsonl.zst", halves(zstd)),
    "two streams of bz2": file("x.jsonl.bz2", halves(bz2.compress)),
    "two streams of xz": file("x.jsonl.xz", halves(lzma.compress)),
    "a skippable frame of zstd": file("x.jsonl.zst", lambda: b"\x52\x2a\x4d\x18\x03\0\0\0abc" + zstd(lines())),
    "a window of 2 GiB": file("x.jsonl.zst", lambda: zstd_with_a_window_of_2_gib(lines())),
    "zeros behind gzip": file("x.jsonl.gz", lambda: gzip.compress(lines()) + bytes(300_000)),
    "zeros between members": file("x.jsonl.gz", halves(lambda part: gzip.compress(part) + bytes(512))),
    "UTF-16, little endian": file("x.jsonl", lambda: ("\ufeff" + lines().decode()).encode("utf-16-le")),
    "UTF-16, big endian, gzip": file(
        "x.json.gz", lambda: gzip.compress(b"\xfe\xff" + lines().decode().encode("utf-16-be"))
    ),
    "UTF-32": file("x.jsonl", lambda: lines().decode().encode("utf-32")),
    "CSV": file("x.csv", lambda: delimited(",")),
    "CSV with a mark, xz": file("X.CSV.XZ", lambda: lzma.compress(b"\xef\xbb\xbf" + delimited(","))),
    "TSV": file("x.tsv", lambda: delimited("\t")),
    "CSV in UTF-16": file("x.csv", lambda: delimited(",").decode().encode("utf-16")),
    "Parquet": parquet,
    "a folder of Parquet": folder_of_parquet,
    "an Arrow file": arrow_file,
    "save_to_disk": saved_to_disk,
    "a split of save_to_disk": two_splits_saved,
    "the cache of datasets": cache_of_datasets,
    "a comma in the name": file("a,b.jsonl", lines),
    "a comma and a space": file("a, b.jsonl", lines),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(texts(200), path, 400)
    return path


@pytest.fixture(scope="module")
def expected(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    (folder / "x.jsonl").write_bytes(lines())
    run_preprocess(folder / "x.jsonl", folder / "out", tokenizer)
    return contents(folder / "out_text_document")


def contents(prefix):
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def run_preprocess(path, output, tokenizer, *more) -> int:
    words = ["--input", path, "--output", output, "--tokenizer", tokenizer, "--workers", 0, "--append-eod", *more]
    return preprocess.main([str(word) for word in words])


def run_clean(path, output, *more) -> int:
    words = ["--input", path, "--output", output, "--workers", 0, "--min-tokens", 0, "--jaccard", 1]
    return clean.main([str(word) for word in (*words, "--no-fix-unicode", *more)])


def tokens_of_training(data: Data) -> IndexedDataset:
    text = RunText(data)
    (source,) = text._sources()
    return text.indexed(source, samples_of("gpt").encoding)


@pytest.mark.parametrize("name", FORMATS)
def test_every_command_reads_the_same_text(name, tokenizer, expected, tmp_path):
    path = FORMATS[name](tmp_path)
    assert run_preprocess(path, tmp_path / "out", tokenizer, "--text-key", "text") == 0
    assert contents(tmp_path / "out_text_document") == expected
    assert run_clean(path, tmp_path / "clean.jsonl", "--text-key", "text") == 0
    rows = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_bytes().splitlines()]
    ids = [row["id"] for row in rows] if "SV" not in name else [int(row["id"]) for row in rows]
    assert (ids, [row["text"] for row in rows]) == ([*range(len(ROWS))], TEXTS)
    named = f"'{path}'" if "space" in name else str(path)
    data = Data(data=named, tokenizer=f"{tokenizer}", text_key="text", cache_dir=tmp_path / "cache")
    assert contents(tokens_of_training(data).prefix) == expected


@pytest.mark.parametrize("chunk", [300, 1 << 20])
@pytest.mark.parametrize("name", ["Parquet", "save_to_disk", "CSV", "gzip in capitals", "UTF-16, little endian"])
def test_a_run_that_was_interrupted_continues_in_the_middle(name, chunk, tmp_path, monkeypatch):
    from mtjax.data.corpus.documents import TextFields
    from mtjax.data.corpus.reader import Position, chunks, expand

    monkeypatch.setattr("mtjax.data.corpus.reader.CHUNK_BYTES", chunk)
    paths, fields = expand([str(FORMATS[name](tmp_path))]), TextFields(("text",), named=True)
    every = list(chunks(paths, None, fields))
    assert len(every) == len(paths) or len(every) > 5
    for i, before in enumerate(every[:-1]):
        line = before.first_line + sum(document.count(b"\n") for document in before.documents)
        again = list(chunks(paths, Position(before.file, before.end, line), fields))
        assert [(c.path, c.start, c.first_line, c.documents) for c in again if c.documents] == [
            (c.path, c.start, c.first_line, c.documents) for c in every[i + 1 :]
        ]


@pytest.mark.torch
def test_what_datasets_writes_is_read(tokenizer, expected, tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "x.jsonl").write_bytes(lines())
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "cached"))
    loaded["train"].save_to_disk(str(tmp_path / "saved"), num_shards=3)
    loaded.save_to_disk(str(tmp_path / "all"))
    for name in ("cached", "saved", "all", "all/train"):
        assert run_preprocess(tmp_path / name, tmp_path / "out", tokenizer, "--overwrite") == 0
        assert contents(tmp_path / "out_text_document") == expected


def test_files_and_folders_at_urls(tokenizer, expected, tmp_path, capsys):
    """Of fsspec's file system in memory, as of any other; `train` copies from object stores first."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    folder_of_parquet(tmp_path)
    fs.put(str(tmp_path / "rows"), "/corpus/rows", recursive=True)
    fs.pipe("/corpus/x.jsonl.GZ", gzip.compress(lines()))
    fs.pipe("/corpus/x.csv", delimited(","))
    for name in ("rows", "rows/", "rows/**/*.parquet", "x.jsonl.GZ", "*.GZ", "x.csv"):
        arguments = (f"memory://corpus/{name}", tmp_path / "out", tokenizer, "--overwrite", "--text-key", "text")
        assert run_preprocess(*arguments) == 0
        assert contents(tmp_path / "out_text_document") == expected
    assert run_preprocess("memory://corpus", tmp_path / "no", tokenizer) == 2
    assert "memory://corpus has both tables and text (x.csv): name those to read" in capsys.readouterr().err


def test_a_nested_key(tokenizer, expected, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_bytes(lines())
    key = "meta.source.body"
    for path in (tmp_path / "x.jsonl", parquet(tmp_path)):
        assert run_preprocess(path, tmp_path / "out", tokenizer, "--text-key", key, "--overwrite") == 0
        assert contents(tmp_path / f"out_{key}_document") == expected
        assert run_clean(path, tmp_path / "clean.jsonl", "--text-key", key, "--overwrite") == 0
        assert [json.loads(line) for line in (tmp_path / "clean.jsonl").read_bytes().splitlines()] == ROWS
        data = Data(data=str(path), tokenizer=f"{tokenizer}", text_key=key, cache_dir=tmp_path / "cache")
        assert contents(tokens_of_training(data).prefix) == expected
    assert run_preprocess(tmp_path / "x.jsonl", tmp_path / "no", tokenizer, "--text-key", "body") == 2
    assert (
        "x.jsonl, line 1: no text under the key 'body'; it has 'id', 'text', 'meta'; 'body' is nested: "
        "--text-key meta.source.body;" in capsys.readouterr().err
    )


def test_a_key_with_a_dot_is_taken_as_it_is(tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a.b": "one", "a": {"b": "two"}}\n{"a.b": {"c": "x"}, "a": {"b": "two"}}\n')
    assert (
        run_preprocess(tmp_path / "x.jsonl", tmp_path / "o", tokenizer, "--text-key", "a.b", "--on-error", "skip") == 0
    )
    assert len(IndexedDataset(tmp_path / "o_a.b_document")) == 1


def test_the_key_of_a_tokenizer_that_is_trained_on_the_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(delimited(","))
    run = Data(data=str(tmp_path / "x.csv"), text_key="text", cache_dir=tmp_path / "cache")
    assert RunText(run).tokenizer.encode(" river")


ROW = '{"text": "one"}'
REFUSED = {
    "a JSON array": (
        "x.json",
        b'[\n{"text": "one"},\n{"text": "two"}\n]',
        "x.json is a JSON array, and must have one object per line: " + "convert it with jq -c '.[]' FILE > NEW.jsonl",
    ),
    "a JSON array on one line": ("x.json", b' [{"text": "one"}, {"text": "two"}]', "x.json is a JSON array"),
    "a long JSON array": ("x.json", b'[{"text": "' + b"one " * 50_000 + b'"}]', "x.json is a JSON array"),
    "pretty-printed JSON": (
        "x.jsonl",
        b'{\n  "text": "one"\n}\n{\n  "text": "two"\n}\n',
        "x.jsonl has pretty-printed JSON, and must have one object per line: "
        + "convert it with jq -c . FILE > NEW.jsonl",
    ),
    "pretty-printed, gzip": (
        "x.jsonl.gz",
        gzip.compress(json.dumps({"text": "one " * 50_000}, indent=1).encode()),
        "x.jsonl.gz has pretty-printed JSON",
    ),
    "glued objects": (
        "x.jsonl",
        f"{ROW}\n{ROW}{ROW}\n".encode(),
        "x.jsonl, line 2: there are several JSON objects on this line, and each must be on its own: "
        + "write the file anew with jq -c . FILE > NEW.jsonl",
    ),
    "CSV without a key": (
        "x.csv",
        b"id,text\n1,one\n",
        "x.csv is a CSV file: name the column with the text with --text-key; its columns are id, text",
    ),
    "TSV without a key": ("x.tsv.gz", gzip.compress(b"id\ttext\n1\tone\n"), "x.tsv.gz is a TSV file: name the column"),
    "Latin-1": (
        "x.jsonl",
        b'{"text": "caf\xe9"}\n',
        "x.jsonl, line 1: byte 0xe9 at position 13 is not UTF-8: convert the file, for example with iconv",
    ),
    "half of UTF-16": (
        "x.jsonl",
        b"\xff\xfe" + ROW.encode("utf-16-le")[:-1],
        "x.jsonl begins with the byte order mark of UTF-16, and is not UTF-16 text",
    ),
    "a zip archive": (
        "x.jsonl.gz",
        b"PK\x03\x04rest",
        "x.jsonl.gz is a zip archive, which can't be read: extract it with unzip",
    ),
    "a tar archive": (
        "x.jsonl.gz",
        gzip.compress(bytes(257) + b"ustar\x0000" + bytes(247)),
        "x.jsonl.gz is a tar archive, which can't be read: extract it with tar -xf",
    ),
    "lz4": (
        "x.jsonl.lz4",
        b"\x04\x22\x4d\x18rest",
        "x.jsonl.lz4 is compressed with lz4, which can't be read: decompress it with lz4 -d",
    ),
    "gzip cut off": ("x.jsonl", gzip.compress(lines())[:-20], "x.jsonl is corrupted: its gzip data end in the middle"),
    "bz2 cut off": ("x.jsonl", bz2.compress(lines())[:-20], "x.jsonl is corrupted: its bz2 data end in the middle"),
    "xz cut off": ("x.jsonl", lzma.compress(lines())[:-20], "x.jsonl is corrupted: its xz data end in the middle"),
    "gzip with other bytes": (
        "x.jsonl",
        gzip.compress(lines())[:200] + b"xxxx" + gzip.compress(lines())[204:],
        "x.jsonl is corrupted: its gzip data are invalid",
    ),
    "Parquet cut off": ("x.parquet", b"PAR1 and no more", "x.parquet is not a valid Parquet file"),
    "Arrow cut off": ("x.arrow", b"ARROW1\0\0 and no more", "x.arrow is not a valid Arrow file"),
    "Parquet in gzip": (
        "x.parquet.gz",
        gzip.compress(b"PAR1 and no more"),
        "x.parquet.gz is a compressed Parquet or Arrow file: decompress it",
    ),
}
"""What -> its file, and the beginning of the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_read_says_what_it_is_and_what_to_do(name, tokenizer, tmp_path, capsys):
    file, content, message = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    data = Data(data=str(tmp_path / file), tokenizer=f"{tokenizer}", cache_dir=tmp_path / "cache")

    def train() -> int:
        from mtjax.cli import run_main

        return run_main(lambda: tokens_of_training(data) and 0)

    for run in (
        lambda: run_preprocess(tmp_path / file, tmp_path / "out", tokenizer),
        lambda: run_clean(tmp_path / file, tmp_path / "clean.jsonl"),
        train,
    ):
        assert run() == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {tmp_path}/{message}")


COLUMNS = {
    "CSV": (
        file("x.csv", lambda: delimited(",")),
        "x.csv has no column 'body'; its columns are id, text: name the one",
    ),
    "Parquet": (parquet, "rows has no column 'body'; its columns are id, text, meta: name the one"),
    "Arrow": (arrow_file, "rows.arrow has no column 'body'; its columns are id, text, meta: name the one"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_not_there(name, tokenizer, tmp_path, capsys):
    write, message = COLUMNS[name]
    path = write(tmp_path)
    for run in (run_preprocess(path, tmp_path / "out", tokenizer, "--text-key", "body"),
                run_clean(path, tmp_path / "clean.jsonl", "--text-key", "body")):  # fmt: skip
        assert run == 2
    errors = capsys.readouterr().err.splitlines()
    assert all(error.startswith(f"error: {tmp_path}/{message}") for error in errors)


def test_rows_that_cant_be_used(tokenizer, tmp_path, capsys):
    (tmp_path / "x.csv").write_text('id,text\n1,one\n2,two, or more\n3\n4,"four\nlines"\n')
    arguments = (tmp_path / "x.csv", tmp_path / "out", tokenizer, "--text-key", "text")
    assert run_preprocess(*arguments) == 2
    assert (
        "x.csv, row 2: it has 3 fields, and the header 2: quote fields that have ','; --on-error skip leaves such rows"
        in capsys.readouterr().err
    )
    assert run_preprocess(*arguments, "--on-error", "skip") == 0
    assert "x.csv, row 3: it has 1 fields" in capsys.readouterr().err
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 2
    (tmp_path / "x.csv").write_text('id,text\n1,"one\n2,two\n')
    assert run_preprocess(*arguments, "--overwrite") == 2
    assert "x.csv, line 3: unexpected end of data" in capsys.readouterr().err
    (tmp_path / "x.csv").write_bytes(b"id,text\n1,caf\xe9\n")
    assert run_preprocess(*arguments, "--overwrite") == 2
    assert "x.csv is not UTF-8 text (byte 0xe9" in capsys.readouterr().err


def test_columns_of_bytes_and_of_nothing(tokenizer, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = pyarrow.table({"text": pyarrow.array([b"one", b"\xff\xfe", None, "zwölf".encode()], pyarrow.binary())})
    parquet.write_table(rows, tmp_path / "x.parquet")
    assert run_preprocess(tmp_path / "x.parquet", tmp_path / "out", tokenizer, "--on-error", "skip") == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert len(dataset) == 2
    errors = capsys.readouterr().err
    assert "x.parquet, row 2: no text under the key 'text'; it holds dict" in errors
    assert "x.parquet, row 3: no text under the key 'text'; it holds NoneType" in errors


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_two_columns_of_one_name_are_refused(kind, tokenizer, tmp_path, capsys):
    """The second one would be read in silence."""
    path = tmp_path / f"x.{kind}"
    if kind == "csv":
        path.write_text("text,id,text\none,1,another\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = [pyarrow.array([words]) for words in ("one", "1", "another")]
        parquet.write_table(pyarrow.Table.from_arrays(columns, ["text", "id", "text"]), path)
    assert run_preprocess(path, tmp_path / "out", tokenizer, "--text-key", "text") == 2
    assert f"x.{kind} has 2 columns named 'text': rename all but one" in capsys.readouterr().err
    assert run_preprocess(path, tmp_path / "out", tokenizer, "--text-key", "id") == 0
    assert run_clean(path, tmp_path / "clean.jsonl", "--text-key", "id") == 2
    assert "2 columns named 'text'" in capsys.readouterr().err


def test_dates_that_python_does_not_have_are_named_by_their_column(tokenizer, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for kind, count in ((pyarrow.timestamp("ms"), 10**17), (pyarrow.timestamp("us", "Foo/Bar"), 0)):
        table = pyarrow.table({"text": ["one", "two"], "written": pyarrow.array([0, count], kind)})
        parquet.write_table(table, tmp_path / "x.parquet")
        assert run_preprocess(tmp_path / "x.parquet", tmp_path / "out", tokenizer, "--overwrite") == 0
        assert run_clean(tmp_path / "x.parquet", tmp_path / "clean.jsonl") == 2
        expected = f"x.parquet has a column 'written' of {kind} with values that Python does not have: write them"
        assert expected in capsys.readouterr().err


def test_times_and_decimals_are_text_in_full(tmp_path):
    """With or without pandas, whose types have nanoseconds; Python's have none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ns = [None, 0, 1_000, 1_000_000_001, 86_399_999_999_999]
    columns = {
        "id": pyarrow.array([*ns[:-1], -1], pyarrow.timestamp("ns")),
        "zone": pyarrow.array(ns, pyarrow.timestamp("ns", "+02:00")),
        "time": pyarrow.array(ns, pyarrow.time64("ns")),
        "span": pyarrow.array([*ns[:-1], 10**14 + 1], pyarrow.duration("ns")),
        "date": pyarrow.array([0, 1, 2, 3, None], pyarrow.date32()),
        "price": pyarrow.array([*map(Decimal, ["2.00", "1E+3", "0.5", "-1"]), None], pyarrow.decimal128(6, 2)),
        "text": [f"text {number}" for number in range(5)],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet", version="2.6")
    (tmp_path / "ids").write_text("1970-01-01 00:00:01.000000001\n")
    assert run_clean(tmp_path / "x.parquet", tmp_path / "clean.jsonl", "--remove-ids", tmp_path / "ids") == 0
    rows = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text().splitlines()]
    assert {name: [row[name] for row in rows] for name in columns if name != "text"} == {
        "id": [None, "1970-01-01 00:00:00", "1970-01-01 00:00:00.000001", "1969-12-31 23:59:59.999999999"],
        "zone": [
            None,
            "1970-01-01 02:00:00+02:00",
            "1970-01-01 02:00:00.000001+02:00",
            "1970-01-02 01:59:59.999999999+02:00",
        ],
        "time": [None, "00:00:00", "00:00:00.000001", "23:59:59.999999999"],
        "span": [None, "0:00:00", "0:00:00.000001", "1 day, 3:46:40.000000001"],
        "date": ["1970-01-01", "1970-01-02", "1970-01-03", None],
        "price": ["2.00", "1000.00", "0.50", None],
    }
    assert [row["text"] for row in rows] == ["text 0", "text 1", "text 2", "text 4"]
    assert tables._line({"a": Decimal("1E+3")}) == b'{"a": "1000"}\n'  # Arrow may have such a scale


def test_bytes_behind_the_end_of_gzip_are_read_over_with_a_note(tokenizer, expected, tmp_path, capsys):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines()) + bytes(10) + b"trailing!")
    assert run_preprocess(tmp_path / "x.jsonl.gz", tmp_path / "out", tokenizer) == 0
    assert contents(tmp_path / "out_text_document") == expected
    assert "note    " in (error := capsys.readouterr().err)
    assert "x.jsonl.gz has 9 bytes after the end of its gzip data: ignored" in error


def test_a_file_whose_name_alone_is_compressed_is_read_with_a_note(tokenizer, tmp_path, capsys):
    (tmp_path / "x.jsonl.gz").write_bytes(lines())
    assert run_preprocess(tmp_path / "x.jsonl.gz", tmp_path / "out", tokenizer) == 0
    assert f"note    {tmp_path}/x.jsonl.gz is not compressed, and is read as it is\n" in capsys.readouterr().err


def test_folders_of_several_splits_or_of_none(tokenizer, tmp_path, capsys):
    two_splits_saved(tmp_path)
    folder_of_parquet(tmp_path)
    (tmp_path / "mixed").mkdir()
    for split in ("train", "test"):
        shutil.copy(tmp_path / "rows/a-00000-of-00002.parquet", tmp_path / f"mixed/{split}-00000-of-00001.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    for name, message in {
        "all": f"{tmp_path}/all has several splits: name one of {tmp_path}/all/train, {tmp_path}/all/test",
        "mixed": f"{tmp_path}/mixed has several splits (test, train): name the files of one, say "
        f"'{tmp_path}/mixed/train-*.parquet'",
        "empty": f"{tmp_path}/empty is a directory; name the files in it, say '{tmp_path}/empty/*.jsonl'",
        "gone": f"{tmp_path}/gone is incomplete: data-0.arrow, which its state.json names, does not exist",
    }.items():
        assert run_preprocess(tmp_path / name, tmp_path / "out", tokenizer) == 2
        assert f"error: {message}\n" in capsys.readouterr().err


def test_a_missing_pyarrow_is_named_with_its_extra(tokenizer, tmp_path, capsys, monkeypatch):
    path = parquet(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run_preprocess(path, tmp_path / "out", tokenizer) == 2
    assert "this needs the library pyarrow: pip install '.[parquet]'" in capsys.readouterr().err


def test_config_has_the_settings():
    data = Config().data
    assert (data.text_key, data.eod_token, data.parse_special) == (None, None, False)


WORDS = st.text(max_size=30) | st.sampled_from(["one, two", 'a "quote"', "a\tb\n", "\ufeff", "\u2028", "<|endoftext|>"])
VALUES = WORDS | st.integers() | st.none() | st.lists(WORDS, max_size=2) | st.dictionaries(WORDS, WORDS, max_size=1)
PACKINGS = [bytes, gzip.compress, bz2.compress, lzma.compress, zstd, lambda content: gzip.compress(content) * 2]
ENCODINGS = ["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "latin-1", "cp1252"]
ENDINGS = [".jsonl", ".json", ".JSONL.GZ", ".csv", ".tsv.xz", ".txt", ".zst", "", ".parquet", ".arrow"]


@st.composite
def corpora(draw) -> tuple[str, bytes]:
    """A file's name, and bytes that may be text of that kind, packed, cut off and changed."""
    rows = draw(st.lists(st.dictionaries(st.sampled_from(["text", "id", "a.b"]), VALUES, max_size=3), max_size=5))
    newline = draw(st.sampled_from(["\n", "\r\n", "\r", "", "\n\n", ","]))
    kind = draw(st.sampled_from(["json", "json", "array", "csv", "tables", "bytes"]))
    if kind == "csv":
        file = io.StringIO(newline="")
        csv.writer(file).writerows([["text", "id"], *([row.get("text"), row.get("id")] for row in rows)])
        text = file.getvalue()
    else:
        indent = draw(st.sampled_from([None, None, 2]))
        text = newline.join(json.dumps(row, ensure_ascii=draw(st.booleans()), indent=indent) for row in rows)
        text = f"[{text}]" if kind == "array" else text
    content = text.encode(draw(st.sampled_from(ENCODINGS)), errors="replace")
    if kind == "bytes":
        content = draw(st.binary(max_size=300))
    if kind == "tables":
        texts_of_rows = [{"text": draw(st.text(max_size=30)), "id": i} for i in range(len(rows) + 1)]
        content = table_bytes(texts_of_rows, arrow=draw(st.booleans()))
    content = draw(st.sampled_from(PACKINGS))(content)
    damage = draw(st.sampled_from(["none", "none", "cut", "change", "more"]))
    at = draw(st.integers(0, max(len(content) - 1, 0)))
    if damage == "cut":
        content = content[:at]
    elif damage == "change":
        content = content[:at] + draw(st.binary(min_size=1, max_size=3)) + content[at + 1 :]
    elif damage == "more":
        content += draw(st.binary(max_size=20))
    return f"x{draw(st.sampled_from(ENDINGS))}", content


def table_bytes(rows, arrow: bool) -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    if arrow:
        with pyarrow.ipc.new_stream(sink, table(rows).schema) as writer:
            writer.write_table(table(rows))
    else:
        parquet.write_table(table(rows), sink)
    return sink.getvalue().to_pybytes()


def check_any_corpus(tokenizer, folder: Path, corpus: tuple[str, bytes], on_error: str) -> None:
    name, content = corpus
    fresh_folder, error, out = tempfile.TemporaryDirectory(dir=folder), io.StringIO(), io.StringIO()
    with fresh_folder as fresh, contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        path = Path(fresh) / name
        path.write_bytes(content)
        code = run_preprocess(path, Path(fresh) / "out", tokenizer, "--on-error", on_error, "--text-key", "text")
        left = sorted(p.name for p in Path(fresh).iterdir())
    message = error.getvalue()
    assert code in (0, 2) and message and "Traceback" not in message, message
    if code == 2:
        assert message.splitlines()[-1].startswith("error: ") and left == [name], message


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@given(corpus=corpora(), on_error=st.sampled_from(["fail", "skip"]))
@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_corpus_ends_in_a_traceback_or_in_silence(tokenizer, tmp_path_factory, corpus, on_error):
    check_any_corpus(tokenizer, tmp_path_factory.getbasetemp(), corpus, on_error)


@pytest.mark.exhaustive
@given(corpus=corpora(), on_error=st.sampled_from(["fail", "skip"]))
@settings(deadline=None, max_examples=500, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_corpus_of_hundreds_does(tokenizer, tmp_path_factory, corpus, on_error):
    check_any_corpus(tokenizer, tmp_path_factory.getbasetemp(), corpus, on_error)


@st.composite
def intact_corpora(draw) -> tuple[list[str], dict[str, bytes]]:
    """Texts, and files in which they are one after another, each of another format, encoding and packing."""
    texts_of_files = draw(st.lists(st.lists(WORDS, min_size=1, max_size=6), min_size=1, max_size=4))
    written = {}
    for number, found in enumerate(texts_of_files):
        rows = [{"text": text, "id": i} for i, text in enumerate(found)]
        kind = draw(st.sampled_from(["json", "json", "csv", "parquet", "arrow"]))
        if kind == "json":
            newline, ascii_only = draw(st.sampled_from(["\n", "\r\n", "\n\n", " \n"])), draw(st.booleans())
            text = newline.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
            text += draw(st.sampled_from(["", newline]))
        elif kind == "csv":
            file = io.StringIO(newline="")
            csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=draw(st.sampled_from(["\n", "\r\n"]))).writerows(
                [["text", "id"], *([row["text"], row["id"]] for row in rows)]
            )
            text = file.getvalue()
        if kind in ("json", "csv"):
            content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])))
            content = draw(st.sampled_from(PACKINGS[:-1]))(content)
        else:
            content = table_bytes(rows, arrow=kind == "arrow")
        suffix = {"json": draw(st.sampled_from([".jsonl", ".json", ".NDJSON.gz"])), "csv": ".csv"}.get(kind, "")
        written[f"{number}{suffix}"] = content
    return [text for found in texts_of_files for text in found], written


def check_nothing_is_lost(tokenizer, folder: Path, corpus: tuple[list[str], dict[str, bytes]], parts: int) -> None:
    found, written = corpus
    error = io.StringIO()
    fresh_folder = tempfile.TemporaryDirectory(dir=folder)
    with fresh_folder as name, contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        fresh = Path(name)
        (fresh / "in").mkdir()
        for file_name, content in written.items():
            (fresh / "in" / file_name).write_bytes(content)
        arguments = (fresh / "in/*", fresh / "out", tokenizer, "--text-key", "text")
        codes = [run_preprocess(*arguments, "--part", f"{n}/{parts}") for n in range(parts, 0, -1)]
        codes.append(merge.main(["--parts", f"{fresh}/out"]))
        whole = run_preprocess(fresh / "in/*", fresh / "whole", tokenizer, "--text-key", "text")
        if not any(found):
            assert (codes[-1], whole) == (2, 2) and "has a token" in error.getvalue()
            return
        assert codes == [0] * len(codes) and whole == 0, error.getvalue()
        assert contents(fresh / "out_text_document") == contents(fresh / "whole_text_document")
        dataset, words = IndexedDataset(fresh / "whole_text_document"), open_tokenizer(str(tokenizer))
        assert dataset.num_documents == len(found)
        assert [words.decode(dataset[i].tolist()[:-1]) for i in range(len(dataset))] == [text for text in found if text]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@given(corpus=intact_corpora(), parts=st.integers(1, 5))
@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_row_of_a_corpus_is_lost(tokenizer, tmp_path_factory, corpus, parts):
    """Also in parts, which are made last first."""
    check_nothing_is_lost(tokenizer, tmp_path_factory.getbasetemp(), corpus, parts)


@pytest.mark.exhaustive
@given(corpus=intact_corpora(), parts=st.integers(1, 5))
@settings(max_examples=500, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_row_of_hundreds_of_corpora_is_lost(tokenizer, tmp_path_factory, corpus, parts):
    check_nothing_is_lost(tokenizer, tmp_path_factory.getbasetemp(), corpus, parts)
