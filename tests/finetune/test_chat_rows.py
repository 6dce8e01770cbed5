"""Rows of conversations: which fields have an effect, and which are refused rather than ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtjax.errors import UserError
from mtjax.finetune.chat_rows import Chat, chat_of, read_chats
from mtjax.generate.chat import TemplateInputs
from tests.chat_templates import CALL, SINGLE, TOOL, TWO, WITH_CALL, assistant, user

GOOD: dict[str, Any] = {"messages": SINGLE}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_bad_rows_are_counted_and_named(tmp_path):
    bad = ["[]", {"text": "a"}, {"messages": []}, {"messages": [user("a")]}, {"messages": [{"role": "user"}]}]
    bad += [{"messages": [user("a"), assistant(" ")]}, {"prompt": "a", "completion": ""}]
    good = [GOOD, {"prompt": "a", "completion": "b", "id": 1}] * 4
    chats = read_chats(write(tmp_path / "chats.jsonl", [*good, *bad]))
    assert chats.rows[:2] == [Chat(tuple(SINGLE)), Chat(prompt="a", completion="b")]
    assert (chats.rows[1].line, chats.rows[1].file) == (2, str(tmp_path / "chats.jsonl"))
    assert [reason.partition(" (")[0] for reason in chats.bad] == [
        "line 9 is not a JSON object",
        "line 10 has neither messages nor a prompt and its completion, both as text or both as lists of messages",
        "line 11 has messages that are not a list",
        "line 12 has no message of the assistant",
        "line 13 has content that is not text in message 1",
        "line 14 has an empty answer",
        "line 15 has an empty completion",
    ]
    with pytest.raises(UserError, match="7 of 7 rows .* are skipped.*the file of another task"):
        read_chats(write(tmp_path / "chats.jsonl", bad))


def test_fields_that_are_not_used_are_listed_once(tmp_path):
    rows = [GOOD | {"id": 1, "source": "a"}, GOOD | {"id": 2, "prompt": "the cat?"}, GOOD | {"score": None}]
    chats = read_chats(write(tmp_path / "chats.jsonl", rows))
    assert chats.notes == [
        f"unused fields in {tmp_path / 'chats.jsonl'}: id (2 rows), prompt (1 rows), source (1 rows)"
    ]
    assert read_chats(write(tmp_path / "chats.jsonl", [GOOD | {"tools": [TOOL]}] * 2)).notes == []


def test_which_messages_are_trained_on():
    def trained(*marks: dict[str, Any]) -> list[int]:
        return chat_of({"messages": [m | mark for m, mark in zip(TWO, marks, strict=True)]}).trained

    assert chat_of({"messages": TWO}).trained == trained({}, {}, {}, {"weight": None}) == [1, 3]
    assert trained({}, {"weight": 0}, {}, {"weight": 1}) == trained({}, {"train": False}, {}, {"train": True}) == [3]
    assert trained({"train": False}, {}, {"weight": 0}, {"weight": 0.0}) == [1]
    assert chat_of({"prompt": TWO[:3], "completion": TWO[3:]}).trained == [3]
    assert chat_of({"prompt": TWO[:1], "completion": TWO[1:]}).trained == [1, 3]
    # An answer that is not trained on may be empty; one with a call may have no content.
    assert chat_of({"messages": [user("a"), assistant("") | {"weight": 0}, user("b"), assistant("c")]}).trained == [3]
    assert chat_of({"messages": WITH_CALL}).trained == [1, 3]


def test_what_the_template_reads_is_kept():
    given = {"tools": [TOOL], "documents": [{"text": "a"}], "chat_template_kwargs": {"enable_thinking": False}}
    chat = chat_of({"messages": WITH_CALL} | given)
    assert chat.inputs == TemplateInputs([TOOL], [{"text": "a"}], {"enable_thinking": False})
    assert chat.messages == tuple(WITH_CALL)
    assert chat_of(GOOD | {"tools": json.dumps([TOOL])}).inputs.tools == [TOOL]
    assert chat_of(GOOD | {"tools": None}).inputs == TemplateInputs()
    marked = [user("a"), assistant("b", weight=1, train=True, reasoning_content="c", tool_calls=[CALL], extra=3)]
    kept = {key: value for key, value in marked[1].items() if key not in ("weight", "train")}
    assert chat_of({"messages": marked}).messages == (user("a"), kept)


def answered(**more: Any) -> dict[str, Any]:
    """A row whose answer has these keys."""
    return {"messages": [user("a"), assistant("b") | more]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (answered(weight=2), "has weight 2 in message 2, but it must be 0 or 1"),
        (answered(weight=0.5), "has weight 0.5 in message 2"),
        (answered(weight=True), "has weight True in message 2"),
        (answered(train="yes"), "has train yes in message 2, but it must be true or false"),
        (answered(weight=0, train=True), "has weight 0 and train true in message 2: remove one of them"),
        (answered(weight=0), "has no message to train on"),
        (answered(train_detail=[]), "has train_detail in message 2, which is not supported"),
        (answered(loss=False), "has loss in message 2, which is not supported"),
        (
            {"messages": [user("a") | {"train": True}, assistant("b")]},
            "has train true in message 1, of the user: only the",
        ),
        ({"messages": [user("a") | {"weight": 1}, assistant("b")]}, "has weight 1 in message 1, of the user: only the"),
        (GOOD | {"tools": 3}, "has an invalid field: tools is 3, and must be a list of objects"),
        (GOOD | {"tools": "x"}, "tools is x, and must be a list of objects"),
        (GOOD | {"documents": ["x"]}, "documents is .*, and must be a list of objects"),
        (GOOD | {"chat_template_kwargs": []}, "chat_template_kwargs is .*, and must be an object"),
        (GOOD | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools, which can't be set there"),
        (GOOD | {"completion": "b"}, "has both messages and a completion"),
        (GOOD | {"images": ["a.png"]}, r"has images \['a.png'\], but only text is trained on"),
        (GOOD | {"system": "be kind"}, "has system be kind, but it must be a message"),
        (GOOD | {"functions": [TOOL]}, "has functions .*, but functions must be given as tools"),
        (GOOD | {"weight": 0.5}, "has weight 0.5, but weights of rows are not supported"),
        ({"prompt": "a", "completion": "b", "label": False}, "has a boolean label, as in preference"),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "has tools, but a prompt that is text is not rendered"),
        ({"prompt": [user("a")], "completion": "b"}, "has neither messages nor a prompt and its completion"),
        ({"prompt": SINGLE, "completion": [user("a")]}, "has no message of the assistant in its completion"),
    ],
)
def test_what_has_no_effect_here_is_refused_by_name(row, message):
    with pytest.raises(UserError, match=message):
        chat_of(row)


def test_values_that_ask_for_nothing_are_taken():
    assert chat_of(GOOD | {"images": [], "system": "", "functions": None, "weight": 1, "label": "news"})
