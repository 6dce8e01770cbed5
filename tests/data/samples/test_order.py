"""A run that asks for more samples reads on: together, its parts read the text as evenly as one long run."""

from collections import Counter

import numpy as np
import pytest

from mtjax.config import Config, Data, Model, Training
from mtjax.data import SampleOrder, describe_texts, open_dataset, open_in_order
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.sentence_runs import RunOptions, SentenceRuns
from tests.data.corpora import write_indexed

LENGTH = 4


@pytest.fixture
def config(tmp_path):
    """Documents of exactly four samples each, so that samples are counted as they are, wherever documents lie."""
    ids = iter(range(10**6))
    for name, documents in (("a", 25), ("b", 10)):
        rows = [[[next(ids) % 60_000 for _ in range(4 * LENGTH)]] for _ in range(documents)]
        write_indexed(tmp_path / name, rows)

    def make(**more):
        options = Data(cache_dir=tmp_path / "cache", split="100,0,0", tokenizer="gpt2:x", **more)
        return Config(model=Model(sequence_length=LENGTH), data=options, training=Training(seed=5))

    return make


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    class Ids:
        eod, vocab_size = 65_000, 65_001

    monkeypatch.setattr("mtjax.data.run_text.RunText.tokenizer", Ids())


def read(dataset, numbers):
    return [tuple(dataset[i]["tokens"].tolist()) for i in numbers]


@pytest.mark.parametrize(("first", "total"), [(60, 160), (99, 198), (120, 500), (7, 8), (250, 260)])
def test_the_parts_of_a_run_read_every_sample_as_often_as_one_long_run(config, tmp_path, first, total):
    """How often each of the text's 100 samples is read, counted by numpy's `unique`."""
    run = config(data=str(tmp_path / "a"))
    before = read(open_dataset(run, "train", first), range(first))
    longer = open_in_order(run, SampleOrder(0, (first,)).extended(total))
    assert read(longer, range(first)) == before
    after = read(longer, range(first, total))
    _, counts = np.unique(np.array([*before, *after]), axis=0, return_counts=True)
    _, at_once = np.unique(np.array(read(open_dataset(run, "train", total), range(total))), axis=0, return_counts=True)
    # Samples of passes that are shuffled together, and the last token of a pass, make a difference of one at most.
    assert counts.max() - counts.min() <= max(2, at_once.max() - at_once.min())
    assert abs(len(counts) - len(at_once)) <= 2
    assert counts.max() <= at_once.max() + 1


def test_a_run_of_one_part_has_megatrons_order(config, tmp_path):
    run = config(data=str(tmp_path / "a"))
    assert read(open_in_order(run, SampleOrder(0, (60,))), range(60)) == read(open_dataset(run, "train", 60), range(60))


def test_it_is_extended_again_and_again_and_always_the_same(config, tmp_path):
    run = config(data=str(tmp_path / "a"))
    twice = SampleOrder(0, (60,)).extended(160).extended(320)
    assert twice == SampleOrder(0, (60, 160, 320)) and twice.extended(100) == twice
    once = read(open_in_order(run, SampleOrder(0, (60, 160))), range(160))
    assert read(open_in_order(run, twice), range(160)) == once
    appended = [tuple(read(open_in_order(run, twice), range(start, start + 90))) for start in (0, 110, 210)]
    assert len(set(appended)) == 3  # each part has a shuffle of its own


def test_a_blend_keeps_its_order_and_its_shares(config, tmp_path):
    run = config(data=f"0.3 {tmp_path / 'a'} 0.7 {tmp_path / 'b'}")
    before = read(open_dataset(run, "train", 50), range(50))
    longer = read(open_in_order(run, SampleOrder(0, (50, 400))), range(400))
    assert longer[:50] == before
    from_a = sum(sample[0] < 25 * 4 * LENGTH for sample in longer)
    assert from_a == pytest.approx(0.3 * 400, abs=1)
    assert max(Counter(s for s in longer if s[0] >= 400).values()) <= 280 / 40 + 2


def test_a_new_order_in_the_middle_of_a_run_begins_with_its_first_sample(config, tmp_path):
    run = config(data=str(tmp_path / "a"))
    later = open_in_order(run, SampleOrder(70, (100,)))
    assert len(later) >= 100
    assert read(later, range(70, 100)) == read(open_dataset(run, "train", 30), range(30))
    with pytest.raises(IndexError, match="begins with sample 70"):
        later[69]


def test_sentences_need_no_more_than_a_larger_number(tmp_path):
    """Passes over sentences are cut and shuffled one after the other: more of them begin with the fewer."""
    rows = [[[7] * 9, [8] * 5, [i % 50 + 5] * 4] for i in range(30)]
    corpus = IndexedDataset(write_indexed(tmp_path / "s", rows))
    few, many = (SentenceRuns(corpus, (0, 30), count, 100, RunOptions(12, 2), seed=3).runs for count in (20, 90))
    np.testing.assert_array_equal(many[: len(few)], few)


def test_sentences_without_a_number_are_gone_through_once(tmp_path):
    """As in a blend without weights, whose datasets are opened before it is known how many samples each gives."""
    corpus = IndexedDataset(write_indexed(tmp_path / "s", [[[7] * 9, [8] * 5, [9] * 4]] * 30))
    runs = SentenceRuns(corpus, (0, 30), None, 100, RunOptions(12, 2), seed=3).runs
    assert sorted(i for begin, end, _ in runs.tolist() for i in range(begin, end)) == list(range(90))


def test_a_text_is_the_same_by_its_content_and_not_by_its_name(config, tmp_path):
    (text,) = describe_texts(config(data=str(tmp_path / "a")))
    for ending in ("bin", "idx"):
        (tmp_path / f"moved.{ending}").write_bytes((tmp_path / f"a.{ending}").read_bytes())
    (moved,) = describe_texts(config(data=str(tmp_path / "moved")))
    assert (text.documents, text.first) == (25, 0) and text.is_same(moved) and text != moved
    tokens = bytearray((tmp_path / "moved.bin").read_bytes())
    tokens[100] ^= 1
    (tmp_path / "moved.bin").write_bytes(tokens)
    (changed,) = describe_texts(config(data=str(tmp_path / "moved")))
    assert not text.is_same(changed)
    run = config(data=str(tmp_path / "a"))
    shares = describe_texts(Config(run.model, data=Data(**{**vars(run.data), "split": "50,50,0"})))
    assert not text.is_same(shares[0])
