"""Conversations from JSON lines: `messages`, or a `prompt` and its `completion`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import read_lines
from mtjax.errors import shortened
from mtjax.finetune.rows import Examples, json_objects
from mtjax.generate.chat import Message

ASSISTANT = "assistant"
"""The role whose messages are learnt."""


@dataclass(frozen=True)
class Chat:
    """A conversation, or a text to be continued and what shall follow."""

    messages: tuple[Message, ...] = ()
    """With an assistant's among them; empty where it is a text."""
    prompt: str = ""
    completion: str = ""
    line: int = field(default=0, compare=False)
    """In its file, from 1."""


def read_chats(path: Path) -> Examples:
    """The conversations of a file.

    Raises:
      UserError: it can't be read, or most rows are bad.
    """
    chats: Examples = Examples(path)
    for number, row in json_objects(read_lines(path)):
        chat = row if isinstance(row, str) else _chat(row, number)
        if isinstance(chat, str):
            chats.bad.append(f"line {number} {chat}")
        else:
            chats.rows.append(chat)
    return chats.check()


def _chat(row: dict[str, Any], line: int) -> Chat | str:
    """A row's conversation, or what is wrong with it."""
    if "messages" not in row:
        texts = [row.get(name) for name in ("prompt", "completion")]
        if not all(isinstance(text, str) for text in texts):
            named = shortened(", ".join(row), 60)
            return f"has neither messages nor a prompt and its completion (its fields are {named or 'none'})"
        prompt, completion = map(str, texts)
        return (
            Chat(prompt=prompt, completion=completion, line=line) if completion.strip() else "has an empty completion"
        )
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return "has messages that are not a list"
    for place, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message without a role, number {place}"
        if not isinstance(message.get("content"), str):
            return f"has a message whose content is not text, number {place}"
    answers = [message["content"] for message in messages if message["role"] == ASSISTANT]
    if not answers:
        return f"has no message of the {ASSISTANT}"
    if not all(answer.strip() for answer in answers):
        return "has an empty answer"
    return Chat(tuple(messages), line=line)
