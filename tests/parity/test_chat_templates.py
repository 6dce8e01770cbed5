"""Chat templates against transformers' `apply_chat_template`: texts, tokens, and which are trained on."""

import json
from datetime import datetime
from typing import Any

import pytest

from mtjax.data.tokens.tokenizer import FastTokenizer, open_tokenizer
from mtjax.finetune.chat_encoding import ChatEncoder
from mtjax.finetune.chat_rows import chat_of
from mtjax.generate import chat_environment
from mtjax.generate.chat import ChatTemplate, TemplateInputs
from tests import chat_templates as chats

transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
CONVERSATIONS = {
    name: getattr(chats, name) for name in ("SINGLE", "TWO", "WITH_SYSTEM", "THOUGHTS", "REASONING", "WITH_CALL")
}
INPUTS = {
    "plain": {},
    "tools": {"tools": [chats.TOOL, chats.TOOL], "documents": [{"title": "é", "text": "<b>"}]},
    "variables": {"enable_thinking": False, "date_string": "1 Jan 2000", "more": [1, None], "eos_token": "<|im_end|>"},
}


class Noon(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> "Noon":
        return cls(2026, 3, 4, 12)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(chat_environment, "datetime", Noon)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Noon)


@pytest.fixture(scope="module")
def theirs():
    return transformers.PreTrainedTokenizerFast(tokenizer_object=chats.byte_level_tokenizer(), **SPECIAL)


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_texts_are_those_of_apply_chat_template(name, given, theirs):
    """Also that what one refuses, the other refuses, for the same reason."""
    template, refused = ChatTemplate(chats.TEMPLATES[name], SPECIAL, "a test"), 0
    variables = {key: value for key, value in INPUTS[given].items() if key not in ("tools", "documents")}
    inputs = TemplateInputs(INPUTS[given].get("tools"), INPUTS[given].get("documents"), variables)
    for messages in CONVERSATIONS.values():
        for prompted in (False, True):
            how = {"chat_template": chats.TEMPLATES[name], "tokenize": False, "add_generation_prompt": prompted}
            try:
                expected = theirs.apply_chat_template(messages, **how, **INPUTS[given])
            except Exception as e:
                with pytest.raises(Exception, match="rejects this conversation") as ours:
                    template.render(messages, inputs, to_be_answered=prompted)
                assert str(e) in str(ours.value)
                refused += 1
            else:
                assert template.render(messages, inputs, to_be_answered=prompted) == expected
    assert refused < 2 * len(CONVERSATIONS)


@pytest.mark.parametrize("name", ["generation", "generation without the end"])
@pytest.mark.parametrize("conversation", ["SINGLE", "TWO", "WITH_SYSTEM", "THOUGHTS", "WITH_CALL"])
def test_tokens_in_generation_blocks_are_trained_on(name, conversation, theirs):
    messages = CONVERSATIONS[conversation]
    expected = theirs.apply_chat_template(
        messages, chat_template=chats.TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    encoder = ChatEncoder(
        FastTokenizer(chats.byte_level_tokenizer(), "a test"), ChatTemplate(chats.TEMPLATES[name], SPECIAL, "a test")
    )
    (written,), remarks = encoder.samples(chat_of({"messages": messages}))
    assert written.ids.tolist() == expected["input_ids"]
    assert written.trained.astype(int).tolist() == expected["assistant_masks"]
    assert any("is not trained to stop" in remark for remark in remarks) == (name != "generation")


@pytest.mark.parametrize("name", ["chatml", "llama3", "phi3"])
def test_templates_that_keep_what_they_wrote_give_one_sample(name, theirs):
    template = chats.TEMPLATES[name]
    expected = theirs.apply_chat_template(chats.WITH_SYSTEM, chat_template=template, return_dict=False)
    encoder = ChatEncoder(
        FastTokenizer(chats.byte_level_tokenizer(), "a test"), ChatTemplate(template, SPECIAL, "a test")
    )
    (written,), _ = encoder.samples(chat_of({"messages": chats.WITH_SYSTEM}))
    assert written.ids.tolist() == expected


@pytest.mark.parametrize("kind", ["a list", "files"])
def test_named_templates_and_special_tokens_of_a_folder(kind, tmp_path):
    chats.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    texts = {
        "default": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ image_token }}",
        "tool_use": "T{{ tools | length }}",
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<s>"}
    if kind == "a list":
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        settings |= {"unk_token": None, "image_token": "<|im_end|>"}
    else:
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
        settings["chat_template"] = "overridden by the file"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = ChatTemplate.of(tmp_path)
    assert ours is not None
    for tools in (None, [], [chats.TOOL]):
        expected = theirs.apply_chat_template(chats.SINGLE, tokenize=False, tools=tools)
        assert ours.render(chats.SINGLE, TemplateInputs(tools), to_be_answered=False) == expected


def test_a_completion_that_goes_on_from_its_prompt_has_the_tokens_of_the_joined_text(tmp_path):
    """With a tokenizer that marks beginnings of words, where two parts encoded one by one would have two spaces."""
    library = chats.metaspace_tokenizer()
    library.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)
    encoder = ChatEncoder(open_tokenizer(f"hf:{tmp_path / 'tokenizer.json'}"), None)
    for prompt, completion in (("the cat and", " the dog"), ("the cat and ", "the dog"), ("the c", "at and")):
        (written,), remarks = encoder.samples(chat_of({"prompt": prompt, "completion": completion}))
        encoded = theirs(prompt + completion, return_offsets_mapping=True)
        assert written.ids.tolist() == [*encoded["input_ids"], theirs.eos_token_id]
        overlaps = [end > len(prompt) for _, end in encoded["offset_mapping"]]
        assert written.trained.tolist() == [*overlaps, True]
        is_apart = encoded["input_ids"][: overlaps.index(True)] == theirs(prompt)["input_ids"]
        assert bool(remarks) != is_apart
