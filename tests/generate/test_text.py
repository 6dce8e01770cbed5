"""Incremental detokenization: complete characters, and nothing after a stop sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models

from mtjax.data.tokens.tokenizer import FastTokenizer, byte_level
from mtjax.generate.command import GenerateJob
from mtjax.generate.completion import Completion
from mtjax.generate.options import Options
from mtjax.generate.request import Sampling, Token
from mtjax.generate.text import TextWriter, overlap
from mtjax.serve.service import Keys, Limits, Service


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    """Builds a tokenizer with a token for each byte, as in GPT-2."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return FastTokenizer(byte_level(HuggingFace(models.BPE(vocab | {"<|endoftext|>": 256}, []))), "a test")


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語 🙂", " spaces  "])
def test_only_complete_characters_are_emitted(tokenizer, text: str) -> None:
    writer = TextWriter(tokenizer, tokenizer.encode("before "))
    pieces = [writer.add(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + writer.end() == text == writer.text
    assert [piece for piece in pieces if piece] == list(text)


def test_incomplete_character_at_the_end_is_emitted(tokenizer) -> None:
    writer = TextWriter(tokenizer)
    assert [writer.add(i) for i in tokenizer.encode("é")[:1]] == [""]
    assert writer.end() == "\ufffd"


def test_stop_sequences_are_held_back_and_removed(tokenizer) -> None:
    writer = TextWriter(tokenizer, (), ("\n\nQ:", "END"))
    emitted = [writer.add(i) for i in tokenizer.encode("a\n\nb E\n\nQ: more")]
    assert "".join(emitted) == "a\n\nb E" == writer.text and writer.is_stopped and writer.end() == ""
    assert emitted[1:4] == ["", "", "\n\nb"]
    unfinished = TextWriter(tokenizer, (), ("END",))
    assert "".join(unfinished.add(i) for i in tokenizer.encode("the EN")) == "the "
    assert unfinished.end() == "EN" and not unfinished.is_stopped


def pieces_of(tokenizer, ids: list[int], *stops: str) -> list[tuple[str, int | None]]:
    """Returns the pieces that a completion emits for these tokens."""
    completion = Completion(tokenizer, (), stops=stops)
    for place, index in enumerate(ids):
        if completion.request.on_token(Token(index, float(place))):
            break
    completion.request.on_end("stop")
    assert "".join(piece.text for piece in completion.pieces) == completion.text
    return [(piece.text, piece.token and piece.token.id) for piece in completion.pieces]


def test_tokens_keep_their_text_with_stop_sequences(tokenizer) -> None:
    """Stop sequences that share a prefix with the text, but do not occur, change nothing."""
    text = "aaab é ENaé"
    ids = tokenizer.encode(text)
    alone = pieces_of(tokenizer, ids)
    assert alone == [(text, i) for text, i in zip([*"aaab ", "", *"é ENa", "", "é"], ids, strict=True)]
    assert pieces_of(tokenizer, ids, "aaaaa", "END", " é E!") == alone
    assert pieces_of(tokenizer, ids[:-1], "aé!") == [*alone[:-2], ("", ids[-2]), ("\ufffd", None)]
    # A stop string that comes is cut off, in the middle of a token as well.
    assert pieces_of(tokenizer, ids, "never", "b é") == [*alone[:3], *(("", i) for i in ids[3:7])]


def test_overlap_is_the_longest() -> None:
    assert [overlap(text, "aab") for text in ("xa", "xaa", "xaab", "b", "")] == [1, 2, 0, 0, 0]


def test_the_text_of_an_encoder_decoder_begins_without_a_space(capsys, monkeypatch) -> None:
    """A T5's text does not continue its prompt, so its first word begins a text, as `decode` of transformers has it."""
    words = ["</s>", "<unk>", "▁The", "▁house", "▁Das", "▁Haus"]
    made = HuggingFace(models.Unigram([(word, -1.0) for word in words], unk_id=1))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(words[:1])
    tokenizer, prompt, answer = FastTokenizer(made, "a test", eod=words[0]), [2, 3, 0], [4, 5]
    expected = made.decode(answer)
    assert expected == "Das Haus"

    class Answering:
        """An engine whose texts are all `answer`."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.requests = []

        def submit(self, request: Any) -> None:
            self.requests.append(request)

        def run(self) -> None:
            for request in self.requests:
                for token in answer:
                    request.on_token(Token(token))
                request.on_end("length")

    monkeypatch.setattr("mtjax.generate.command.Engine", Answering)
    model: Any = SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset(), prompt_ids=lambda text: prompt)
    host: Any = SimpleNamespace(is_encoder_decoder=True)
    GenerateJob(Options("a t5"), model, host).continue_texts(["The house"])
    assert capsys.readouterr().out == f"{expected}\n"
    tokens: Any = SimpleNamespace(decoder=tokenizer)
    service = Service("a t5", tokens, frozenset(), host, Limits(1, 1, 1.0), Keys([]))
    text = service.completion(prompt, Sampling())
    for token in answer:
        text.request.on_token(Token(token))
    assert text.text == expected
