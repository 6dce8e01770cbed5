"""The tokens that stand in front of a text, by tokenizer, its settings, and the model's config."""

import json
from pathlib import Path

import pytest

from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.generate.first_tokens import added_tokens, first_tokens, named_token
from tests.convert.hf_folders import llama_tokenizer, small_tokenizer


def opened(folder: Path, front: str, back: str = "") -> Tokenizer:
    llama_tokenizer(front, back).save(str(folder / "tokenizer.json"))
    return open_tokenizer(str(folder / "tokenizer.json"))


def test_what_is_added_is_found_on_both_sides(tmp_path) -> None:
    for front, back, expected in (("", "", ([], [])), ("<s>", "", ([1], [])), ("<s> <s>", "</s>", ([1, 1], [2]))):
        assert added_tokens(opened(tmp_path, front, back)) == expected


def test_a_text_begins_with_what_is_known_of_it(tmp_path) -> None:
    assert first_tokens(opened(tmp_path, "<s>", "</s>"), tmp_path, {"bos_token_id": 2}) == [1]
    bare = opened(tmp_path, "", "</s>")
    assert first_tokens(bare, tmp_path, {}) == first_tokens(bare, None, {}) == [2]  # the end of a document
    assert first_tokens(bare, tmp_path, {"bos_token_id": 1}) == [1]
    for ordinary in (7, 10**9, -1, None, True, [1]):  # no special token
        assert first_tokens(bare, tmp_path, {"bos_token_id": ordinary}) == [2]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert first_tokens(bare, tmp_path, {"bos_token_id": 2}) == [1]
    # The settings of newer folders hold all tokens; in older ones special_tokens_map.json has precedence.
    for newer, expected in (({}, [1]), ({"added_tokens_decoder": {}}, [2])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>"} | newer))
        assert first_tokens(bare, tmp_path, {"bos_token_id": 1 if expected == [2] else 2}) == expected


@pytest.mark.torch
@pytest.mark.parametrize("newer", [{}, {"added_tokens_decoder": {}}])
def test_the_name_of_a_special_token_is_read_as_transformers_reads_it(newer, tmp_path) -> None:
    tokenizer = opened(tmp_path, "", "</s>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | newer))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert named_token(tokenizer, tmp_path, "bos_token") == theirs.bos_token_id
    assert named_token(tokenizer, tmp_path, "eos_token") == theirs.eos_token_id


def test_a_gpt_2_keeps_the_end_of_a_document(tmp_path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert added_tokens(tokenizer) == ([], [])
    assert first_tokens(tokenizer, tmp_path, {"bos_token_id": 0, "eos_token_id": 0}) == [tokenizer.eod]
    assert first_tokens(tokenizer, tmp_path, {"bos_token_id": 7}) == [tokenizer.eod]
