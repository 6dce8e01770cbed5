import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.data.cache import Cache
from mtjax.data.corpus.indexed import IndexedDataset, checked_ids
from mtjax.data.corpus.verify import verify
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.errors import UserError
from mtjax.families.gpt.samples import GPTDataset, GPTOptions, gpt_sample
from tests.data.corpora import write_indexed

EOD = 0


def options(**more):
    return GPTOptions(sequence_length=4, eod=EOD, vocab_size=1000, **more)


@pytest.fixture
def corpus(tmp_path):
    ids = iter(range(1, 100))
    documents = [[[next(ids) for _ in range(size)]] for size in (5, 3, 7, 2, 9)]
    return IndexedDataset(write_indexed(tmp_path / "x", documents))


def test_samples_are_the_shuffled_stream(corpus):
    dataset = GPTDataset(corpus, (0, 5), 6, options())
    stream = np.concatenate([corpus[d] for d in [4, 0, 1, 2, 3]])
    for i, sample in enumerate([5, 2, 3, 1, 0, 4]):
        assert dataset[i]["tokens"].tolist() == stream[4 * sample : 4 * sample + 4].tolist()
        assert dataset[i]["labels"].tolist() == stream[4 * sample + 1 : 4 * sample + 5].tolist()
        assert dataset[i]["position_ids"].tolist() == [0, 1, 2, 3]
        assert dataset[i]["loss_mask"].tolist() == [1, 1, 1, 1]
        assert "segment_ids" not in dataset[i]
    assert [dataset[0][k].dtype.str for k in ("tokens", "labels", "position_ids", "loss_mask")] == ["<i4"] * 3 + ["<f4"]


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("keep_partial", [True, False])
def test_partial_samples_and_samples_without_an_extra_token(corpus, keep_partial, extra_token):
    """26 tokens in samples of 4: what is filled up, or has no label, is without loss."""
    dataset = GPTDataset(corpus, (0, 5), 6, options(keep_partial=keep_partial, extra_token=extra_token))
    assert len(dataset) == (7 if keep_partial else 6)
    stream = np.concatenate([corpus[int(d)] for d in dataset.document_index])
    for i in range(len(dataset)):
        at = 4 * int(dataset.shuffle_index[i])
        tokens = stream[at : at + 4]
        labels = stream[at + 1 : at + 5] if extra_token else tokens[1:]
        sample = dataset[i]
        assert sample["tokens"].tolist() == [*tokens, *[0] * (4 - len(tokens))]
        assert sample["labels"].tolist() == [*labels, *[0] * (4 - len(labels))]
        assert sample["loss_mask"].tolist() == [1] * len(labels) + [0] * (4 - len(labels))


def test_one_pass(corpus):
    assert (len(GPTDataset(corpus, (0, 5), None, options())), len(GPTDataset(corpus, (0, 1), None, options()))) == (
        6,
        1,
    )
    assert len(GPTDataset(corpus, (3, 4), None, options())) == 0


def test_splits_share_no_token(corpus):
    train, valid = GPTDataset(corpus, (0, 3), 3, options()), GPTDataset(corpus, (3, 5), 2, options())
    seen = [{t for i in range(len(d)) for t in d.text(i).tolist()} for d in (train, valid)]
    assert seen[0] <= set(range(1, 16))
    assert seen[1] <= set(range(16, 27))


def test_documents_end_within_a_sample():
    text = np.array([5, 0, 6, 7, 0, 0, 8, 9, 1], np.int32)
    sample = gpt_sample(text, options(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True))
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert sample["segment_ids"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0, 1, 1]


def megatrons_masks(text, eod):
    """Masks and positions as Megatron-LM documents them: at each end of document, what follows starts anew."""
    tokens = text[:-1]
    size = len(tokens)
    attention, positions, previous = np.tril(np.ones((size, size), bool)), np.arange(size), 0
    for end in np.flatnonzero(tokens == eod).tolist():
        attention[end + 1 :, : end + 1] = False
        positions[end + 1 :] -= end + 1 - previous
        previous = end + 1
    return attention, positions


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
@settings(deadline=None)
def test_segments_and_positions_are_megatrons(ids):
    text = np.array(ids, np.int32)
    sample = gpt_sample(text, options(reset_position_ids=True, reset_attention_mask=True))
    attention, positions = megatrons_masks(text, EOD)
    segments = sample["segment_ids"]
    assert np.array_equal(sample["position_ids"], positions)
    assert np.array_equal(np.tril(segments[:, None] == segments[None, :]), attention)


def test_a_document_much_longer_than_a_sample_and_many_epochs(tmp_path):
    corpus = IndexedDataset(write_indexed(tmp_path / "x", [[list(range(1, 50))]]))
    dataset = GPTDataset(corpus, (0, 1), 100, options())
    assert dataset.plan.epochs == 9
    stream = np.tile(np.arange(1, 50), 9)
    for i in range(len(dataset)):
        at = 4 * int(dataset.shuffle_index[i])
        assert dataset[i]["tokens"].tolist() == stream[at : at + 4].tolist()


def test_indices_come_from_the_cache(corpus, tmp_path):
    fresh = GPTDataset(corpus, (0, 5), 8, options())
    for _ in range(2):
        cached = GPTDataset(corpus, (0, 5), 8, options(), Cache(tmp_path / "cache"))
        assert [cached[i]["tokens"].tolist() for i in range(12)] == [fresh[i]["tokens"].tolist() for i in range(12)]
    assert len(list((tmp_path / "cache").glob("gpt-index-*"))) == 1
    GPTDataset(corpus, (0, 5), 8, options(seed=7), Cache(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").glob("gpt-index-*"))) == 2


def _build(prefix, cache, queue):
    dataset = GPTDataset(IndexedDataset(prefix), (0, 300), 5000, options(), Cache(cache))
    queue.put([dataset[i]["tokens"].tolist() for i in range(0, 5000, 500)])


def test_processes_that_start_at_once(tmp_path):
    prefix = write_indexed(tmp_path / "x", [[list(range(1, 60))] for _ in range(300)])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_build, args=(prefix, tmp_path / "cache", queue)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert all(samples == found[0] for samples in found)
    assert len(list((tmp_path / "cache").glob("gpt-index-*"))) == 1
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_too_little_text_is_refused(tmp_path):
    corpus = IndexedDataset(write_indexed(tmp_path / "x", [[[1]], [[2, 3]]]))
    with pytest.raises(UserError, match="sequences 0 to 1 of 2 have 1 tokens, too few"):
        GPTDataset(corpus, (0, 1), 1, options())


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    corpus = IndexedDataset(write_indexed(tmp_path / "x", [[[1, 2, 5000, 4, 5, 6]]]))
    with pytest.raises(UserError, match=r"x\.bin holds the token 5000, and the vocabulary has 1000"):
        GPTDataset(corpus, (0, 1), 1, options())[0]


@pytest.mark.parametrize(("dtype", "wrong"), [("<i8", 2**33 + 5), ("<i8", -(2**33) + 5), ("<f8", 2.5), ("<f4", np.nan)])
def test_ids_are_checked_before_they_are_cast(tmp_path, dtype: str, wrong: float):
    with IndexedWriter(tmp_path / "x", np.dtype(dtype)) as writer:
        writer.add(np.array([1, 2, wrong, 4, 5, 6]), np.array([4, 2]), np.array([1, 1]))
        writer.finish()
    corpus, said = IndexedDataset(tmp_path / "x"), rf"x\.bin holds the token {wrong}, and the vocabulary has 1000"
    with pytest.raises(UserError, match=said):
        GPTDataset(corpus, (0, 2), 1, options())[0]
    with pytest.raises(UserError, match=said):
        verify(corpus, 1000)
    with pytest.raises(UserError, match=said):
        checked_ids([corpus[0], corpus[1]], 1000, corpus.prefix)
    assert checked_ids([corpus[0][:2], corpus[1]], 1000, corpus.prefix).dtype == np.int32
