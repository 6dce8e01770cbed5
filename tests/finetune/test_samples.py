"""Rows as samples, against the `tokenizers` library's own pairs and truncation; and metrics against scipy."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.errors import UserError
from mtjax.finetune import metrics
from mtjax.finetune.samples import Epochs, RowEncoder, Samples, order_of_pass

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(20))]
VOCAB = {word: number for number, word in enumerate(WORDS)}


def library() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def roberta_library() -> Tokenizer:
    """With RoBERTa's names of special tokens, and two separators between texts."""
    names = dict(zip(("[PAD]", "[CLS]", "[SEP]", "[UNK]"), ("<pad>", "<s>", "</s>", "<mask>"), strict=True))
    vocab = {names.get(word, word): number for word, number in VOCAB.items()}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return tokenizer


OURS, LIBRARY = FastTokenizer(library(), "a test"), library()
TEXT = st.integers(1, 12).map(lambda n: " ".join(f"w{i}" for i in range(n)))


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=2), st.integers(6, 24))
def test_bert_s_rows_are_the_library_s_pairs(texts, length):
    encoder = RowEncoder(OURS, "bert")
    (ids,) = encoder.encode([tuple(texts)])
    LIBRARY.enable_truncation(length, strategy="longest_first")
    expected = LIBRARY.encode(*texts)
    row, first = encoder.format.row(ids, length)
    assert row == expected.ids
    samples = Samples([(row, first)], np.zeros(1, np.int32), np.ones(1, np.float32), 24, encoder.format.pad)
    sample = samples[0]
    assert sample["token_types"][: len(row)].tolist() == expected.type_ids
    assert sample["padding_mask"].sum() == len(row)
    assert not sample["tokens"][len(row) :].any()


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=2), st.integers(8, 24))
def test_roberta_s_rows_are_the_library_s_pairs(texts, length):
    encoder, theirs = RowEncoder(FastTokenizer(roberta_library(), "a test"), "bert"), roberta_library()
    (ids,) = encoder.encode([tuple(texts)])
    assert encoder.format.length(ids) == len(theirs.encode(*texts).ids)
    theirs.enable_truncation(length, strategy="longest_first")
    assert encoder.format.row(ids, length)[0] == theirs.encode(*texts).ids


def test_decoders_read_two_texts_with_the_end_of_a_document_between():
    encoder = RowEncoder(OURS, "gpt")
    (ids,) = encoder.encode([("w1 w2", "w3")])
    assert encoder.format.row(ids, 24)[0] == [*LIBRARY.encode("w1 w2").ids, 2, VOCAB["w3"]]
    assert encoder.format.length(ids) == 6


def test_bert_needs_its_special_tokens():
    plain = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    with pytest.raises(UserError, match="requires a tokenizer with"):
        RowEncoder(FastTokenizer(plain, "a test"), "bert")


def test_each_pass_has_every_row_once_in_an_order_of_its_own():
    rows = [([number], 1) for number in range(10)]
    samples = Samples(rows, np.zeros(10, np.int32), np.ones(10, np.float32), 1, 0)
    seen = [int(Epochs(samples, 7, 25)[k]["tokens"][0]) for k in range(25)]
    assert Counter(seen[:10]) == Counter(seen[10:20]) == Counter(range(10))
    assert seen[:10] != seen[10:20]
    assert seen[20:] == order_of_pass(7, 2, 10)[:5].tolist()


def test_metrics_are_those_of_scipy_and_of_counting():
    random = np.random.default_rng(0)
    outputs, labels = random.normal(size=(200, 3)).astype(np.float32), random.integers(0, 3, 200)
    chosen = outputs.argmax(1)
    table = np.array([[np.sum((chosen == c) & (labels == r)) for r in range(3)] for c in range(3)])
    precision, recall = np.diag(table) / table.sum(1), np.diag(table) / table.sum(0)
    f1 = 2 * precision * recall / (precision + recall)
    assert metrics.of_classes(outputs, labels) == pytest.approx({"accuracy": np.trace(table) / 200, "f1": f1.mean()})
    two = metrics.accuracy_and_f1(outputs[:, :2], np.minimum(labels, 1))
    right = np.minimum(labels, 1) == 1
    both = np.sum((outputs[:, 1] > outputs[:, 0]) & right)
    p, r = both / np.sum(outputs[:, 1] > outputs[:, 0]), both / right.sum()
    assert two["f1"] == pytest.approx(2 * p * r / (p + r))

    numbers = np.round(random.normal(size=200), 1).astype(np.float32)  # with ties
    found = metrics.correlations(outputs[:, :1], numbers)
    assert found["pearson"] == pytest.approx(stats.pearsonr(outputs[:, 0], numbers).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(outputs[:, 0], numbers).statistic)
    losses = -np.log(np.exp(outputs.astype(np.float64)) / np.exp(outputs.astype(np.float64)).sum(1, keepdims=True))
    assert metrics.mean_loss(outputs, labels) == pytest.approx(losses[np.arange(200), labels].mean())
    assert metrics.correlations(np.ones((3, 1), np.float32), numbers[:3])["pearson"] == 0.0
