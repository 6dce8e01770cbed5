import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace

from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from mtjax.errors import UserError
from tests.data.corpora import texts, write_bert_vocab


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(texts(200), path, 400)
    return path


@pytest.fixture(scope="module")
def gpt2(trained, tmp_path_factory):
    """The same vocabulary in the two files that GPT-2 came in."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = json.loads(trained.read_text())["model"]
    (folder / "encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(m if isinstance(m, str) else " ".join(m) for m in model["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}\n")
    return folder


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_any_text_comes_back(trained, text):
    tokenizer = open_tokenizer(str(trained))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_is_deterministic(trained, tmp_path):
    train_byte_level_bpe(texts(200), tmp_path / "again.json", 400)
    assert (tmp_path / "again.json").read_text() == trained.read_text()


def test_no_text_can_end_a_document(trained, gpt2):
    for name in (f"hf:{trained}", f"gpt2:{gpt2}"):
        tokenizer = open_tokenizer(name)
        ids = tokenizer.encode("one <|endoftext|> two")
        assert tokenizer.eod not in ids
        assert tokenizer.decode([*ids, tokenizer.eod]) == "one <|endoftext|> two<|endoftext|>"


def test_gpt2s_two_files_are_the_same_tokenizer(trained, gpt2):
    one, other = open_tokenizer(str(trained)), open_tokenizer(str(gpt2))
    for text in texts(20, seed=3):
        assert one.encode(text) == other.encode(text)
    assert (one.vocab_size, one.eod) == (other.vocab_size, other.eod)


def test_ids_are_those_of_the_library(trained):
    theirs, ours = HuggingFace.from_file(str(trained)), open_tokenizer(str(trained))
    documents = texts(30, seed=4)
    assert ours.encode_batch(documents) == [theirs.encode(text).ids for text in documents]


def test_a_run_carries_its_tokenizer(trained, tmp_path):
    tokenizer = open_tokenizer(str(trained))
    tokenizer.save(tmp_path)
    again = open_tokenizer(str(tmp_path / "tokenizer.json"))
    sent = pickle.loads(pickle.dumps(tokenizer))
    text = texts(1)[0] + "<|endoftext|>"
    assert again.encode(text) == sent.encode(text) == tokenizer.encode(text)


def test_bert(tmp_path):
    tokenizer = open_tokenizer(f"bert:{write_bert_vocab(tmp_path / 'vocab.txt')}")
    pieces = [tokenizer.token(i) for i in tokenizer.encode("The River runs.")]
    assert pieces == ["the", "river", "r", "##u", "##n", "##s", "."]
    assert tokenizer.eod == tokenizer.special("[SEP]")
    assert tokenizer.special("[MASK]") not in tokenizer.encode("[MASK]")
    assert tokenizer.special("[NONE]") is None


def test_sentencepiece(tmp_path):
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(texts(300)))
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "sp"), vocab_size=60, minloglevel=2
    )
    tokenizer = open_tokenizer(f"sentencepiece:{tmp_path / 'sp.model'}")
    text = texts(1)[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, text]) == [tokenizer.encode(text)] * 2
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == (tmp_path / "sp.model").read_bytes()
    assert tokenizer.special("</s>") == tokenizer.eod
    assert tokenizer.special("[MASK]") is None


WRONG = {
    "does not exist": "hf:nowhere.json",
    "has neither encoder.json": "gpt2:{folder}",
    "is a folder; bert: takes a file": "bert:{folder}",
    "has no tokenizer.json, and no tokenizer_config.json that says": "hf:{folder}",
    "is not a tokenizer.json": "hf:{folder}/wrong.json",
    "is not a BERT vocabulary": "bert:{folder}/wrong.txt",
    "is not a SentencePiece model": "sentencepiece:{folder}/wrong.model",
    "can't be told by its name": "{folder}/wrong.xyz",
    "did you mean 'bert'": "brt:x",
    "can't be read": "bert:{folder}/binary.txt",
    "each line of merges.txt should be two tokens": "gpt2:{folder}/gpt2",
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tokenizers(tmp_path: Path, message: str):
    for name in ("wrong.json", "wrong.txt", "wrong.model", "wrong.xyz"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "gpt2" / "merges.txt").write_text("a b c\n")
    with pytest.raises(UserError, match=message):
        open_tokenizer(WRONG[message].format(folder=tmp_path))


def test_a_vocabulary_without_an_end_is_refused(tmp_path):
    from tokenizers import models

    HuggingFace(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="has no end-of-document token"):
        open_tokenizer(str(tmp_path / "t.json"))
