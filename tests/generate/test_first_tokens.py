"""The tokens before a text, by tokenizer, its settings, and the model's config."""

import json
from pathlib import Path

import pytest

from mtjax.data.tokens.pretrained_settings import special_names_in
from mtjax.data.tokens.special_tokens import added_tokens, named_token
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.generate.first_tokens import first_tokens
from tests.convert.hf_folders import llama_tokenizer, small_tokenizer


def opened(folder: Path, front: str, back: str = "") -> Tokenizer:
    llama_tokenizer(front, back).save(str(folder / "tokenizer.json"))
    return open_tokenizer(str(folder / "tokenizer.json"))


def test_added_tokens_are_found_on_both_sides(tmp_path) -> None:
    for front, back, expected in (("", "", ([], [])), ("<s>", "", ([1], [])), ("<s> <s>", "</s>", ([1, 1], [2]))):
        assert added_tokens(opened(tmp_path, front, back)) == expected


def test_first_tokens_by_tokenizer_settings_and_config(tmp_path) -> None:
    assert first_tokens(opened(tmp_path, "<s>", "</s>"), {}, {"bos_token_id": 2}) == [1]
    bare = opened(tmp_path, "", "</s>")
    assert (
        first_tokens(bare, special_names_in(tmp_path), {}) == first_tokens(bare, {}, {}) == [2]
    )  # the end of a document
    assert first_tokens(bare, special_names_in(tmp_path), {"bos_token_id": 1}) == [1]
    for ordinary in (7, 10**9, -1, None, True, [1]):  # no special token
        assert first_tokens(bare, special_names_in(tmp_path), {"bos_token_id": ordinary}) == [2]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert first_tokens(bare, special_names_in(tmp_path), {"bos_token_id": 2}) == [1]
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>"}))
    assert first_tokens(bare, special_names_in(tmp_path), {"bos_token_id": 1}) == [2]


@pytest.mark.torch
@pytest.mark.parametrize(
    "settings",
    [{}, {"bos_token": "</s>"}, {"bos_token": "</s>", "added_tokens_decoder": {}}, {"added_tokens_decoder": {}}],
)
def test_settings_in_two_files_are_read_as_transformers_reads_them(tmp_path, settings) -> None:
    transformers = pytest.importorskip("transformers")
    ours = opened(tmp_path, "", "</s>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert named_token(ours, tmp_path, "bos_token") == theirs.bos_token_id


def test_gpt2_uses_the_end_of_document_token(tmp_path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert added_tokens(tokenizer) == ([], [])
    assert first_tokens(tokenizer, special_names_in(tmp_path), {"bos_token_id": 0, "eos_token_id": 0}) == [
        tokenizer.eod
    ]
    assert first_tokens(tokenizer, special_names_in(tmp_path), {"bos_token_id": 7}) == [tokenizer.eod]
