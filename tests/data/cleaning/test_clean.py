import gzip
import json
import random

import numpy as np
import pytest

from mtjax.data.cleaning.minhash import PERMUTATIONS, MinHash, Shingles
from mtjax.data.cleaning.near_duplicates import find_duplicates
from mtjax.data.cleaning.overlap import found_in, grams_of, share
from mtjax.data.cleaning.removal_list import FoundIds, RemovalList
from mtjax.data.commands import clean
from tests.data.corpora import write_jsonl

WORDS = [f"w{i}" for i in range(50_000)]


def planted(similarity, count, draw, size=400):
    """Pairs of sets of shingles with that Jaccard similarity, give or take rounding: hashes, not texts."""
    pairs = []
    for _ in range(count):
        common = round(2 * size * similarity / (1 + similarity))
        shared, a, b = (draw.randint(0, 2**63, n).astype(np.uint64) for n in (common, size - common, size - common))
        pairs.append((np.concatenate([shared, a]), np.concatenate([shared, b])))
    return pairs


@pytest.mark.parametrize(("similarity", "least", "most"), [(0.8, 0.95, 1), (0.5, 0, 0.01), (1.0, 1, 1), (0.0, 0, 0)])
def test_planted_duplicates(similarity, least, most):
    pairs, minhash = planted(similarity, 1000, np.random.RandomState(0)), MinHash()
    signatures = np.stack([minhash(side) for side in [a for a, _ in pairs] + [b for _, b in pairs]])
    dropped = find_duplicates(signatures, 0.7)
    assert all(d.document == d.original + 1000 for d in dropped)
    assert least <= len(dropped) / 1000 <= most


def test_signatures_estimate_the_jaccard_similarity():
    minhash = MinHash()
    for similarity in (0.1, 0.3, 0.5, 0.7, 0.9):
        pairs = planted(similarity, 200, np.random.RandomState(1))
        agree = [(minhash(a) == minhash(b)).mean() for a, b in pairs]
        assert np.mean(agree) == pytest.approx(similarity, abs=0.01)
        assert np.std(agree) == pytest.approx((similarity * (1 - similarity) / PERMUTATIONS) ** 0.5, rel=0.3)


def test_similarities_are_datasketchs():
    datasketch = pytest.importorskip("datasketch")
    shingles, draw, minhash = Shingles(5), random.Random(0), MinHash()
    base = draw.choices(WORDS, k=300)
    for changed in (5, 15, 30):
        other = list(base)
        for at in draw.sample(range(300), changed):
            other[at] = "changed"
        sets = [{" ".join(words[i : i + 5]) for i in range(296)} for words in (base, other)]
        theirs = [datasketch.MinHash(num_perm=256) for _ in sets]
        for signature, grams in zip(theirs, sets, strict=True):
            signature.update_batch([gram.encode() for gram in grams])
        ours = (minhash(shingles(" ".join(base))) == minhash(shingles(" ".join(other)))).mean()
        exact = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        assert ours == pytest.approx(exact, abs=0.15)
        assert ours == pytest.approx(theirs[0].jaccard(theirs[1]), abs=0.2)


def test_chains_do_not_drag_strangers_along():
    signatures = np.zeros((3, PERMUTATIONS), np.uint32)
    signatures[1, :30] = 1  # like 0
    signatures[2, :60] = 2  # like 1 in nothing but what it shares with 0 ...
    signatures[1, 60:] = signatures[2, 60:] = 5
    signatures[0, 60:90] = 5
    dropped = {(d.document, d.original) for d in find_duplicates(signatures, 0.4)}
    assert (1, 0) in dropped
    assert (2, 1) not in dropped


def test_a_text_repeated_thousands_of_times():
    signatures = np.tile(MinHash()(np.arange(50, dtype=np.uint64)), (5000, 1))
    assert [d.document for d in find_duplicates(signatures, 0.7)] == list(range(1, 5000))


def texts(count, seed=0, words=150):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


@pytest.fixture
def run(tmp_path):
    def call(*arguments, output="out.jsonl", workers=0):
        code = clean.main([str(a) for a in ("--output", tmp_path / output, "--workers", workers, *arguments)])
        if code:
            return code
        rows = [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]
        dropped = [json.loads(line) for line in (tmp_path / f"{output}.dropped.jsonl").read_text().splitlines()]
        return rows, dropped, json.loads((tmp_path / f"{output}.report.json").read_text())

    return call


def test_everything_that_is_cleaned(run, tmp_path):
    one, two, three, four = texts(4)
    similar = one.split()
    similar[50] = "other"
    rows = [
        {"id": "a", "text": one, "url": "u"},
        {"id": "b", "text": "too short"},
        {"id": "c", "text": " ".join(similar)},
        {"id": "d", "text": two},
        {"id": "e", "text": three + " donâ€™t"},
        {"id": "f", "text": four},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids.txt").write_text("d\n\nx\n")
    write_jsonl(tmp_path / "test.jsonl", [four + " and an end"])
    arguments = ["--input", tmp_path / "in.jsonl", "--remove-ids", tmp_path / "ids.txt"]
    kept, dropped, report = run(*arguments, "--remove-like", tmp_path / "test.jsonl")
    assert [(row["id"], row["text"]) for row in kept] == [("a", one), ("e", three + " don't")]
    assert kept[0]["url"] == "u"
    assert {(d["line"], d["reason"]) for d in dropped} == {
        (2, "shorter than 128 tokens"),
        (3, "near-duplicate"),
        (4, "on a removal list"),
        (6, "like a removed document"),
    }
    near = next(d for d in dropped if d["reason"] == "near-duplicate")
    assert near["like"] == {"file": str(tmp_path / "in.jsonl"), "line": 1}
    assert near["similarity"] > 0.7
    assert (report["documents"], report["kept"], report["repaired"]) == (6, 2, 1)
    assert report["ids_not_found"] == 1  # x
    assert sum(report["dropped"].values()) == 4


def test_documents_without_an_id_are_kept_and_counted_and_a_wrong_key_is_refused(run, tmp_path, capsys):
    ids = [1, "2", None, True, {"$oid": "2"}, float("nan"), " "]
    rows = [{"id": name, "text": text} for name, text in zip(ids, texts(7), strict=True)]
    rows.append({"text": texts(1, seed=1)[0]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids.txt").write_text("2\nNone\nnan\nTrue\n")
    arguments = ["--input", tmp_path / "in.jsonl", "--remove-ids", tmp_path / "ids.txt"]
    kept, dropped, report = run(*arguments)
    assert [row["text"] for row in kept] == [row["text"] for row in rows if row.get("id") != "2"]
    assert [(d["line"], d["reason"], d["id"]) for d in dropped] == [(2, "on a removal list", "2")]
    assert (report["without_id"], report["ids_not_found"], report["ids_in_another_form"]) == (6, 3, 0)
    capsys.readouterr()
    assert run(*arguments, "--id-key", "name", output="x.jsonl") == 2
    error = capsys.readouterr().err
    assert "no document has an id (text or a number) under the key 'name', by which --remove-ids" in error
    assert "the first one has the keys 'id', 'text': name the key of the ids with --id-key" in error
    assert not list(tmp_path.glob("*x.jsonl*"))


@pytest.mark.parametrize(
    ("listed", "ids", "gone"),
    [
        ("2", [2, 2.0, "2", "2.0", 2.5], [0, 1, 2]),
        ("2.0", [2, 2.0, "2", "2.0"], [0, 1, 3]),
        ("1e3", [1000, "1e3", "1000"], [0, 1]),
        # The nearest float64 of both is 9007199254740992.
        ("9007199254740993", [9007199254740993, 9007199254740992, 9007199254740992.0], [0]),
        ("9007199254740993.0", [9007199254740993, 9007199254740992], [0]),
        ("0.5", [0.5, ".5"], [0]),
        (" a b ", ["a b", " a b", "ab", "a"], [0, 1]),
        ("007", [7, "7", "007"], [2]),
        ("1_0", [10], []),
        ("Infinity", [1, float("inf")], []),
        ("1e999999999", [1], []),
        ("9" * 5000, [1], []),
    ],
)
def test_ids_to_remove_match_as_text_or_as_numbers(listed, ids, gone):
    removal, found = RemovalList.of([listed]), FoundIds()
    facts = [removal.find({"id": name}, "id", found) for name in ids]
    assert [place for place, fact in enumerate(facts) if fact] == gone
    assert all(fact["id"] == ids[place] for place, fact in enumerate(facts) if fact)
    assert found.names == ({listed.strip()} if gone else set())
    in_other_form = [place for place in gone if str(ids[place]) != listed.strip()]
    assert [place for place, fact in enumerate(facts) if fact and "listed_as" in fact] == in_other_form
    assert found.other_form == len(in_other_form)


def test_every_form_of_an_id_in_the_lists_counts_as_found(run, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 2.0, "text": texts(1)[0]}) + "\n")
    (tmp_path / "ids.txt").write_text("2\n2e0\n3\n")
    _, dropped, report = run("--input", tmp_path / "in.jsonl", "--remove-ids", tmp_path / "ids.txt")
    assert (dropped[0]["id"], dropped[0]["listed_as"]) == (2.0, "2")
    assert (report["ids_not_found"], report["ids_in_another_form"]) == (1, 1)
    table = " ".join(capsys.readouterr().out.split())
    assert "ids to remove that no document has" in table and "in another form" in table


def test_numbers_that_json_does_not_have_become_null(run, tmp_path, capsys):
    """And nothing else changes: a line is read by parsers that keep to the standard."""
    (tmp_path / "in.jsonl").write_text(
        '{"text": "one", "a": NaN, "b": [{"c": -Infinity}], "d": 1e999, "e": "NaN"}\n{"text": "two", "t": "\\ud800", '
        '"a": NaN}\n{"text": "three", "a": 12345678901234567890}\n'
    )
    kept, _, report = run("--input", tmp_path / "in.jsonl", "--min-tokens", 0)
    assert kept == [
        {"text": "one", "a": None, "b": [{"c": None}], "d": None, "e": "NaN"},
        {"text": "two", "t": "\ud800", "a": None},
        {"text": "three", "a": 12345678901234567890},
    ]
    assert report["not_finite_as_null"] == 2
    assert "documents with NaN or an infinite number, written as null" in " ".join(capsys.readouterr().out.split())


def test_duplicates_in_other_files_and_chunks(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mtjax.data.corpus.reader.CHUNK_BYTES", 5000)
    documents = texts(60)
    write_jsonl(tmp_path / "a.jsonl", documents[:40])
    write_jsonl(tmp_path / "b.jsonl.gz", documents[30:])
    results = [
        run("--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", output=f"{w}.jsonl", workers=w) for w in (0, 2)
    ]
    for kept, dropped, _ in results:
        assert [row["text"] for row in kept] == documents
        assert {(d["file"], d["line"]) for d in dropped} == {(f"{tmp_path}/b.jsonl.gz", n) for n in range(1, 11)}
    assert results[0][:2] == results[1][:2]


def test_overlap_with_a_test_set(run, tmp_path):
    corpus, fresh = texts(1, seed=1, words=200)[0], texts(1, seed=2, words=200)[0]
    write_jsonl(tmp_path / "in.jsonl", [corpus, *texts(5, seed=3)])
    # 150 of 343 8-grams: those within the first 157 words of the corpus' text.
    words = corpus.split()[:157] + fresh.split()[:193]
    write_jsonl(tmp_path / "test.jsonl", [" ".join(words), "a b c"])
    _, _, report = run("--input", tmp_path / "in.jsonl", "--overlap-with", tmp_path / "test.jsonl")
    overlap = report["overlap"][str(tmp_path / "test.jsonl")]
    assert overlap == {"ngrams": 343, "share": pytest.approx(150 / 343)}


def test_overlap_counts_repetitions():
    grams = grams_of("t", ["a b c d e f g h i", "a b c d e f g h"])
    hashes = Shingles(8)("x a b c d e f g h y")
    found = np.zeros(len(grams.unique), bool)
    found[found_in(grams, hashes)] = True
    assert share(grams, found) == pytest.approx(2 / 3)


def test_compressed_output(run, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", texts(10))
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        assert clean.main(f"--input {tmp_path}/in.jsonl --output {tmp_path}/{name} --workers 0".split()) == 0
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    assert len(gzip.decompress((tmp_path / "one.jsonl.gz").read_bytes()).splitlines()) == 10


def test_faults(run, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nnothing\n')
    assert run("--input", tmp_path / "in.jsonl") == 2
    assert f"{tmp_path}/in.jsonl, line 2: Expecting value" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
    _, dropped, report = run("--input", tmp_path / "in.jsonl", "--on-error", "skip")
    assert report["dropped"] == {"shorter than 128 tokens": 1, "unusable line": 1}
    assert [d["line"] for d in dropped] == [2, 1] or [d["line"] for d in dropped] == [1, 2]
    assert run("--input", tmp_path / "in.jsonl") == 2
    assert "exists; choose another --output" in capsys.readouterr().err
    assert run("--input", tmp_path / "in.jsonl", "--jaccard", "0", "--overwrite") == 2


def test_half_a_surrogate_pair(run, tmp_path, capsys):
    """In the text it is repaired or a bad line; under another key it is kept, and the line can still be read."""
    rows = [{"text": "a \ud800 b", "id": 1}, {"text": "whole", "title": "\ud800"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--input", tmp_path / "in.jsonl", "--min-tokens", 0]
    kept, _, report = run(*arguments)
    assert (kept[0]["text"], kept[1], report["repaired"]) == ("a \ufffd b", rows[1], 1)
    assert run(*arguments, "--no-fix-unicode", output="x.jsonl") == 2
    assert f"{tmp_path}/in.jsonl, line 1: the text under the key 'text' has the lone" in capsys.readouterr().err
    kept, dropped, _ = run(*arguments, "--no-fix-unicode", "--on-error", "skip", output="y.jsonl")
    assert kept == rows[1:] and [d["line"] for d in dropped] == [1]


def test_a_list_of_strings_is_one_text(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": ["one", "two"]}\n')
    assert run("--input", tmp_path / "in.jsonl", "--min-tokens", 0)[0] == [{"text": "one\ntwo"}]
