"""Fields of chat requests that reach the chat template, and those that are rejected instead of ignored."""

from typing import Any

import pytest

from mtjax.finetune.chat_encoding import ChatEncoder
from mtjax.finetune.chat_rows import chat_of
from mtjax.generate.chat import ChatTemplate, TemplateInputs
from tests.chat_templates import CALL, CHATML, TEMPLATES, TOOL, TWO, WITH_CALL, assistant, user
from tests.serve.asking import ask

CHAT = "/v1/chat/completions"


@pytest.fixture
def template(live, monkeypatch):
    """Replaces the server's template."""

    def use(name: str) -> ChatTemplate:
        template = ChatTemplate(TEMPLATES.get(name, name), {"bos_token": "", "eos_token": ""}, "a test")
        monkeypatch.setattr(live.service.tokens, "template", template)
        return template

    return use


def written(live: Any, **fields: Any) -> str:
    """Returns the prompt that the server encodes for a chat request."""
    status, answer = ask(live, "POST", "/tokenize", fields)
    assert status == 200, answer
    return live.service.tokens.decoder.decode(answer["tokens"])


def refused(live: Any, **fields: Any) -> tuple[str, str]:
    """Returns the invalid field and the error message."""
    status, answer = ask(live, "POST", CHAT, {"messages": [user("the cat")], "max_tokens": 1} | fields)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


def test_tools_documents_and_variables_reach_the_template(live, template) -> None:
    everything = template("{{ tools | tojson }}{{ documents | tojson }}{{ more }}{{ messages | tojson }}")
    given: dict[str, Any] = {"tools": [TOOL], "documents": [{"text": "<é>"}], "chat_template_kwargs": {"more": 3}}
    expected = everything.render(TWO[:3], TemplateInputs([TOOL], [{"text": "<é>"}], {"more": 3}))
    assert written(live, messages=TWO[:3], **given) == expected and '"text": "<é>"' in expected
    assert written(live, messages=[user("a")], tools=[TOOL], tool_choice="none").startswith("nullnull")
    assert ask(live, "POST", CHAT, {"messages": [user("a")], "max_tokens": 1, "tool_choice": "auto"})[0] == 200


def test_generation_prompt_equals_that_of_training(live, template) -> None:
    """With a template that drops reasoning, and with tool calls in between."""
    qwen = template("qwen3")
    messages = [*TWO[:2], user("and"), assistant("b", reasoning_content="a"), *WITH_CALL]
    samples, _ = ChatEncoder(live.service.tokens.decoder, qwen).samples(
        chat_of({"messages": messages, "tools": [TOOL]})
    )
    for place in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        ids = ask(live, "POST", "/tokenize", {"messages": messages[:place], "tools": [TOOL]})[1]["tokens"]
        assert any(s.ids[: len(ids)].tolist() == ids and s.trained[len(ids)] for s in samples)


def test_keys_of_messages(live, template) -> None:
    dump = template("{% for m in messages %}{{ m | tojson }}{{ m.tool_calls or m.extra }}{% endfor %}")
    call = {
        **assistant(None, tool_calls=[CALL]),
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    named = user("a") | {"name": "Zoë", "extra": 1}
    assert written(live, messages=[named, call]) == dump.render([named, assistant(None, tool_calls=[CALL])])
    parts = user([{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}])  # type: ignore[arg-type]
    assert '"content": "the cat"' in written(
        live, messages=[parts, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    )
    template(CHATML)
    for key, value, why in (
        ("bogus", 3, "messages[0] has an unknown field 'bogus'"),
        ("nam", "x", "messages[0] has an unknown field 'nam' - did you mean 'name'?"),
        ("prefix", True, "messages[0] has an unknown field 'prefix'"),
        ("weight", 0, "messages[0] has an unknown field 'weight'"),
        ("tool_calls", [CALL], "messages[0] has tool_calls, and this model's chat_template does not use it: remove it"),
        ("refusal", "no", "messages[0] has refusal, and this model's chat_template does not use it: remove it"),
    ):
        message = {**assistant("the cat"), key: value}
        assert refused(live, messages=[message])[1].startswith(why)
        status, answer = ask(live, "POST", "/tokenize", {"messages": [message]})
        assert status == 400 and answer["error"]["message"].startswith(why)


def test_inputs_that_the_template_ignores_are_rejected(live, template) -> None:
    template(CHATML)
    assert refused(live, tools=[TOOL]) == ("tools", "the chat_template of a test does not use tools: remove it")
    assert refused(live, documents=[{"text": "x"}])[0] == "documents"
    assert "does not use enable_thinking" in refused(live, chat_template_kwargs={"enable_thinking": False})[1]
    assert "must be a list of objects" in refused(live, tools=["x"])[1]
    assert refused(live, tools=[TOOL], tool_choice="required")[0] == "tool_choice"
    assert refused(live, functions=[TOOL])[0] == "functions"
    template("{% for m in messages %}{{ m.name }}{% endfor %}")
    assert "half of a surrogate pair" in refused(live, messages=[user("a") | {"name": "\ud83d"}])[1]
    assert ask(live, "POST", "/tokenize", {"prompt": "a", "tools": [TOOL]})[0] == 400
