"""What an exported config.json says of a tokenizer of our own: for each family what transformers has a place for."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mtjax.convert.hugging_face import HuggingFaceSink
from mtjax.convert.parameters import parameters_of
from mtjax.convert.stream import Origin
from mtjax.convert.table import VOCAB
from tests.convert.hf_folders import small_tokenizer
from tests.tiny import VOCAB as TOKENS
from tests.tiny import tiny_config

pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

WORD_PIECES = {"[PAD]": 3, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, "cat": 104}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(WORD_PIECES, unk_token="[UNK]"))
    tokenizer.add_special_tokens([name for name in WORD_PIECES if name.startswith("[")])
    return tokenizer


def exported(folder, tokenizer: Tokenizer | None, **settings) -> dict:
    """The config.json of an exported run with zeros for weights."""
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    target = folder / "hf"
    target.mkdir()
    config = tiny_config(num_layers=1, **settings)
    parameters = parameters_of(config)
    sink = HuggingFaceSink(target, Origin(config, "float32", folder), parameters)
    for parameter in parameters.values():
        shape = [TOKENS if axis == VOCAB else size for axis, size in parameter.sizes.items()]
        for layer in parameter.layers:
            sink.write(parameter, layer, np.zeros(shape, np.float32))
    sink.close()
    config_json = json.loads((target / "config.json").read_text())
    return {name: config_json[name] for name in IDS if name in config_json}


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_nothing_begins_or_ends_a_text_of_bert(tmp_path, placement):
    assert exported(tmp_path, word_pieces(), family="bert", norm_placement=placement) == {"pad_token_id": 3}


def test_t5_starts_and_ends_as_its_samples_do(tmp_path):
    expected = {"decoder_start_token_id": 101, "eos_token_id": 102, "pad_token_id": 3}
    assert exported(tmp_path, word_pieces(), family="t5") == expected


def test_t5_without_a_tokenizer_has_the_first_one_s_ids(tmp_path):
    expected = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    assert exported(tmp_path, None, family="t5") == expected


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_one_token_stands_between_the_texts_of_a_decoder(tmp_path, family):
    assert exported(tmp_path, small_tokenizer(), family=family) == {"bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.torch
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_bert_s_are_those_of_transformers_own_config(tmp_path, placement):
    transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
    pieces = {name: {"[PAD]": 0}.get(name, index) for name, index in WORD_PIECES.items()}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.add_special_tokens([name for name in pieces if name.startswith("[")])
    exported(tmp_path, tokenizer, family="bert", norm_placement=placement)
    found = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    expected = type(found)()
    assert (
        [getattr(found, name) for name in IDS[:3]] == [getattr(expected, name) for name in IDS[:3]] == [None, None, 0]
    )
