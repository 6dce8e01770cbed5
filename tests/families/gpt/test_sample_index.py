import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.families.gpt.sample_index import document_index, plan_epochs, sample_index, shuffle_index

SIZES = np.array([5, 3, 7, 2, 9], np.int32)


def indices(lengths, sequence_length, num_samples, seed=1234):
    plan = plan_epochs(int(lengths.sum()), sequence_length, num_samples)
    random = np.random.RandomState(seed)
    documents = document_index(0, len(lengths), plan, random)
    samples = sample_index(lengths, documents, sequence_length, plan.samples)
    return plan, documents, samples, shuffle_index(plan, random)


def test_samples_of_documents_in_order():
    samples = sample_index(SIZES, np.arange(5, dtype=np.int32), 4, 6)
    assert samples.tolist() == [[0, 0], [0, 4], [2, 0], [2, 4], [3, 1], [4, 3], [4, 7]]


def test_one_epoch_is_megatrons():
    plan, documents, samples, order = indices(SIZES, 4, 6)
    assert (plan.epochs, plan.separate) == (1, False)
    assert documents.tolist() == [4, 0, 1, 2, 3]
    assert samples.tolist() == [[0, 0], [0, 4], [0, 8], [1, 3], [2, 2], [3, 3], [4, 0]]
    assert order.tolist() == [5, 2, 3, 1, 0, 4]


def test_two_epochs_of_which_the_last_is_apart_are_megatrons():
    plan, documents, _, order = indices(SIZES, 4, 8)
    assert (plan.epochs, plan.separate) == (2, True)
    assert documents.tolist() == [4, 0, 1, 2, 3, 3, 2, 1, 0, 4]
    assert order.tolist() == [0, 4, 3, 2, 5, 1, 7, 6, 9, 8, 11, 10]


def walk(lengths, documents, sequence_length, samples):
    """The definition, one token at a time: sample k starts at token k x sequence_length of the documents in order."""
    places = [(position, offset) for position, d in enumerate(documents) for offset in range(lengths[d])]
    return [list(places[k * sequence_length]) for k in range(samples + 1)]


def greedy(lengths, documents, sequence_length, samples):
    """Sample by sample, each taking documents until it has `sequence_length + 1` tokens, and giving one back."""
    rows, document, offset = [[0, 0]], 0, 0
    for _ in range(samples):
        needed = sequence_length + 1
        while True:
            there = lengths[documents[document]] - offset
            needed -= there
            if needed <= 0:
                offset += needed + there - 1
                break
            document, offset = document + 1, 0
        rows.append([document, int(offset)])
    return rows


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    sequence_length=st.integers(1, 20),
    num_samples=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=200)
def test_samples_are_the_greedy_walk(lengths, sequence_length, num_samples, seed):
    lengths = np.array(lengths, np.int32)
    if lengths.sum() < 2:
        return
    plan, documents, samples, order = indices(lengths, sequence_length, num_samples, seed)
    assert plan.samples >= num_samples
    assert (plan.epochs - 1) * lengths.sum() < num_samples * sequence_length + 1
    assert sorted(documents) == sorted([*range(len(lengths))] * plan.epochs)
    assert sorted(order) == list(range(plan.samples))
    assert samples[1:].tolist() == walk(lengths, documents, sequence_length, plan.samples)[1:]
    assert samples.tolist() == greedy(lengths, documents, sequence_length, plan.samples)


def test_samples_without_an_extra_token_start_where_the_last_one_ended():
    samples = sample_index(SIZES, np.arange(5, dtype=np.int32), 4, 6, extra_token=False)
    assert samples.tolist() == [[0, 0], [0, 4], [1, 3], [2, 4], [3, 1], [4, 3], [4, 7]]


def test_a_partial_sample_ends_with_the_text():
    plan = plan_epochs(26, 4, 6, keep_partial=True)
    assert (plan.samples, plan_epochs(25, 4, 6, keep_partial=True).samples) == (7, 6)
    samples = sample_index(SIZES, np.arange(5, dtype=np.int32), 4, plan.samples)
    assert samples[-2:].tolist() == [[4, 7], [4, 8]]


@pytest.mark.parametrize(
    ("lengths", "sequence_length", "num_samples"),
    [([1, 1, 1, 1], 1, 3), ([0, 0, 50, 0], 4, 30), ([1000], 10, 250), ([2], 7, 5), ([0, 1, 0, 1], 3, 9)],
    ids=["one-token sequences", "empty documents", "one long document", "shorter than a sample", "mostly nothing"],
)
def test_odd_corpora_have_every_token(lengths, sequence_length, num_samples):
    lengths = np.array(lengths, np.int32)
    _, documents, samples, _ = indices(lengths, sequence_length, num_samples)
    assert samples[1:].tolist() == walk(lengths, documents, sequence_length, len(samples) - 1)[1:]


def test_pieces_change_nothing(monkeypatch, tmp_path):
    lengths = np.random.RandomState(0).randint(0, 50, 1000).astype(np.int32)
    documents = np.random.RandomState(1).permutation(1000).astype(np.int32)
    samples = int(lengths.sum() - 1) // 7
    whole = sample_index(lengths, documents, 7, samples)
    monkeypatch.setattr("mtjax.families.gpt.sample_index.CHUNK", 13)
    assert np.array_equal(sample_index(lengths, documents, 7, samples, tmp_path / "x.npy"), whole)
    assert np.array_equal(np.load(tmp_path / "x.npy"), whole)


def test_ten_million_samples_take_seconds():
    lengths = np.full(1_000_000, 1281, np.int32)
    start = time.process_time()
    plan, *_ = indices(lengths, 128, 10_000_000)
    assert plan.samples >= 10_000_000
    assert time.process_time() - start < 30
