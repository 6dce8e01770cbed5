"""What each task asks, what it makes of the answers, and what it says of data that are not its own."""

import errno
import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from mtjax.data.commands import preprocess
from mtjax.data.corpus.indexed import token_dtype
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.evaluate.rows import RowScores, ScoredRow
from mtjax.evaluate.tasks.registry import KINDS
from mtjax.evaluate.tasks.task import EvaluationTask, NamedTokenizer, RowSettings
from mtjax.evaluate.tasks.wikitext103 import detokenized
from tests.convert.hf_folders import llama_tokenizer, small_tokenizer

SETTINGS = RowSettings(16, 4, (0,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    small_tokenizer().save(str(path))
    return open_tokenizer(str(path))


def open_task(name: str, path: Path, tokenizer) -> EvaluationTask:
    return KINDS[name].open(path, NamedTokenizer("hf:own", tokenizer), SETTINGS)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(row: ScoredRow) -> list[int]:
    return row.tokens[row.first :].tolist()


def test_wikitext_is_put_together_again() -> None:
    apart = (
        " \n = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . "
        'He said : " no ; not ( at all ) ! " in a 1 @,@ 200 @-@ seat house of 3 @.@ 5 m , the players \' own . \n '
        " = = = = deep = = = = \n = = = Roles = = = \n N men at 5 ° C [ 1 ] { 2 } it 's ? yes . \n"
    )
    whole = (
        "\n= Robert Boulter =\n\nRobert Boulter is an English film, television and theatre actor. "
        'He said: "no; not (at all)!" in a 1,200-seat house of 3.5 m, the players\'own.\n'
        " ==== deep ====\n=== Roles ===\n1 men at 5°C [1] {2} it's? yes.\n"
    )
    # Two oddities of the rules: an apostrophe and one much later are taken for a pair of quotes, and "\n N men" loses
    # its space before the rule for numbers is asked.
    assert detokenized(apart) == whole.replace("\n1 men", "\nN men")
    assert detokenized("with N men") == "with 1 men"


def test_perplexity_of_words_divides_by_the_words(tmp_path, tokenizer) -> None:
    path = tmp_path / "wiki.tokens"
    path.write_text(" the cat , and the dog @-@ cat . \n the end of the road . \n")
    task = open_task("wikitext103", path, tokenizer)
    tokens = tokenizer.encode(detokenized(path.read_text()))
    assert [i for row in task.rows for i in counted(row)] == tokens[1:]
    results = task.results(RowScores(np.full(len(task.rows), -3.0), np.ones(len(task.rows), bool)))
    words = len(path.read_text().strip().split(" "))
    loss = 3 * len(task.rows)
    assert results["words (O)"] == words == 16
    assert results["tokens (T)"] == len(tokens)
    assert math.isclose(results["perplexity"], math.exp(loss / (words - 1)))
    assert math.isclose(results["token_perplexity"], math.exp(loss / (len(tokens) - 1)))
    hopeless = task.results(RowScores(np.full(len(task.rows), -1e5), np.ones(len(task.rows), bool)))
    assert json.dumps(hopeless, allow_nan=False)


def test_the_last_word_strict_and_lenient(tmp_path, tokenizer) -> None:
    path = lines(
        tmp_path / "lambada.jsonl", {"text": "the cat and the rested"}, {"text": "there they rested on the road"}
    )
    task = open_task("lambada", path, tokenizer)
    assert [tokenizer.decode(counted(row)) for row in task.rows[:2]] == [" rested", " road"]
    assert all(row.counted == 1 for row in task.rows[2:])
    assert tokenizer.decode(task.rows[0].tokens) == "the cat and the rested"
    scores = RowScores(np.log([0.5, 0.125, 0.5, 0.5]), np.array([True, False, True, True]))
    assert task.results(scores) == {
        "accuracy": 0.5,
        "accuracy_lenient": 1.0,
        "perplexity": pytest.approx(4.0),
        "passages": 2,
    }


@pytest.mark.parametrize("back", ["", "</s>"])
def test_the_last_word_of_a_tokenizer_that_marks_words(tmp_path, back: str) -> None:
    """The expected tokens are those that the tokenizers library places on the word's characters."""
    path = tmp_path / "tokenizer.json"
    library = llama_tokenizer(back=back)
    library.save(str(path))
    texts = ["the cat and the dog", "they went on to the road\n", " the end of\nthe  road "]
    data = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    task = open_task("lambada", data, open_tokenizer(str(path)))
    strict, lenient = task.rows[:3], task.rows[3:]
    for text, row, whole in zip(texts, strict, lenient, strict=True):
        encoded = library.encode(text.strip(), add_special_tokens=False)
        end = len(text.strip().rsplit(maxsplit=1)[0])
        word = [i for i, (_, stop) in zip(encoded.ids, encoded.offsets, strict=True) if stop > end]
        assert row.tokens.tolist() == whole.tokens.tolist() == [1, *encoded.ids]
        assert counted(row) == word
        assert counted(whole) == encoded.ids[-1:]
    assert [library.decode(counted(row)).strip() for row in strict] == ["dog", "road", "road"]
    assert library.encode(" dog", add_special_tokens=False).tokens[0] == "▁"  # on its own it is another
    assert library.decode(counted(strict[0])) == "dog"
    assert task.note == "each passage begins with <s>"


def test_a_last_word_without_tokens_is_refused(tmp_path) -> None:
    library, path = small_tokenizer(), tmp_path / "tokenizer.json"
    library.normalizer = normalizers.Sequence([normalizers.Replace("#", ""), normalizers.Strip()])
    library.save(str(path))
    with pytest.raises(UserError, match=r"line 1: the last word has 0 tokens, but must have"):
        open_task("lambada", lines(tmp_path / "a.jsonl", {"text": "the cat #"}), open_tokenizer(str(path)))


def test_a_long_passage_loses_its_beginning(tmp_path, tokenizer) -> None:
    task = open_task("lambada", lines(tmp_path / "long.jsonl", {"text": "zebra " * 20 + "road"}), tokenizer)
    assert [len(row.tokens) for row in task.rows] == [17, 17]
    assert tokenizer.decode(counted(task.rows[0])) == " road"
    assert "1 passages are longer than 16" in task.note


def test_bits_per_byte_of_documents(tmp_path, tokenizer) -> None:
    texts = ["the cat", "über the road"]
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for text in texts:
            ids = np.array([*tokenizer.encode(text), tokenizer.eod])
            writer.add(ids, np.array([len(ids)]), np.array([1]))
        writer.finish()
    of_lines = open_task("perplexity", lines(tmp_path / "a.jsonl", *({"text": text} for text in texts)), tokenizer)
    of_corpus = open_task("perplexity", prefix, tokenizer)
    for task in (of_lines, of_corpus):
        assert {int(row.tokens[0]) for row in task.rows if row.first == 1} == {tokenizer.eod}
        assert [i for row in task.rows for i in counted(row)] == [i for text in texts for i in tokenizer.encode(text)]
        results = task.results(RowScores(np.full(len(task.rows), -math.log(2)), np.ones(len(task.rows), bool)))
        assert results["bytes"] == sum(len(text.encode()) for text in texts) == 21
        assert math.isclose(results["bits_per_byte"], len(task.rows) / 21)
        assert results["documents"] == 2


TOKENIZERS = {"base": ["qqq"], "other": ["zzz"], "grown": ["qqq", "zzz"], "cuts": ["qqq", "brown"]}
"""Tokens after the same ones; `brown` is in texts by which tokenizers are compared."""


@pytest.fixture
def preprocessed(tmp_path):
    """Makes a corpus with one of several tokenizers, and opens it with another."""
    (tmp_path / "text.jsonl").write_text('{"text": "the cat"}\n{"text": "the road"}\n')
    names = {}
    for name, added in TOKENIZERS.items():
        library = small_tokenizer()
        library.add_tokens(added)
        library.save(str(tmp_path / f"{name}.json"))
        names[name] = f"hf:{tmp_path / name}.json"

    def make(name: str, *words: str) -> Path:
        prefix = tmp_path / f"{name}-{len(words)}"
        given = ["--input", str(tmp_path / "text.jsonl"), "--output", str(prefix), "--workers", "0", "--append-eod"]
        assert preprocess.main([*given, "--tokenizer", names[name], *words]) == 0
        return Path(f"{prefix}_text_document")

    def opened(corpus: Path, name: str) -> EvaluationTask:
        named = NamedTokenizer(names[name], open_tokenizer(names[name]))
        return KINDS["perplexity"].open(corpus, named, SETTINGS)

    return make, opened, names


def test_a_corpus_of_another_tokenizer_is_refused(preprocessed) -> None:
    """Of as many tokens: nothing else tells that the ids mean other text."""
    make, opened, names = preprocessed
    corpus = make("base")
    assert opened(corpus, "base").note == "each document begins with <|endoftext|>"
    for other in ("other", "cuts"):
        with pytest.raises(UserError) as e:
            opened(corpus, other)
        assert f"was made with {names['base']} (" in str(e.value)
        assert f"and {names[other]} (" in str(e.value)
        assert str(e.value).endswith("preprocess it again with this one (mtjax data preprocess --tokenizer)")


def test_a_tokenizer_that_only_has_more_tokens_reads_the_corpus(preprocessed, tmp_path) -> None:
    make, opened, names = preprocessed
    corpus = make("base")
    record = Path(f"{corpus}.meta.json")
    fields = json.loads(record.read_text())
    size = fields["vocab_size"]
    for facts in (fields, fields | {"tokenizer_digest": None}):  # of an earlier version
        record.write_text(json.dumps(facts))
        assert [counted(row) for row in opened(corpus, "grown").rows] == [
            counted(r) for r in opened(corpus, "base").rows
        ]
        assert opened(corpus, "grown").note.endswith(
            f"was made with {names['base']} ({size} tokens); {names['grown']} has 1 more, which are not in it"
        )
        with pytest.raises(UserError, match="is another tokenizer"):
            opened(corpus, "cuts")
    (tmp_path / "base.json").unlink()
    with pytest.raises(UserError, match="is another tokenizer"):  # nothing tells whether it is the same but longer
        opened(corpus, "grown")
    with pytest.raises(UserError, match="is another tokenizer"):
        opened(make("grown"), "other")


def test_the_recorded_end_of_documents_is_not_scored(preprocessed) -> None:
    make, opened, _ = preprocessed
    usual, corpus = opened(make("base"), "base"), make("base", "--eod-token", "qqq")
    assert [counted(row) for row in opened(corpus, "base").rows] == [counted(row) for row in usual.rows]
    assert opened(corpus, "grown").results(RowScores(np.zeros(2), np.ones(2, bool)))["bytes"] == 15


def test_a_table_is_not_scored_as_text(tmp_path, tokenizer, monkeypatch) -> None:
    csv, names = b"id,text\n1,the cat @-@ dog\n", ("a.csv", "a.tsv", "A.CSV", "a.csv.gz", "rows", "arrow")
    contents = (csv, b"text\nthe cat\n", csv, gzip.compress(csv), b"PAR1....", b"ARROW1..")
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
        for task in ("perplexity", "wikitext103"):
            with pytest.raises(
                UserError, match=rf"{name} is a table, and must be text{'' if task == 'wikitext103' else ','}"
            ):
                open_task(task, tmp_path / name, tokenizer)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match=r"a\.csv can't be read: Permission denied"):
        open_task("perplexity", tmp_path / "a.csv", tokenizer)


def denied(path: Path, *_: object) -> None:
    """Refuses to open a file, which no permissions do for root."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_documents_stand_behind_the_first_token_alone(tmp_path) -> None:
    path, first = tmp_path / "tokenizer.json", (1, 2)
    llama_tokenizer().save(str(path))
    tokenizer = open_tokenizer(str(path))
    texts = ["the cat and the dog went on to the end of the road", "they rested"]
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for front, text in zip(([], first), texts, strict=True):  # the second has what a tokenizer adds already
            ids = np.array([*front, *tokenizer.encode(text), tokenizer.eod])
            writer.add(ids, np.array([len(ids)]), np.array([1]))
        writer.finish()
    data = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    for place in (data, prefix):
        task = KINDS["perplexity"].open(place, NamedTokenizer("hf:own", tokenizer), RowSettings(8, 1, first))
        assert [i for row in task.rows for i in counted(row)] == [i for text in texts for i in tokenizer.encode(text)]
        assert [row.tokens[: row.first].tolist() for row in task.rows if row.tokens[0] == 1] == [[1, 2], [1, 2]]
        assert task.results(RowScores(np.zeros(len(task.rows)), np.ones(len(task.rows), bool)))["bytes"] == 61
        unknown = f"; {prefix} does not say which tokenizer made it: hf:own is taken for the same"
        assert task.note == "each document begins with <s> </s>" + (unknown if place == prefix else "")


def test_wikitext_stands_behind_what_the_tokenizer_adds(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    llama_tokenizer().save(str(path))
    tokenizer = open_tokenizer(str(path))
    (tmp_path / "wiki.tokens").write_text("the cat and the dog @-@ road")
    task = open_task("wikitext103", tmp_path / "wiki.tokens", tokenizer)
    ids = tokenizer.encode("the cat and the dog-road")
    assert task.rows[0].tokens[:2].tolist() == [1, ids[0]] and task.rows[0].first == 2
    assert [i for row in task.rows for i in counted(row)] == ids[1:]
    assert task.results(RowScores(np.full(1, -1.0), np.ones(1, bool)))["tokens (T)"] == len(ids)


def test_ids_of_a_corpus_are_checked_before_they_are_cast(tmp_path, tokenizer) -> None:
    for dtype, wrong in (("<i8", 2**33 + 5), ("<i8", -1), ("<f8", 2.5), ("<f8", math.nan)):
        prefix = tmp_path / f"{dtype[1:]}-{wrong}"
        with IndexedWriter(prefix, np.dtype(dtype)) as writer:
            writer.add(np.array([3, wrong, 4]), np.array([3]), np.array([1]))
            writer.finish()
        with pytest.raises(UserError, match=rf"holds the token {wrong}, and the vocabulary has"):
            open_task("perplexity", prefix, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("lambada", '{"sentence": "a b"}\n', "line 1 has the fields 'sentence', but needs 'text'"),
        ("lambada", "not json\n", "line 1 is not JSON"),
        ("lambada", "[1]\n", "line 1 has a list"),
        ("lambada", '{"text": "alone"}\n', "line 1 has 1 words"),
        ("lambada", "\n", "contains no passages"),
        ("lambada", json.dumps({"text": f"a {'zq' * 40}"}), "the last word has"),
        ("wikitext103", "", "has 0 tokens, but must have at least 2"),
        ("perplexity", "", "contains no text"),
    ],
)
def test_data_of_another_task(tmp_path, tokenizer, name: str, content: str, words: str) -> None:
    path = tmp_path / "data.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        open_task(name, path, tokenizer)


def test_text_that_is_none(tmp_path, tokenizer) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is not UTF-8 text \(byte 0\)"):
        open_task("wikitext103", path, tokenizer)
