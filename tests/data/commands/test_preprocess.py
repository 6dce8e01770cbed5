import json
import random
import signal
import subprocess
import sys

import pytest

from mtjax.data.commands import preprocess
from mtjax.data.corpus.indexed import IndexedDataset, bin_path, idx_path
from mtjax.data.corpus.meta import meta_path
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from tests.data.corpora import texts, write_bert_vocab, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(texts(200), path, 400)
    return f"hf:{path}"


@pytest.fixture
def run(tokenizer, tmp_path):
    def call(*arguments, output="out", workers=0):
        words = ["--output", tmp_path / output, "--tokenizer", tokenizer, "--workers", workers, *arguments]
        return preprocess.main([str(word) for word in words])

    return call


def contents(prefix):
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def test_ids_are_the_tokenizers(run, tokenizer, tmp_path):
    documents = [*texts(20), "", "ünïcode \U0001f642"]
    write_jsonl(tmp_path / "in.jsonl", documents)
    assert run("--input", tmp_path / "in.jsonl", "--append-eod") == 0
    dataset, words = IndexedDataset(tmp_path / "out_text_document"), open_tokenizer(tokenizer)
    # An empty document stays one, of no sequences.
    assert (dataset.num_documents, len(dataset)) == (22, 21)
    for index, text in enumerate(text for text in documents if text):
        assert dataset[index].tolist() == [*words.encode(text), words.eod]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"])
def test_compressed_input_is_the_same(run, tmp_path, suffix):
    write_jsonl(tmp_path / "plain.jsonl", texts(50))
    write_jsonl(tmp_path / f"in{suffix}", texts(50))
    assert run("--input", tmp_path / "plain.jsonl", output="a") == run("--input", tmp_path / f"in{suffix}") == 0
    assert contents(tmp_path / "a_text_document") == contents(tmp_path / "out_text_document")


def test_output_does_not_depend_on_workers(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mtjax.data.corpus.reader.CHUNK_BYTES", 2000)
    for i in range(3):
        write_jsonl(tmp_path / f"in{i}.jsonl", texts(60, seed=i))
    for workers in (0, 1, 3):
        assert run("--input", tmp_path / "in*.jsonl", "--append-eod", output=f"w{workers}", workers=workers) == 0
    assert contents(tmp_path / "w0_text_document") == contents(tmp_path / "w1_text_document")
    assert contents(tmp_path / "w0_text_document") == contents(tmp_path / "w3_text_document")


def test_every_key_gets_both_files(run, tokenizer, tmp_path):
    rows = [{"title": f"Title {i}", "text": text, "other": i} for i, text in enumerate(texts(5))]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert run("--input", tmp_path / "in.jsonl", "--json-keys", "title", "text") == 0
    titles, words = IndexedDataset(tmp_path / "out_title_document"), open_tokenizer(tokenizer)
    assert [words.decode(titles[i].tolist()) for i in range(5)] == [row["title"] for row in rows]
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 5


def test_sentences(tmp_path):
    vocab = write_bert_vocab(tmp_path / "vocab.txt")
    write_jsonl(tmp_path / "in.jsonl", ["The river walks. A stone house. Green light.", "Never over."])
    arguments = f"--input {tmp_path}/in.jsonl --output {tmp_path}/s --tokenizer bert:{vocab} --workers 0"
    assert preprocess.main([*arguments.split(), "--split-sentences", "--append-eod"]) == 0
    dataset, words = IndexedDataset(tmp_path / "s_text_sentence"), open_tokenizer(f"bert:{vocab}")
    assert dataset.documents.tolist() == [0, 3, 4]
    assert [words.decode(dataset[i].tolist()) for i in range(4)] == [
        "the river walks.",
        "a stone house.",
        "green light. [SEP]",
        "never over. [SEP]",
    ]


def test_plain_text_is_cut_at_empty_lines_and_nothing_is_lost(run, tokenizer, tmp_path):
    text = "\n\n".join(texts(300))
    (tmp_path / "in.txt").write_text(text)
    assert run("--input", tmp_path / "in.txt") == 0
    dataset, words = IndexedDataset(tmp_path / "out_text_document"), open_tokenizer(tokenizer)
    pieces = [words.decode(dataset[i].tolist()) for i in range(len(dataset))]
    assert len(pieces) > 100
    assert "".join(pieces) == text
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


BAD_LINES = {
    "no JSON": ('{"text": "a"', "line 2: Expecting ',' delimiter"),
    "no object": ("[1, 2]", "line 2: expected a JSON object, found list"),
    "no such key": ('{"body": "a"}', "line 2: no text under the key 'text'; it has 'body'"),
    "no text": ('{"text": 5}', "line 2: no text under the key 'text'; it holds int"),
    "half a surrogate pair": (
        '{"text": "ab\\ud800"}',
        r"line 2: the text under the key 'text' has the lone surrogate \ud800",
    ),
    "a list with a number": ('{"text": ["a", 5]}', "line 2: no text under the key 'text'; it holds a list with int"),
    "no UTF-8": (b'{"text": "\xff"}', "line 2: byte 0xff at position 10 is not UTF-8"),
}


def test_another_way_with_bad_lines_does_not_continue_a_run(tokenizer, tmp_path):
    """Lines that it has left out would be missing without a word."""
    (tmp_path / "in.txt").write_text("text")
    paths = [str(tmp_path / "in.txt")]
    skip, fail, again = (
        preprocess._identity(preprocess.Options(tuple(paths), tmp_path / "out", tokenizer, on_error=how), paths)
        for how in ("skip", "fail", "skip")
    )
    assert skip == again != fail


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines(run, tmp_path, capsys, name):
    line, message = BAD_LINES[name]
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n\n{"text": "two"}\n')
    assert run("--input", tmp_path / "in.jsonl") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/in.jsonl, {message}" in error
    assert "Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]
    assert run("--input", tmp_path / "in.jsonl", "--on-error", "skip") == 0
    assert f"skipped {tmp_path}/in.jsonl, {message}" in capsys.readouterr().err
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 2


def test_an_integer_of_any_length_does_no_harm_where_nobody_reads_it(run, tokenizer, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        f'{{"id": {"7" * 5000}, "text": "one"}}\n{{"id": -{"7" * 5000}, "text": "two"}}\n'
    )
    assert run("--input", tmp_path / "in.jsonl") == 0
    dataset, words = IndexedDataset(tmp_path / "out_text_document"), open_tokenizer(tokenizer)
    assert [words.decode(dataset[i].tolist()) for i in range(2)] == ["one", "two"]


def test_a_list_of_strings_is_a_document_of_as_many_sequences(run, tokenizer, tmp_path):
    """As Megatron's preprocessing: each string is encoded alone, an empty one is dropped, the end comes once."""
    (tmp_path / "in.jsonl").write_text(
        '{"text": ["The river.", "", "A stone."]}\n{"text": "Green light."}\n{"text": []}\n'
    )
    assert run("--input", tmp_path / "in.jsonl", "--append-eod") == 0
    dataset, words = IndexedDataset(tmp_path / "out_text_document"), open_tokenizer(tokenizer)
    assert dataset.documents.tolist() == [0, 2, 3, 3]
    assert [dataset[i].tolist() for i in range(3)] == [
        words.encode("The river."),
        [*words.encode("A stone."), words.eod],
        [*words.encode("Green light."), words.eod],
    ]


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": ""}\n{"text": []}\n'])
def test_a_corpus_without_a_token_is_refused(run, tmp_path, capsys, text):
    (tmp_path / "in.jsonl").write_text(text)
    assert run("--input", tmp_path / "in.jsonl", "--save-every", 0) == 2
    assert f"{tmp_path}/in.jsonl: there is no text under the key 'text'" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_directory_is_called_one(run, tmp_path, capsys):
    write_jsonl(tmp_path / "in.jsonl", texts(5))
    assert run("--input", tmp_path) == 2
    assert f"{tmp_path} is a directory; name the files in it, say '{tmp_path}/*.jsonl'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_off_file_is_named(run, tmp_path, capsys, suffix):
    path = write_jsonl(tmp_path / f"in.jsonl{suffix}", texts(300))
    path.write_bytes(path.read_bytes()[:-100])
    assert run("--input", path) == 2
    assert f"{path} is corrupted" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_existing_dataset_is_not_replaced_unasked(run, tmp_path, capsys):
    write_jsonl(tmp_path / "in.jsonl", texts(5))
    write_jsonl(tmp_path / "other.jsonl", texts(6))
    assert run("--input", tmp_path / "in.jsonl") == 0
    assert run("--input", tmp_path / "other.jsonl") == 2
    assert "out_text_document.idx exists" in capsys.readouterr().err
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 5
    assert run("--input", tmp_path / "other.jsonl", "--overwrite") == 0
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 6


WRONG = {
    "no file matches": ["--input", "nowhere/*.jsonl"],
    "does not exist": ["--tokenizer", "hf:nowhere.json"],
    "no kind of tokenizer is called 'gtp2' - did you mean 'gpt2'": ["--tokenizer", "gtp2:x"],
    "names a key twice": ["--json-keys", "a", "a"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(run, tmp_path, capsys, message):
    write_jsonl(tmp_path / "in.jsonl", texts(5))
    assert run("--input", tmp_path / "in.jsonl", *WRONG[message]) == 2
    assert message in capsys.readouterr().err


KILLED = """
import itertools, os, signal, sys, threading, time
from mtjax.commands.data import main
from mtjax.data.corpus.resume_record import ResumeRecord
number, delay = int(sys.argv.pop(1)), float(sys.argv.pop(1))
write, writes = ResumeRecord.write, itertools.count(1)
def write_once_more(*arguments):
    now = next(writes)
    if now > number + 1:
        time.sleep(600)
    write(*arguments)
    if now == number:
        threading.Timer(delay, os.killpg, (0, signal.SIGKILL)).start()
ResumeRecord.write = write_once_more
sys.exit(main(sys.argv[1:]))
"""
"""`mtjax data` until some seconds after it has written its record so many times: soon after, it waits for that."""


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_killed_at_any_moment_and_resumed_is_as_if_uninterrupted(run, tokenizer, tmp_path, workers):
    for i in range(2):
        write_jsonl(tmp_path / f"in{i}.jsonl.gz", texts(4000, seed=i, words=160))
    assert run("--input", tmp_path / "in*.jsonl.gz", "--append-eod", output="whole") == 0
    words = ["preprocess", "--input", tmp_path / "in*.jsonl.gz", "--output", tmp_path / "out"]
    words += ["--tokenizer", tokenizer, "--append-eod", "--save-every", "0", "--workers", workers]
    draw, kills, resumed = random.Random(workers), 0, 0
    while True:
        program = ["-c", KILLED, 1 + kills, draw.uniform(0, 0.2)] if kills < 3 else ["-m", "mtjax.data"]
        command = [str(word) for word in (sys.executable, *program, *words)]
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        error = process.stderr
        resumed += "continuing after" in error
        if process.returncode == 0 or idx_path(tmp_path / "out_text_document").exists():
            break  # also where the kill came behind the last write
        assert process.returncode == -signal.SIGKILL, error
        kills += 1
    assert kills and resumed
    assert contents(tmp_path / "out_text_document") == contents(tmp_path / "whole_text_document")
    assert (
        meta_path(tmp_path / "out_text_document").read_text() == meta_path(tmp_path / "whole_text_document").read_text()
    )
    assert process.returncode or not [p.name for p in tmp_path.glob(".out*")], "partial files are left"


@pytest.mark.long
def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path):
    def peak(megabytes):
        path = tmp_path / f"{megabytes}.jsonl"
        block = "".join(json.dumps({"text": text}) + "\n" for text in texts(1500, words=400))
        with path.open("w") as file:
            for _ in range(max(1, megabytes * 1_000_000 // len(block))):
                file.write(block)
        code = (
            "import resource, sys; from mtjax.data.commands.preprocess import main; main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        arguments = f"--input {path} --output {tmp_path}/m{megabytes} --tokenizer {tokenizer} --workers 0".split()
        out = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return int(out.stdout.split()[-1]) / 1000

    small, large = peak(2), peak(16)
    assert large < small + 60, f"{small:.0f} MB for 2 MB of text, {large:.0f} MB for 16"
