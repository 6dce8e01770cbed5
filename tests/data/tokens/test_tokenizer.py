import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace

from mtjax.data.tokens.end_file import END_FILE
from mtjax.data.tokens.folder import tokenizer_files
from mtjax.data.tokens.tokenizer import end_note, open_tokenizer
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
    chosen = open_tokenizer(f"sentencepiece:{tmp_path / 'sp.model'}", "<s>")
    assert pickle.loads(pickle.dumps(chosen)).eod == chosen.eod == tokenizer.special("<s>")
    (tmp_path / "run").mkdir()
    chosen.save(tmp_path / "run")
    assert open_tokenizer(str(tmp_path / "run/tokenizer.model")).eod == chosen.eod
    with pytest.raises(UserError, match="--parse-special needs a tokenizer that knows the names of its special tokens"):
        tokenizer.encode_batch_marked(["one"])
    with pytest.raises(UserError, match=r"sp\.model has no token '<end>' for --eod-token"):
        tokenizer.with_eod("<end>")


WRONG = {
    "does not exist": "hf:nowhere.json",
    "has neither encoder.json": "gpt2:{folder}",
    "is a folder; bert: takes a file": "bert:{folder}",
    "has no tokenizer.json, and no tokenizer_config.json that says": "hf:{folder}",
    "is not a tokenizer.json": "hf:{folder}/wrong.json",
    "is not a BERT vocabulary": "bert:{folder}/wrong.txt",
    "is not a SentencePiece model": "sentencepiece:{folder}/wrong.model",
    "is not known from its name: name it as gpt2:PATH": "{folder}/wrong.xyz",
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


def test_a_missing_tokenizer_names_the_command_that_copies_it_where_it_was_named():
    for name, command in {
        "hf:meta-llama/Meta-Llama-3-8B/tokenizer.json": (
            r"hf download meta-llama/Meta-Llama-3-8B --include 'tokenizer\*' --local-dir meta-llama/Meta-Llama-3-8B"
        ),
        "hf:/none/llama": r"hf download OWNER/NAME --include 'tokenizer\*' --local-dir /none/llama",
        "gpt2:none": "hf download openai-community/gpt2 vocab.json merges.txt --local-dir none",
        "nowhere.json": r"hf download OWNER/NAME --include 'tokenizer\*' --local-dir FOLDER",
    }.items():
        with pytest.raises(UserError, match=f"^the tokenizer {name} does not exist: .*`{command}`"):
            open_tokenizer(name)


DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def write_vocabulary(folder, special, plain=(), **settings):
    """A tokenizer.json with special tokens and others, and files of settings by name."""
    from tokenizers import AddedToken, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    vocabulary = {name: index for index, name in enumerate(["[UNK]", "one", "two"])}
    library = HuggingFace(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    library.save(str(folder / "tokenizer.json"))
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ENDS = {
    "Gemma 3": ((["<pad>", "<eos>", "<bos>"], ["</s>"], {"tokenizer_config": {"eos_token": "<eos>"}}), "<eos>", ()),
    "Gemma 3's tokenizer.json alone": ((["<pad>", "<eos>", "<bos>"], ["</s>"], {}), "<eos>", ()),
    "DeepSeek-V3": (
        ([DEEPSEEK_END], [], {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": DEEPSEEK_END}}}),
        DEEPSEEK_END,
        (),
    ),
    "DeepSeek-V3's tokenizer.json alone": (([DEEPSEEK_END], [], {}), DEEPSEEK_END, ()),
    "a name of its own in special_tokens_map.json": (
        (["<stop>"], [], {"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<stop>"}}}),
        "<stop>",
        (),
    ),
    "Qwen 3": (
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], {"tokenizer_config": {"eos_token": "<|im_end|>"}}),
        "<|endoftext|>",
        ("<|im_end|>",),
    ),
    "settings that name the second usual one": (
        (["<|endoftext|>", "</s>"], [], {"tokenizer_config": {"eos_token": "</s>"}}),
        "</s>",
        ("<|endoftext|>",),
    ),
    "Llama 2": ((["<s>", "</s>"], [], {"tokenizer_config": {"eos_token": "</s>"}}), "</s>", ()),
    "nothing special": (([], ["</s>"], {}), "</s>", ()),
}
"""Special tokens, others and settings; the token that ends documents; and those that might."""


@pytest.mark.parametrize("name", ENDS)
def test_documents_end_with_the_special_token_that_the_settings_name(name, tmp_path):
    (special, plain, settings), end, others = ENDS[name]
    folder = write_vocabulary(tmp_path / "t", special, plain, **settings)
    for path in (f"hf:{folder}", str(folder / "tokenizer.json")):
        tokenizer = open_tokenizer(path)
        assert (tokenizer.token(tokenizer.eod), tokenizer.other_ends) == (end, others)
        note = end_note(tokenizer)
        assert note == (
            f"documents end with {end}; the tokenizer also has {others[0]}: choose with --eod-token" if others else None
        )


def test_the_end_of_documents_can_be_chosen_and_is_kept(tmp_path):
    ends = ["<|endoftext|>", "<|im_end|>"]
    folder = write_vocabulary(tmp_path / "t", ends, tokenizer_config={"eos_token": "<|im_end|>"})
    chosen = open_tokenizer(str(folder), "<|im_end|>")
    assert chosen.token(chosen.eod) == "<|im_end|>" and end_note(chosen) is None
    assert (
        pickle.loads(pickle.dumps(chosen)).eod == open_tokenizer(str(folder)).with_eod("<|im_end|>").eod == chosen.eod
    )
    (tmp_path / "run").mkdir()
    chosen.save(tmp_path / "run")
    assert open_tokenizer(str(tmp_path / "run/tokenizer.json")).eod == chosen.eod
    assert END_FILE in tokenizer_files(tmp_path / "run")
    open_tokenizer(str(folder)).save(tmp_path / "run")
    assert open_tokenizer(str(tmp_path / "run")).token(open_tokenizer(str(tmp_path / "run")).eod) == "<|endoftext|>"
    with pytest.raises(UserError, match=r"the tokenizer .*t/tokenizer\.json has no token '<end>' for --eod-token"):
        open_tokenizer(str(folder), "<end>")
    (tmp_path / "run" / END_FILE).write_text('{"eod_token": 5}')
    with pytest.raises(UserError, match="eod_token is 5, and must be a token"):
        open_tokenizer(str(tmp_path / "run"))


def test_special_tokens_in_text_on_request(tmp_path):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = open_tokenizer(str(write_vocabulary(tmp_path / "t", names)))
    chats = ["<|im_start|>one<|im_end|>", "two"]
    assert tokenizer.encode_batch_marked(chats) == [[4, 1, 5], [2]]
    assert tokenizer.encode_batch(chats) == [tokenizer.encode(chats[0]), [2]] and len(tokenizer.encode(chats[0])) > 3
    assert tokenizer.encode_batch_marked(chats) == [tokenizer.encode_marked(chat) for chat in chats]


def test_a_vocabulary_without_an_end_is_refused(tmp_path):
    from tokenizers import models

    HuggingFace(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "t.json"))
    with pytest.raises(
        UserError, match="has no end-of-document token: name one of its tokens with --eod-token, or put"
    ):
        open_tokenizer(str(tmp_path / "t.json"))
    assert open_tokenizer(str(tmp_path / "t.json"), "a").eod == 0
