import re

import pytest

from mtjax.cli import main
from mtjax.data.corpus.indexed import IndexedDataset, bin_path, idx_path
from mtjax.data.corpus.meta import meta_path
from tests.data.corpora import texts, write_bert_vocab, write_indexed, write_jsonl


def data(*words):
    return main(["data", *(str(word) for word in words)])


@pytest.fixture
def sentences(tmp_path):
    vocab = write_bert_vocab(tmp_path / "vocab.txt")
    write_jsonl(tmp_path / "in.jsonl", texts(30))
    arguments = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "x", "--tokenizer", f"bert:{vocab}")
    assert data("preprocess", *arguments, "--split-sentences", "--workers", 0) == 0
    return tmp_path / "x_text_sentence"


def test_info(sentences, capsys):
    assert data("info", sentences) == 0
    out = capsys.readouterr().out
    dataset = IndexedDataset(sentences)
    for part in (f"{dataset.num_tokens:,} (uint16)", f"{len(dataset):,}", "sequence lengths in tokens"):
        assert part in out
    assert "vocab.txt" in re.sub(r"[│\s]", "", out)
    assert texts(1)[0].split(".")[0].lower() in out.replace("\n", " ")


def test_verify_finds_what_opening_cannot(sentences, capsys):
    assert data("verify", sentences) == 0
    assert "are intact (structure, checksums, vocabulary checked)" in capsys.readouterr().out
    tokens = bytearray(bin_path(sentences).read_bytes())
    tokens[100] ^= 1
    bin_path(sentences).write_bytes(tokens)
    assert data("verify", sentences) == 2
    assert "x_text_sentence.bin is corrupted: its checksum" in capsys.readouterr().err
    tokens[101] = 255
    bin_path(sentences).write_bytes(tokens)
    assert data("verify", sentences) == 2
    assert "x_text_sentence.bin holds the token 65" in capsys.readouterr().err


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_info_finds_a_wrong_checksum(sentences, capsys, path):
    damaged = bytearray(path(sentences).read_bytes())
    damaged[-8] ^= 1  # a token; a document border
    path(sentences).write_bytes(damaged)
    assert data("info", sentences) == 2
    assert re.search(rf"{path(sentences)} is corrupted", capsys.readouterr().err)


def test_a_directory_is_not_a_dataset(tmp_path, capsys):
    for command in ("info", "verify", "show"):
        assert data(command, tmp_path) == 2
        assert f"{tmp_path} is a directory; name a dataset" in capsys.readouterr().err


def test_damage_is_an_error_line(sentences, capsys):
    bin_path(sentences).write_bytes(bin_path(sentences).read_bytes()[:-2])
    for command in ("info", "verify", "show"):
        assert data(command, sentences) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "x_text_sentence.bin is truncated" in error and "Traceback" not in error


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_show(sentences, capsys, kind):
    assert data("show", sentences, "--kind", kind, "--samples", 2, "--sequence-length", 64) == 0
    out = capsys.readouterr().out
    assert f"{kind} sample 0" in out and f"{kind} sample 1" in out and f"{kind} sample 2" not in out
    assert "sequence lengths in tokens" in out
    if kind == "bert":
        assert "[CLS]" in out and "[MASK]:" in out
    if kind == "t5":
        assert "<sentinel 0>" in out


def test_merge_is_concatenation(tmp_path):
    first, second = [[[1, 2, 3]], [], [[4], [5, 6]]], [[[7]], [[8, 9]]]
    a, b = write_indexed(tmp_path / "a", first), write_indexed(tmp_path / "b", second)
    assert data("merge", "--input", a, b, "--output", tmp_path / "both") == 0
    write_indexed(tmp_path / "direct", first + second)
    for path in (bin_path, idx_path, meta_path):
        assert path(tmp_path / "both").read_bytes() == path(tmp_path / "direct").read_bytes()


def test_corpora_of_another_tokenizer_are_neither_merged_nor_shown(tmp_path, capsys):
    """Its vocabulary has as many tokens, but two of them have changed places."""
    vocab, other = write_bert_vocab(tmp_path / "vocab.txt"), tmp_path / "other.txt"
    words = vocab.read_text().splitlines()
    words[-2:] = reversed(words[-2:])
    other.write_text("\n".join(words) + "\n")
    write_jsonl(tmp_path / "in.jsonl", texts(20))
    for name, tokenizer in (("a", vocab), ("b", vocab), ("c", other)):
        arguments = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / name, "--tokenizer", f"bert:{tokenizer}")
        assert data("preprocess", *arguments, "--workers", 0) == 0
    a, b, c = (tmp_path / f"{name}_text_document" for name in "abc")
    assert data("merge", "--input", a, b, "--output", tmp_path / "same") == 0
    assert IndexedDataset(tmp_path / "same").meta.tokenizer_digest == IndexedDataset(a).meta.tokenizer_digest
    capsys.readouterr()
    assert data("merge", "--input", a, c, "--output", tmp_path / "both") == 2
    error = capsys.readouterr().err
    assert f"made with different tokenizers, {a} with bert:{vocab} " in error and f"{c} with bert:{other} " in error
    assert not idx_path(tmp_path / "both").exists()
    for command in ("info", "show", "verify"):
        assert data(command, a, "--tokenizer", f"bert:{other}") == 2
        assert f"{a} was made with bert:{vocab} " in capsys.readouterr().err


def test_merge_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("mtjax.data.corpus.merge.SEQUENCES_AT_A_TIME", 3)
    monkeypatch.setattr("mtjax.data.corpus.merge.TOKENS_AT_A_TIME", 5)
    first = [[list(range(n)) for n in range(1 + d % 7)] for d in range(20)]
    a = write_indexed(tmp_path / "a", first, modes=[0] * sum(map(len, first)))
    b = write_indexed(tmp_path / "b", [[[1]] * 10, []], modes=[1] * 10)
    assert data("merge", "--input", a, b, "--output", tmp_path / "both") == 0
    write_indexed(tmp_path / "direct", [*first, [[1]] * 10, []], modes=[0] * sum(map(len, first)) + [1] * 10)
    assert idx_path(tmp_path / "both").read_bytes() == idx_path(tmp_path / "direct").read_bytes()
    assert bin_path(tmp_path / "both").read_bytes() == bin_path(tmp_path / "direct").read_bytes()


def test_merge_widens_types_and_refuses_mixtures(tmp_path, capsys):
    small, large = write_indexed(tmp_path / "a", [[[1, 2]]]), write_indexed(tmp_path / "b", [[[70_000]]], 80_000)
    assert data("merge", "--input", small, large, "--output", tmp_path / "both") == 0
    merged = IndexedDataset(tmp_path / "both")
    assert [merged[0].tolist(), merged[1].tolist(), str(merged.dtype)] == [[1, 2], [70_000], "int32"]
    moded = write_indexed(tmp_path / "c", [[[1]]], modes=[0])
    assert data("merge", "--input", small, moded, "--output", tmp_path / "x") == 2
    assert "some of the datasets have modes" in capsys.readouterr().err
    assert data("merge", "--input", small, "--output", small) == 2
    assert not list(tmp_path.glob("*x.*")) + list(tmp_path.glob(".*"))


def test_unknown_commands(capsys):
    assert data("inf") == 2
    assert "no data command is called 'inf' - did you mean 'info'?" in capsys.readouterr().err
    assert data() == 0
    assert "preprocess" in capsys.readouterr().out
