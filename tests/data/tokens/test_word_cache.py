import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers

from mtjax.data.tokens.tokenizer import byte_level
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from mtjax.data.tokens.word_cache import SETTLED, WordCache, can_cache, word_cache
from tests.data.corpora import default_documents, texts

pytest.importorskip("regex")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe([text[:2000] for text in default_documents()[:200]], path, 2000)
    loaded = HuggingFace.from_file(str(path))
    loaded.encode_special_tokens = True
    return loaded


def library(tokenizer, batch):
    return [e.ids for e in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


@given(batch=st.lists(st.text(max_size=40) | st.text(" \n\ta1'.s\u00e9\u4e2d\U0001f600", max_size=30), max_size=5))
@settings(deadline=None, max_examples=300)
def test_ids_are_the_librarys(tokenizer, batch):
    assert WordCache(tokenizer).encode_batch(batch) == library(tokenizer, batch)


def test_ids_of_real_text_are_the_librarys(tokenizer):
    cache, batch = WordCache(tokenizer), [*default_documents()[200:300], "<|endoftext|>", ""]
    assert cache.encode_batch(batch) == cache.encode_batch(batch) == library(tokenizer, batch)


def test_settled_characters_are_cut_as_the_library_cuts(tokenizer):
    """Every settled character between letters, digits, spaces and marks."""
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    settled = [c for c in characters if SETTLED.fullmatch(c)]
    assert len(settled) > 40_000
    random.Random(0).shuffle(settled)
    batch = ["".join(f"a{c}1{c}. {c}|\n" for c in settled[i : i + 200]) for i in range(0, len(settled), 200)]
    assert WordCache(tokenizer).encode_batch(batch) == library(tokenizer, batch)


def test_a_full_cache_starts_anew(tokenizer, monkeypatch):
    monkeypatch.setattr("mtjax.data.tokens.word_cache.MOST_WORDS", 20)
    cache = WordCache(tokenizer)
    for seed in range(5):
        assert cache.encode_batch(texts(5, seed)) == library(tokenizer, texts(5, seed))
    batch = [f"word{i}" for i in range(100)]
    assert cache.encode_batch(batch) == library(tokenizer, batch)


def test_only_gpt2s_kind_is_cached(tokenizer):
    assert can_cache(tokenizer)
    other = byte_level(HuggingFace(models.BPE()))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert word_cache(other) is None
    assert word_cache(HuggingFace(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))) is None
    named = byte_level(HuggingFace(models.BPE(vocab={"a": 0}, merges=[])))
    named.add_tokens(["ab"])
    assert word_cache(named) is None
