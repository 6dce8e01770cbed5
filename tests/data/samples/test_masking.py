"""BERT and T5 samples: structure of each sample, and statistics of many against theory."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.masking import choose_spans, geometric, harmonic, whole_words, word_starts
from mtjax.data.samples.sentence_runs import RunOptions, cut_runs
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.families.bert.samples import IGNORED, BertDataset, BertOptions, truncate_pair
from mtjax.families.t5.samples import T5Dataset, T5Options
from tests.data.corpora import write_bert_vocab, write_indexed

COUNT = 1500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(f"bert:{write_bert_vocab(tmp_path_factory.mktemp('vocab') / 'vocab.txt')}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer):
    """Sentences of random words, a third of them of two pieces; every token says where it is only by chance."""
    random, documents = np.random.RandomState(0), []
    pieces, starts = np.arange(5, tokenizer.vocab_size), word_starts(tokenizer)
    for _ in range(300):
        document = []
        for _ in range(random.randint(2, 30)):
            sentence = random.choice(pieces, random.randint(3, 30))
            sentence[0] = random.choice(pieces[starts[pieces]])
            document.append(sentence.tolist())
        documents.append(document)
    return IndexedDataset(write_indexed(tmp_path_factory.mktemp("corpus") / "x", documents))


@pytest.fixture(scope="module")
def bert(corpus, tokenizer):
    return BertDataset(corpus, (0, 300), COUNT, tokenizer, BertOptions(128))


@pytest.fixture(scope="module")
def t5(corpus, tokenizer):
    return T5Dataset(corpus, (0, 300), COUNT, tokenizer, T5Options(128, 64))


def originals(sample):
    return np.where(sample["labels"] == IGNORED, sample["tokens"], sample["labels"])


def test_a_bert_sample_is_made_of_its_documents_sentences(bert, corpus):
    document_of = np.repeat(np.arange(300), np.diff(corpus.documents))
    for i in range(300):
        sample, (begin, end, target) = bert[i], bert.runs[i].tolist()
        assert document_of[begin] == document_of[end - 1]
        used = int(sample["padding_mask"].sum())
        tokens = originals(sample)[:used]
        seps = np.flatnonzero(tokens == bert.sep)
        assert tokens[0] == bert.cls and len(seps) == 2 and seps[1] == used - 1 <= target + 2
        assert (sample["token_types"][:used] == (np.arange(used) > seps[0])).all()
        assert (sample["tokens"][used:] == bert.pad).all()
        assert (sample["labels"][used:] == IGNORED).all()
        assert ((sample["labels"] != IGNORED) == sample["loss_mask"]).all()
        first, second = tokens[1 : seps[0]], tokens[seps[0] + 1 : -1]
        if sample["sentence_order"]:
            first, second = second, first
        text = "," + ",".join(str(t) for s in range(begin, end) for t in corpus[s]) + ","
        places = [text.find("," + ",".join(map(str, side.tolist())) + ",") for side in (first, second)]
        assert -1 not in places
        if len(tokens) != target + 3:
            assert places[0] < places[1]


def test_without_the_order_a_bert_sample_is_one_run_as_the_text_has_it(corpus, tokenizer):
    """As Megatron's without a classification head: no pair, and documents of one sentence count."""
    samples = BertDataset(corpus, (0, 300), COUNT, tokenizer, BertOptions(128, sentence_order=False))
    for i in range(300):
        sample, (begin, end, target) = samples[i], samples.runs[i].tolist()
        used = int(sample["padding_mask"].sum())
        tokens = originals(sample)[:used]
        assert tokens[0] == samples.cls and np.flatnonzero(tokens == samples.sep).tolist() == [used - 1]
        assert used - 2 <= target and not sample["token_types"].any() and "sentence_order" not in sample
        text = np.concatenate([corpus[s] for s in range(begin, end)])
        starts = np.flatnonzero(text[: len(text) - used + 3] == tokens[1])
        assert any((text[at : at + used - 2] == tokens[1:-1]).all() for at in starts)


def test_any_sample_can_be_made_alone(bert, corpus, tokenizer):
    alone = BertDataset(corpus, (0, 300), COUNT, tokenizer, BertOptions(128))
    for name, value in alone[777].items():
        assert np.array_equal(value, bert[777][name])


def test_bert_statistics(bert):
    masked = special = total = kept = other = swapped = 0
    for i in range(COUNT):
        sample = bert[i]
        guess = sample["labels"] != IGNORED
        total += int(sample["padding_mask"].sum())
        masked += int(guess.sum())
        special += int((sample["tokens"][guess] == bert.mask).sum())
        kept += int((sample["tokens"] == sample["labels"])[guess].sum())
        other += int(((sample["tokens"] != sample["labels"]) & (sample["tokens"] != bert.mask))[guess].sum())
        swapped += int(sample["sentence_order"])
    chance = 1 / bert.vocab_size  # a random token may be the mask, or the right one
    assert masked / total == pytest.approx(0.15, abs=0.005)
    assert special / masked == pytest.approx(0.8 + 0.1 * chance, abs=0.015)
    assert kept / masked == pytest.approx(0.1 + 0.1 * chance, abs=0.01)
    assert other / masked == pytest.approx(0.1 * (1 - 2 * chance), abs=0.01)
    assert swapped / COUNT == pytest.approx(0.5, abs=0.04)


def test_whole_words_are_masked(bert, tokenizer):
    starts = word_starts(tokenizer)
    for i in range(300):
        sample = bert[i]
        tokens, guess = originals(sample), sample["labels"] != IGNORED
        # A piece that goes on a word shares the fate of the piece before it.
        goes_on = np.flatnonzero(~starts[tokens])
        goes_on = goes_on[(tokens[goes_on - 1] != bert.sep) & (tokens[goes_on - 1] != bert.cls)]
        assert (guess[goes_on] == guess[goes_on - 1]).all()
        assert not guess[np.isin(tokens, [bert.cls, bert.sep, bert.pad])].any()


def test_lengths_of_ngrams():
    random = np.random.RandomState(0)
    drawn = Counter(harmonic(3)(random) for _ in range(30_000))
    for n in (1, 2, 3):
        assert drawn[n] / 30_000 == pytest.approx(1 / n / (1 + 1 / 2 + 1 / 3), abs=0.01)
    drawn = Counter(geometric(10, 0.2)(random) for _ in range(30_000))
    for n in range(1, 10):
        assert drawn[n] / 30_000 == pytest.approx(0.2 * 0.8 ** (n - 1), abs=0.01)
    assert drawn[10] / 30_000 == pytest.approx(0.8**9, abs=0.01)
    assert max(drawn) == 10


def test_spans_fill_the_budget_and_do_not_overlap():
    random = np.random.RandomState(0)
    words = [(i, i + 1) for i in range(100)]
    for _ in range(100):
        spans = choose_spans(words, 15, geometric(10, 0.2), random)
        assert sum(b - a for a, b in spans) == 15
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_words_stop_at_special_tokens():
    starts = np.array([True, True, False])
    tokens, special = np.array([0, 1, 2, 0, 2, 2, 1]), np.array([True, False, False, True, False, False, False])
    assert whole_words(tokens, starts, special) == [(1, 3), (4, 6), (6, 7)]


def test_short_targets(corpus):
    runs = cut_runs(corpus.lengths, corpus.documents, RunOptions(40, 2, 0.1), np.random.RandomState(0))
    short = runs[:, 2] < 40
    assert short.mean() == pytest.approx(0.1 * 38 / 39, abs=0.03)
    assert runs[short, 2].min() >= 2


def test_runs_are_cut_as_sentence_by_sentence(corpus):
    """Against the rule told sentence by sentence, with every target the full length."""
    lengths, documents = corpus.lengths, corpus.documents
    expected = []
    for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        begin, tokens = first, 0
        for sentence in range(first, last):
            tokens += int(lengths[sentence])
            left = last - sentence - 1
            if (tokens >= 60 and left > 1 and sentence + 1 - begin >= 2) or left == 0:
                expected.append([begin, sentence + 1, 60])
                begin, tokens = sentence + 1, 0
    runs = cut_runs(lengths, documents, RunOptions(60, 2, 0.0), np.random.RandomState(0))
    assert runs.tolist() == expected


def test_unusable_documents_are_left_out(tmp_path, tokenizer):
    documents = [[[9] * 5], [[9] * 513, [9] * 5], [], [[9] * 5, [9] * 6], [[9] * 512, [9] * 2]]
    corpus = IndexedDataset(write_indexed(tmp_path / "x", documents))
    runs = cut_runs(corpus.lengths, corpus.documents, RunOptions(20, 2, 0.0), np.random.RandomState(0))
    assert runs[:, :2].tolist() == [[3, 5], [5, 7]]
    with pytest.raises(UserError, match="none of the documents 0 to 3 has at least 2 sentences"):
        BertDataset(corpus, (0, 3), 1, tokenizer, BertOptions(32))


def test_a_vocabulary_without_masks_is_refused(tmp_path, corpus):
    from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe

    train_byte_level_bpe(["some text"], tmp_path / "t.json", 300)
    with pytest.raises(UserError, match=r"lacks \[CLS\], \[SEP\], \[MASK\], \[PAD\], which BERT needs"):
        BertDataset(corpus, (0, 300), 1, open_tokenizer(f"hf:{tmp_path / 't.json'}"), BertOptions(32))


def test_truncation_is_even_between_front_and_back():
    first, second = np.arange(100), np.arange(100, 160)
    fronts = []
    for seed in range(200):
        a, b = truncate_pair(first, second, 80, np.random.RandomState(seed))
        assert (len(a), len(b)) == (40, 40)
        assert (np.diff(a) == 1).all()
        fronts.append(a[0] / 60)
    assert np.mean(fronts) == pytest.approx(0.5, abs=0.02)


def rebuilt(sample, t5):
    """The text, from the corrupted text and the spans."""
    encoder = sample["encoder_tokens"][: int(sample["encoder_mask"].sum())].tolist()
    target = sample["labels"][: int(sample["loss_mask"].sum())].tolist()
    spans, current = {}, None
    for token in target[:-1]:
        if token in t5.ids.sentinels:
            current = spans[token] = []
        else:
            assert current is not None
            current.append(token)
    assert target[-1] == t5.ids.eos
    assert list(spans) == [t for t in encoder if t in t5.ids.sentinels] == list(t5.ids.sentinels[: len(spans)])
    return [t for token in encoder for t in spans.get(token, [token])], list(spans.values())


def test_t5_spans_put_back_give_the_text(t5, corpus):
    for i in range(300):
        begin, end, target = t5.runs[i].tolist()
        text = np.concatenate([corpus[s] for s in range(begin, end)])[:target].tolist()
        assert rebuilt(t5[i], t5)[0] == text
        decoder, labels = t5[i]["decoder_tokens"], t5[i]["labels"]
        used = int(t5[i]["loss_mask"].sum())
        assert decoder[0] == t5.ids.bos
        assert decoder[1:used].tolist() == labels[: used - 1].tolist()


def test_t5_statistics(t5, corpus, tokenizer):
    starts, masked, total, lengths = word_starts(tokenizer), 0, 0, []
    for i in range(COUNT):
        text, spans = rebuilt(t5[i], t5)
        masked, total = masked + sum(map(len, spans)), total + len(text)
        lengths += [int(starts[span].sum()) for span in spans]
    assert masked / total == pytest.approx(0.15, abs=0.005)
    assert max(lengths) <= 10
    # Short budgets cut long spans, so lengths are at most geometric, and single words are the most frequent.
    assert 1.5 < np.mean(lengths) < 5
    assert Counter(lengths).most_common(1)[0][0] == 1


def test_long_texts_fill_spans_as_drawn():
    random, words = np.random.RandomState(0), [(i, i + 1) for i in range(20_000)]
    spans = choose_spans(words, 200, geometric(10, 0.2), random)
    expected = sum(min(n, 10) * 0.2 * 0.8 ** (n - 1) for n in range(1, 200))
    assert np.mean([b - a for a, b in spans]) == pytest.approx(expected, rel=0.3)
