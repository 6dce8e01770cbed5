"""What each task asks, what it makes of the answers, and what it says of data that are not its own."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mtjax.data.corpus.indexed import token_dtype
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.evaluate.rows import Row, Scores
from mtjax.evaluate.tasks.registry import KINDS
from mtjax.evaluate.tasks.task import Settings, Task
from mtjax.evaluate.tasks.wikitext103 import detokenized
from tests.convert.hf_folders import small_tokenizer

SETTINGS = Settings(16, 4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    small_tokenizer().save(str(path))
    return open_tokenizer(str(path))


def open_task(name: str, path: Path, tokenizer) -> Task:
    return KINDS[name].open(path, tokenizer, SETTINGS)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(row: Row) -> list[int]:
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
    results = task.results(Scores(np.full(len(task.rows), -3.0), np.ones(len(task.rows), bool)))
    words = len(path.read_text().strip().split(" "))
    loss = 3 * len(task.rows)
    assert results["words (O)"] == words == 16
    assert results["tokens (T)"] == len(tokens)
    assert math.isclose(results["perplexity"], math.exp(loss / (words - 1)))
    assert math.isclose(results["token_perplexity"], math.exp(loss / (len(tokens) - 1)))
    hopeless = task.results(Scores(np.full(len(task.rows), -1e5), np.ones(len(task.rows), bool)))
    assert json.dumps(hopeless, allow_nan=False)


def test_the_last_word_strict_and_lenient(tmp_path, tokenizer) -> None:
    path = lines(
        tmp_path / "lambada.jsonl", {"text": "the cat and the rested"}, {"text": "there they rested on the road"}
    )
    task = open_task("lambada", path, tokenizer)
    assert [tokenizer.decode(counted(row)) for row in task.rows[:2]] == [" rested", " road"]
    assert all(row.counted == 1 for row in task.rows[2:])
    assert tokenizer.decode(task.rows[0].tokens) == "the cat and the rested"
    scores = Scores(np.log([0.5, 0.125, 0.5, 0.5]), np.array([True, False, True, True]))
    assert task.results(scores) == {
        "accuracy": 0.5,
        "accuracy_lenient": 1.0,
        "perplexity": pytest.approx(4.0),
        "passages": 2,
    }


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
        results = task.results(Scores(np.full(len(task.rows), -math.log(2)), np.ones(len(task.rows), bool)))
        assert results["bytes"] == sum(len(text.encode()) for text in texts) == 21
        assert math.isclose(results["bits_per_byte"], len(task.rows) / 21)
        assert results["documents"] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("lambada", '{"sentence": "a b"}\n', "line 1 has the fields 'sentence', and needs 'text'"),
        ("lambada", "not json\n", "line 1 is not JSON"),
        ("lambada", "[1]\n", "line 1 has a list"),
        ("lambada", '{"text": "alone"}\n', "line 1 has 1 words"),
        ("lambada", "\n", "has no passages"),
        ("lambada", json.dumps({"text": f"a {'zq' * 40}"}), "the last word has"),
        ("wikitext103", "", "has 0 tokens, and a perplexity needs 2"),
        ("perplexity", "", "holds no text"),
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
