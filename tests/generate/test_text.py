"""Text as it comes: entire characters, and nothing beyond a stop string."""

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models

from mtjax.data.tokens.tokenizer import FastTokenizer, byte_level
from mtjax.generate.text import TextWriter, overlap


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    """A token for each byte, as GPT-2 writes them."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return FastTokenizer(byte_level(HuggingFace(models.BPE(vocab | {"<|endoftext|>": 256}, []))), "a test")


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語 🙂", " spaces  "])
def test_characters_come_whole(tokenizer, text: str) -> None:
    writer = TextWriter(tokenizer, tokenizer.encode("before "))
    pieces = [writer.add(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + writer.end() == text == writer.text
    assert [piece for piece in pieces if piece] == list(text)


def test_half_a_character_at_the_end_is_told(tokenizer) -> None:
    writer = TextWriter(tokenizer)
    assert [writer.add(i) for i in tokenizer.encode("é")[:1]] == [""]
    assert writer.end() == "\ufffd"


def test_stop_strings_are_held_back_and_left_out(tokenizer) -> None:
    writer = TextWriter(tokenizer, (), ("\n\nQ:", "END"))
    told = [writer.add(i) for i in tokenizer.encode("a\n\nb E\n\nQ: more")]
    assert "".join(told) == "a\n\nb E" == writer.text and writer.is_stopped and writer.end() == ""
    assert told[1:4] == ["", "", "\n\nb"]
    unfinished = TextWriter(tokenizer, (), ("END",))
    assert "".join(unfinished.add(i) for i in tokenizer.encode("the EN")) == "the "
    assert unfinished.end() == "EN" and not unfinished.is_stopped


def test_overlap_is_the_longest() -> None:
    assert [overlap(text, "aab") for text in ("xa", "xaa", "xaab", "b", "")] == [1, 2, 0, 0, 0]
