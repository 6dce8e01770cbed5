"""What an exported config.json says of a tokenizer of our own: for each family what transformers has a place for."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

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


def llama_like(ends: str = "") -> Tokenizer:
    """One that puts <s> before a prompt, and something behind it."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>", "<|endoftext|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"<s> $A {ends}".strip(), special_tokens=special)
    return tokenizer


def exported(folder, tokenizer: Tokenizer | None, base: dict | None = None, **settings) -> dict:
    """The ids in the config.json of an exported run with zeros for weights; `base` came with its first ones."""
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    target = folder / "hf"
    target.mkdir()
    config = tiny_config(num_layers=1, **settings)
    parameters = parameters_of(config)
    sink = HuggingFaceSink(target, Origin(config, "float32", folder, base or {}), parameters)
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


def test_a_decoder_s_texts_begin_with_what_its_tokenizer_puts_there(tmp_path):
    tokenizer = llama_like()
    begin = tokenizer.encode("a").ids[0]
    assert exported(tmp_path, tokenizer, family="llama") == {"bos_token_id": begin, "eos_token_id": 0}
    said = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert (said["bos_token"], said["eos_token"]) == ("<s>", "<|endoftext|>")


def test_the_tokenizer_s_own_file_says_what_begins_and_pads(tmp_path):
    tokenizer = llama_like()
    said = {"bos_token": {"content": "</s>"}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    begin, pad = (tokenizer.token_to_id(name) for name in ("</s>", "<pad>"))
    expected = {"bos_token_id": begin, "eos_token_id": begin, "pad_token_id": pad}
    assert exported(tmp_path, tokenizer, family="llama") == expected
    assert json.loads((tmp_path / "hf/tokenizer_config.json").read_text()) == said


@pytest.mark.parametrize("kind", ["llama", "a_type_of_another_name"])
def test_the_ids_of_the_first_weights_stay(tmp_path, kind):
    base = {"model_type": kind, "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 9}
    expected = {name: base[name] for name in IDS[:3]}
    assert exported(tmp_path, llama_like(), base, family="llama") == expected


CLASSIFIER = {"family": "llama", "head": "classification", "num_labels": 2}
OURS, EARLIER = {}, {"model_type": "llama", "eos_token_id": 0}


@pytest.mark.parametrize(
    ("ends", "base", "pad"),
    [
        ("", OURS, 0),  # rows never end with the end of a document: what follows it is padding
        ("<|endoftext|>", OURS, None),
        ("", EARLIER, None),
        ("", EARLIER | {"pad_token_id": None}, None),
        ("", EARLIER | {"pad_token_id": 5}, 5),
        ("", EARLIER | {"pad_token_id": 0}, 0),
        ("<|endoftext|>", EARLIER | {"pad_token_id": 0}, None),
    ],
)
def test_padding_of_a_classifier_is_nothing_that_its_rows_end_with(tmp_path, ends, base, pad):
    assert exported(tmp_path, llama_like(ends), base, **CLASSIFIER)["pad_token_id"] == pad


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
