"""Tokenizers of Hugging Face folders without a tokenizer.json: ids that transformers 5.24 gave, and what is refused.

Whether transformers still gives them, tests/parity/test_tokenizers.py asks.
"""

import json
import pickle
from pathlib import Path

import pytest

from mtjax.data.tokens.identity import same_path
from mtjax.data.tokens.tokenizer import digest_of, folder_of, open_tokenizer
from mtjax.errors import UserError
from mtjax.families.t5.samples import t5_ids
from tests.data.tokens.pretrained_folders import CASES, END, QWEN2, write_pretrained, write_vocabulary

PROMPT, MARKED = "ba 12  ke", "Ba caf\u00e9 \u65e5\u672c</s> ke<X>"
IDS = {
    "llama": (
        "1 262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 273 91 275",
    ),
    "llama legacy": (
        "1 262 266 265 266 263 2",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 273 91 275",
    ),
    "llama without prefix": (
        "1 259 266 265 266 263",
        "69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 273 91 275",
    ),
    "llama with defaults": (
        "262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 273 91 275",
    ),
    "llama with added tokens": (
        "1 262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 278",
    ),
    "llama as of old": (
        "1 262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 263 277",
    ),
    "llama with user's symbols": (
        "1 265 269 268 269 266",
        "269 72 271 269 105 271 108 201 175 269 236 157 171 236 162 178 2 266 3",
    ),
    "mixtral": (
        "1 262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 266 263 273 91 275",
    ),
    "mixtral with user's symbols": (
        "1 265 269 268 269 266",
        "269 72 271 269 105 271 108 201 175 269 236 157 171 236 162 178 2 266 3",
    ),
    "llama that names no class": (
        "262 266 265 266 263",
        "266 69 268 266 102 268 105 198 172 266 233 154 168 233 159 175 2 266 263 273 91 275",
    ),
    "qwen2": (
        "256 220 16 17 220 220 257",
        "33 64 220 66 64 69 127 102 220 162 245 98 162 250 105 27 14 82 29 220 257 27 55 29",
    ),
    "qwen2 as of old": (
        "220 256 220 220 16 220 17 220 220 257",
        "220 33 64 220 66 64 69 127 102 220 162 245 98 162 250 105 220 27 14 220 82 220 29 220 257 268",
    ),
    "gpt2": (
        "256 263 220 220 257",
        "33 64 220 66 64 69 127 102 220 162 245 98 162 250 105 27 14 82 29 220 257 27 55 29",
    ),
    "gpt2 with settings": (
        "266 220 256 263 220 220 257",
        "220 33 64 220 66 64 69 127 102 220 162 245 98 162 250 105 27 14 82 29 220 257 268",
    ),
    "bert": (
        "2 5 40 80 6 3",
        "5 7 9 10 1 1 31 1 6 1 36 1",
    ),
    "bert cased": (
        "2 5 40 80 6 3",
        "11 8 9 10 1 1 31 1 6 1 1 1",
    ),
    "bert with accents": (
        "2 5 40 80 6 3",
        "5 8 9 10 1 1 31 1 6 1 36 1",
    ),
    "bert with words of Chinese": (
        "2 5 40 80 6 3",
        "5 7 12 1 1 31 1 6 1 36 1",
    ),
    "bert with added tokens": (
        "2 5 40 80 6 3",
        "5 7 9 10 1 1 31 1 6 92",
    ),
    "t5": (
        "3 7 12 13 5 1",
        "7 2 8 7 2 8 2 7 2 1 5 15 2 16",
    ),
    "t5 with defaults": (
        "3 7 12 13 5 1",
        "7 2 8 7 2 8 2 7 2 1 5 15 2 16",
    ),
}
"""Of `PROMPT` with what the tokenizer adds, and of `MARKED`, in which names of special tokens stand for them."""


@pytest.fixture
def folder(tmp_path):
    return write_pretrained(tmp_path / "folder", "qwen2")


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(tmp_path, case):
    if CASES[case][0].startswith(("bpe", "unigram")):
        pytest.importorskip("sentencepiece", reason="needs the extra data: pip install '.[data]'")
    prompt, marked = ([int(index) for index in ids.split()] for ids in IDS[case])
    tokenizer = open_tokenizer(str(write_pretrained(tmp_path, case)))
    assert tokenizer.encode_prompt(PROMPT) == prompt
    assert tokenizer.encode_marked(MARKED) == marked
    tokenizer.save(tmp_path / "..")
    for again in (open_tokenizer(str(tmp_path / "../tokenizer.json")), pickle.loads(pickle.dumps(tokenizer))):
        assert (again.encode_prompt(PROMPT), again.encode_marked(MARKED), again.eod) == (prompt, marked, tokenizer.eod)


def test_sentinels_are_t5s_own(tmp_path):
    pytest.importorskip("sentencepiece", reason="needs the extra data: pip install '.[data]'")
    tokenizer = open_tokenizer(str(write_pretrained(tmp_path, "t5")))
    ids = t5_ids(tokenizer)
    assert ids.sentinels == (27, 26, 25, 24)  # <extra_id_0> is the last token of the vocabulary
    assert (ids.pad, ids.eos, ids.vocab_size) == (0, 1, 28)


def test_documents_end_with_the_eos_token_where_no_usual_name_is_known(folder):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    del vocabulary[END]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<stop>", "pad_token": null, "unk_token": null}'
    )
    tokenizer = open_tokenizer(f"hf:{folder}")
    assert tokenizer.token(tokenizer.eod) == "<stop>"
    tokenizer.save(folder)
    assert open_tokenizer(f"hf:{folder}").eod == open_tokenizer(str(folder / "tokenizer.json")).eod == tokenizer.eod


def test_a_folder_is_named_by_its_path_or_as_hf(folder):
    bare, named = (open_tokenizer(f"{prefix}{folder}") for prefix in ("", "hf:"))
    assert bare.encode("ba 12") == named.encode("ba 12") == [256, 220, 16, 17]
    assert folder_of(str(folder)) == folder_of(f"hf:{folder}") == folder_of(f"hf:{folder}/vocab.json") == folder


def test_a_path_may_have_colons(folder, tmp_path):
    moved = folder.rename(tmp_path / "1:2")
    assert (
        same_path(f"hf:{moved}", str(moved)) and folder_of(f"hf:{moved}/vocab.json") == folder_of(str(moved)) == moved
    )
    assert open_tokenizer(f"hf:{moved}").encode("ba 12") == open_tokenizer(str(moved)).encode("ba 12")


def test_settings_are_part_of_its_identity(folder):
    before = digest_of(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({**QWEN2, "add_prefix_space": True}))
    assert digest_of(str(folder)) != before


def test_gpt2s_files_alone_are_still_gpt2s(tmp_path):
    write_vocabulary(tmp_path, "byte level")
    for name in (f"gpt2:{tmp_path}", str(tmp_path)):
        assert open_tokenizer(name).encode("ba 12") == [256, 263]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"tokenizer_class": "XLNetTokenizer"}},
            "the tokenizer_class XLNetTokenizer of its tokenizer_config.json is not one",
        ),
        (
            {"tokenizer_config": {}, "config": {"model_type": "llama", "tokenizer_class": "CTRLTokenizer"}},
            "CTRLTokenizer of its config.json",
        ),
        ({"tokenizer_config": QWEN2, "config": {"model_type": "falcon"}}, "the model_type 'falcon' of its config.json"),
        (
            {"tokenizer_config": {**QWEN2, "auto_map": {"AutoTokenizer": ["t.T", None]}}},
            "has auto_map, which mtjax does not",
        ),
        ({"tokenizer_config": {**QWEN2, "split_special_tokens": True}}, "has split_special_tokens"),
        ({"tokenizer_config": {**QWEN2, "eos_token": {"content": "x"}}}, "eos_token is .*, and must be a token"),
        ({"tokenizer_config": QWEN2, "tekken": {}}, "has tekken.json besides vocab.json and merges.txt"),
    ],
)
def test_what_would_be_read_in_another_way_is_refused(folder, files, message):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{message}.*AutoTokenizer\.from_pretrained\('{folder}'\)\.save_pretrained"):
        open_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", None, "has neither tokenizer.json nor merges.txt, from which a Qwen2Tokenizer is read"),
        ("merges.txt", "a b c\n", "the Qwen2Tokenizer of .* can't be built"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json should be a JSON object"),
        ("added_tokens.json", '{"<X>": "first"}', "the special tokens of .* can't be read"),
    ],
)
def test_damaged_folders(tmp_path, name, content, message):
    folder = write_pretrained(tmp_path, "qwen2 as of old")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        open_tokenizer(str(folder))


def test_gpt2_is_not_what_another_class_reads(folder):
    with pytest.raises(UserError, match=f"gpt2:{folder} is for GPT-2's vocabulary.*Qwen2Tokenizer: say hf:{folder}"):
        open_tokenizer(f"gpt2:{folder}")


def test_a_bert_vocabulary_without_its_unknown_token(tmp_path):
    write_pretrained(tmp_path, "bert")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\nba\n")
    with pytest.raises(UserError, match=r"vocab\.txt is not a BERT vocabulary: it has no \[UNK\]"):
        open_tokenizer(str(tmp_path))


def test_what_is_not_a_sentencepiece_model(tmp_path):
    pytest.importorskip("sentencepiece", reason="needs the extra data: pip install '.[data]'")
    write_pretrained(tmp_path, "llama")
    for content in (b"\xff\xff\xff", b""):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.model is not a SentencePiece model"):
            open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["hf:{folder}", "bert:{folder}/../vocab.txt"])
def test_half_a_surrogate_pair_has_no_tokens(folder: Path, name: str):
    write_vocabulary(folder.parent, "bert")
    tokenizer = open_tokenizer(name.format(folder=folder))
    half = r"a text has the lone surrogate \\ud83d at character 3, which isn't text"
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_marked):
        with pytest.raises(UserError, match=half):
            encode("ba \ud83d")
    with pytest.raises(UserError, match=half):
        tokenizer.encode_batch(["ba", "ba \ud83d"])
    for marked in (True, False):
        with pytest.raises(UserError, match=half):
            tokenizer.encode_offsets("ba \ud83d", marked=marked)
