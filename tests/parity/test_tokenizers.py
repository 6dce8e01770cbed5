"""Tokenizers of Hugging Face folders without a tokenizer.json: ids and texts are those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.config import Config
from mtjax.convert.stream import Origin, carry_tokenizer
from mtjax.data.tokens.pretrained_settings import BACKEND, CLASS_OF_MODEL, OVERRULED
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.generate.chat import ChatTemplate
from tests.data.corpora import texts
from tests.data.tokens.pretrained_folders import CASES, MARKED_TEXTS, NAMES, PLAIN_TEXTS, T5, write_pretrained

transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PIECES = st.one_of(st.text(max_size=8), st.sampled_from([*NAMES, " ", "  ", "\n", "ba", " ke", "12", "\u65e5\u672c"]))


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[Any, Tokenizer]:
    """transformers' tokenizer of a folder, and ours."""
    folder = write_pretrained(tmp_path_factory.mktemp("tokenizer"), request.param)
    return transformers.AutoTokenizer.from_pretrained(str(folder)), open_tokenizer(str(folder))


def assert_same(theirs: Any, ours: Tokenizer, text: str) -> None:
    marked = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode_marked(text) == marked
    if not any(name in text for name in theirs.added_tokens_encoder):
        assert ours.encode(text) == marked
        assert ours.encode_prompt(text) == theirs(text).input_ids
    assert ours.decode(marked) == theirs.decode(marked)


def test_given_texts(pair):
    theirs, ours = pair
    for text in (*PLAIN_TEXTS, *MARKED_TEXTS):
        assert_same(theirs, ours, text)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    every = list(range(ours.vocab_size))
    assert [ours.token(i) for i in every] == theirs.convert_ids_to_tokens(every)
    for name in theirs.all_special_tokens:
        assert ours.special(name) == theirs.convert_tokens_to_ids(name)


@given(pieces=st.lists(PIECES, max_size=6))
@settings(max_examples=40, derandomize=True)
def test_random_texts(pair, pieces):
    assert_same(*pair, "".join(pieces))


def test_a_trained_unigram_model_with_its_normalization(tmp_path):
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(texts(300)))
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "spiece"), vocab_size=60, minloglevel=2, **ids
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**T5, "eos_token": "</s>"}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(tmp_path)), open_tokenizer(str(tmp_path))
    for text in (*PLAIN_TEXTS, *MARKED_TEXTS, *texts(20, seed=1)):
        assert_same(theirs, ours, text)


def test_what_is_carried_into_another_folder_is_read_alike(pair, tmp_path):
    """transformers reads a converted folder's tokenizer.json as it read the folder without it."""
    theirs, _ = pair
    source = Path(theirs.name_or_path)
    (tmp_path / "copy").mkdir()
    assert "tokenizer.json" in carry_tokenizer(Origin(Config(), "float32", source), tmp_path / "copy")
    if (source / "config.json").is_file():
        shutil.copyfile(source / "config.json", tmp_path / "copy/config.json")
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "copy"))
    for text in (*PLAIN_TEXTS, *MARKED_TEXTS):
        assert again(text).input_ids == theirs(text).input_ids


CHATS = {
    "llama": "{% for m in messages %}{{ bos_token if m.role == 'user' }}[{{ m.content }}]{{ eos_token }}{% endfor %}",
    "qwen2": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
}


@pytest.mark.parametrize("case", CHATS)
def test_special_tokens_of_a_chat_template_are_single_ids(tmp_path, case):
    pytest.importorskip("jinja2")
    folder = write_pretrained(tmp_path, case)
    (folder / "chat_template.jinja").write_text(CHATS[case])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), open_tokenizer(str(folder))
    messages = [{"role": "user", "content": "ba 12"}, {"role": "assistant", "content": " ke "}]
    template = ChatTemplate.of(folder)
    assert template is not None
    ids = ours.encode_marked(template.render(messages, to_be_answered=False))
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert theirs.eos_token_id in ids


def test_classes_of_models_are_those_that_transformers_registers():
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    general = {BACKEND, "MistralCommonBackend"}
    for model_type, kind in CLASS_OF_MODEL.items():
        theirs = auto.TOKENIZER_MAPPING_NAMES.get(model_type)
        assert theirs == kind or {theirs, kind} <= general, model_type
        overruled = model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS or kind == BACKEND
        assert overruled == (model_type in OVERRULED), model_type
