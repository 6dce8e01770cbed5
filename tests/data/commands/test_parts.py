"""Parts of a corpus, made in any order, are the corpus."""

import gzip
import json
import shutil

import pytest

from mtjax.cli import main
from mtjax.data.commands import preprocess
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.meta import meta_path
from mtjax.data.corpus.parts import CorpusPart, complete_parts, spans_of
from mtjax.data.corpus.reader import chunks
from mtjax.data.corpus.resume_record import ResumeRecord
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from tests.data.corpora import texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(texts(200), path, 400)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files that can be divided (JSON lines, Parquet) and files that can't, an empty one, and one long line."""
    folder = tmp_path_factory.mktemp("corpus")
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [{"id": i, "title": f"Title {i}", "text": text} for i, text in enumerate(texts(90))]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "a.jsonl").write_text("\ufeff" + "".join(lines[:30]))
    (folder / "b.jsonl").write_text("")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:50]).encode()))
    parquet.write_table(arrow.Table.from_pylist(rows[50:70]), folder / "d.parquet", row_group_size=3)
    (folder / "e.jsonl").write_text("".join(lines[70:80]).encode().decode().removesuffix("\n"))
    (folder / "f.jsonl").write_text(json.dumps({"title": "long", "text": " ".join(texts(60))}) + "\n")
    (folder / "g.jsonl").write_bytes("".join(lines[80:]).encode("utf-16"))
    return folder


def run(corpus, tokenizer, output, *more, keys=("text", "title")):
    words = ["--input", corpus / "*.*", "--output", output, "--tokenizer", tokenizer, "--workers", 0, "--append-eod"]
    return preprocess.main([str(word) for word in (*words, "--text-key", *keys, *more)])


def files(prefix):
    return [prefix.with_name(prefix.name + end).read_bytes() for end in (".bin", ".idx", ".meta.json")]


@pytest.mark.parametrize("of", [1, 3, 40])
def test_merged_parts_are_the_bytes_of_one_run(corpus, tokenizer, tmp_path, of, capsys):
    assert run(corpus, tokenizer, tmp_path / "whole") == 0
    for number in range(of, 0, -1):
        assert run(corpus, tokenizer, tmp_path / "out", "--part", f"{number}/{of}") == 0
    assert f"{of} of {of} parts are complete" in capsys.readouterr().err
    assert main(["data", "merge", "--parts", str(tmp_path / "out")]) == 0
    for key in ("text", "title"):
        assert files(tmp_path / f"out_{key}_document") == files(tmp_path / f"whole_{key}_document")


@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_every_document_is_in_one_part_with_its_line(corpus, tmp_path, monkeypatch, chunk):
    """Of any number of parts, and where a part was interrupted."""
    from mtjax.data.corpus.documents import TextFields
    from mtjax.data.corpus.reader import Position

    monkeypatch.setattr("mtjax.data.corpus.reader.CHUNK_BYTES", chunk)
    paths, fields = [str(path) for path in sorted(corpus.iterdir())], TextFields(("text",), named=True)

    def places(found):
        for each in found:
            line = each.first_line
            for document in each.documents:
                yield each.where(line), document
                line += document.count(b"\n")

    (tmp_path / "even.jsonl").write_text("".join(f'{{"text": "{i:04}"}}\n' for i in range(12)))
    even = [str(tmp_path / "even.jsonl")]
    for of in (2, 3, 4, 12):  # borders are at the beginnings of lines
        parts = [list(chunks(spans_of(even, CorpusPart(number, of)))) for number in range(1, of + 1)]
        assert [sum(len(chunk.documents) for chunk in part) for part in parts] == [12 // of] * of
    whole = list(places(chunks(paths, None, fields)))
    for of in (2, 7, 33):
        parts = [spans_of(paths, CorpusPart(number, of)) for number in range(1, of + 1)]
        assert [place for spans in parts for place in places(chunks(spans, None, fields))] == whole
    spans = parts[0] + parts[1]
    every = list(chunks(spans, None, fields))
    for i, before in enumerate(every[:-1]):
        line = before.first_line + sum(document.count(b"\n") for document in before.documents)
        again = chunks(spans, Position(before.file, before.end, line), fields)
        assert list(places(again)) == list(places(every[i + 1 :]))


def test_parts_that_do_not_belong_together(corpus, tokenizer, tmp_path, capsys):
    """By name: of another number, settings, tokenizer or text, there twice, missing, or no part at all."""

    def merge(*prefixes):
        words = ["data", "merge", "--input", *map(str, prefixes), "--output", str(tmp_path / "all"), "--overwrite"]
        return main(words), capsys.readouterr().err

    def made(name, part, *more, corpus=corpus, tokenizer=tokenizer):
        assert run(corpus, tokenizer, tmp_path / name, "--part", part, *more, keys=("text",)) == 0
        capsys.readouterr()
        number, of = map(int, part.split("/"))
        return tmp_path / f"{name}-{number:05d}-of-{of:05d}_text_document"

    one, two, three = (made("x", f"{number}/3") for number in (1, 2, 3))
    assert run(corpus, tokenizer, tmp_path / "whole", keys=("text",)) == 0
    assert merge(three, one, two)[0] == 0
    assert files(tmp_path / "all") == files(tmp_path / "whole_text_document")
    other_text, other_words = tmp_path / "corpus", tmp_path / "tokenizer.json"
    shutil.copytree(corpus, other_text)
    assert merge(one, made("y", "2/3", corpus=other_text), three)[0] == 0, "the same files in another folder"
    (other_text / "h.jsonl").write_text('{"text": "more"}')
    train_byte_level_bpe(texts(100), other_words, 380)
    for wrong, message in {
        made("y", "2/2"): "one is part 1 of 3, the other part 2 of 2",
        made("z", "2/3", "--no-append-eod"): "one was made with --append-eod, the other with --no-append-eod",
        made("z", "3/3", "--on-error", "skip"): "one was made with --on-error fail, the other with --on-error skip",
        made("u", "2/3", tokenizer=other_words): f"with the tokenizer {tokenizer}, the other with another,",
        made("v", "2/3", corpus=other_text): "they were made from text files with other names or sizes",
        made("w", "1/3"): f"{one} and {tmp_path}/w-00001-of-00003_text_document are both part 1 of 3",
    }.items():
        code, error = merge(one, wrong, three)
        assert (code, message in error) == (2, True), error
    assert "parts 2, 3 of the 3 parts" in merge(one)[1]
    assert "part 2 of the 3 parts" in (error := merge(one, three)[1])
    assert "--part 2/3" in error
    whole = tmp_path / "whole_text_document"
    assert "is not a part: merge the parts of a run alone" in merge(one, whole, two, three)[1]
    damaged = bytearray(three.with_name(f"{three.name}.bin").read_bytes())
    damaged[0] ^= 1
    three.with_name(f"{three.name}.bin").write_bytes(damaged)
    assert f"{three}.bin is corrupted: its checksum" in merge(one, two, three)[1]
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_part_that_is_repeated_or_was_interrupted(corpus, tokenizer, tmp_path, capsys, monkeypatch):
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "2/3") == 0
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "2/3") == 0
    assert "part 2 of 3 is complete already" in capsys.readouterr().err
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "2/3", "--parse-special") == 2
    assert "00002-of-00003_text_document.idx exists" in capsys.readouterr().err
    before = files(tmp_path / "out-00002-of-00003_text_document")
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "2/3", "--parse-special", "--overwrite") == 0
    assert 'parse-special": true' in meta_path(tmp_path / "out-00002-of-00003_text_document").read_text()
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "2/3", "--overwrite") == 0
    assert files(tmp_path / "out-00002-of-00003_text_document") == before
    capsys.readouterr()

    write, monkeypatched = ResumeRecord.write, monkeypatch.context

    def interrupted(record, state):
        write(record, state)
        raise KeyboardInterrupt

    monkeypatch.setattr("mtjax.data.corpus.reader.CHUNK_BYTES", 300)
    with monkeypatched() as patch:
        patch.setattr(ResumeRecord, "write", interrupted)
        assert run(corpus, tokenizer, tmp_path / "out", "--part", "1/3", "--save-every", 0) == 130
    assert complete_parts(tmp_path / "out", 3) == {2}
    assert main(["data", "parts", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "of 3 parts: 1 complete, 1 begun, 1 not begun" in shown
    assert "part 1: " in shown
    assert "not begun: 3" in shown
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "1/3") == 0
    assert "continuing after" in capsys.readouterr().err
    assert run(corpus, tokenizer, tmp_path / "out", "--part", "3/3") == 0
    assert main(["data", "merge", "--parts", str(tmp_path / "out"), "--output", str(tmp_path / "all")]) == 0
    assert run(corpus, tokenizer, tmp_path / "whole") == 0
    assert files(tmp_path / "all_title_document") == files(tmp_path / "whole_title_document")
    assert main(["data", "parts", str(tmp_path / "out")]) == 0
    assert "100% of 3 parts: 3 complete" in capsys.readouterr().out


def test_a_fault_in_a_part_has_its_line_in_the_file(tokenizer, tmp_path, capsys):
    lines = [json.dumps({"text": text}) for text in texts(40)]
    lines[30] = '{"body": "x"}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run(tmp_path, tokenizer, tmp_path / "out", "--part", "4/4", keys=("text",)) == 2
    assert f"{tmp_path}/in.jsonl, line 31: no text under the key 'text'" in capsys.readouterr().err


WRONG = {
    "--part 3 must be a part and the number of parts": ["--part", "3"],
    "--part 0/64: parts are counted from 1/64 to 64/64": ["--part", "0/64"],
    "--part 65/64: parts are counted": ["--part", "65/64"],
    "--part 1/0: the number of parts must be between 1": ["--part", "1/0"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_parts(corpus, tokenizer, tmp_path, capsys, message):
    assert run(corpus, tokenizer, tmp_path / "out", *WRONG[message]) == 2
    assert message in capsys.readouterr().err


def test_parts_of_files_at_urls(corpus, tokenizer, tmp_path):
    fs = pytest.importorskip("fsspec").filesystem("memory")
    fs.put(str(corpus), "/parts", recursive=True)
    assert run(corpus, tokenizer, tmp_path / "whole", keys=("text",)) == 0
    for number in (1, 2, 3):
        words = ["--input", "memory://parts/*.*", "--output", tmp_path / "out", "--tokenizer", tokenizer]
        more = ["--workers", 0, "--append-eod", "--part", f"{number}/3"]
        assert preprocess.main([str(word) for word in (*words, *more, "--text-key", "text")]) == 0
    assert main(["data", "merge", "--parts", str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out_text_document") == files(tmp_path / "whole_text_document")
    assert IndexedDataset(tmp_path / "out-00002-of-00003_text_document").num_documents > 0
