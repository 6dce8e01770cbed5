"""Conversations from JSON lines: `messages`, or a `prompt` and its `completion`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import read_lines
from mtjax.errors import UserError, shortened
from mtjax.finetune.rows import Examples, json_objects
from mtjax.generate.chat import REASONING, Message, TemplateInputs

ASSISTANT = "assistant"
"""The role whose messages are trained on."""
KNOWN = ("messages", "prompt", "completion", "tools", "documents", "chat_template_kwargs")
"""Fields of a row that have an effect."""
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), ("only text is trained on", ([],))),
    **dict.fromkeys(("weight", "loss_weight"), ("rows have no weight: give one to messages", (1,))),
    **dict.fromkeys(
        ("input_ids", "labels", "loss_mask", "completion_mask", "assistant_masks"),
        ("rows are text, whose tokens and labels follow from the chat template", ()),
    ),
    **dict.fromkeys(("functions", "function_call"), ("functions are given as tools", ([], "none", "auto"))),
    **dict.fromkeys(
        ("train_on_input", "train_on_inputs", "train_on_prompt"), ("only answers are trained on", (False,))
    ),
    "system": ("it is given as a message whose role is system", ("",)),
    "chat_template": ("all rows have the template of the tokenizer or of --chat-template", ()),
    "continue_final_message": ("answers are trained on as wholes", (False,)),
}
"""Fields of a row that would change what is trained on: why they can't be used, and the values that ask for nothing."""
REFUSED_OF_MESSAGES = ("train_detail", "training", "trainable", "loss", "loss_mask", "loss_weight", "mask", "masked")
"""Keys of messages by which other trainers choose what is trained on."""
CALLS = ("tool_calls", "function_call")


@dataclass(frozen=True)
class Chat:
    """A conversation, or a text to be continued and its continuation.

    Attributes:
      messages: with an assistant's among them; empty where it is a text.
      prompt: the text to be continued.
      completion: its continuation.
      untrained: places of the assistant's messages that are not trained on.
      inputs: what the template reads besides the messages.
      file: where it is from, and `line` from 1.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    untrained: frozenset[int] = frozenset()
    inputs: TemplateInputs = field(default_factory=TemplateInputs)
    line: int = field(default=0, compare=False)
    file: str = field(default="", compare=False)

    @property
    def trained(self) -> list[int]:
        """Places of the messages that are trained on."""
        answers = (place for place, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return [place for place in answers if place not in self.untrained]


def read_chats(path: Path) -> Examples:
    """Reads the conversations of a file.

    Raises:
      UserError: it can't be read, or most rows are bad.
    """
    chats: Examples = Examples(path)
    ignored: Counter[str] = Counter()
    for number, row in json_objects(read_lines(path)):
        try:
            if isinstance(row, str):
                raise UserError(row)
            chats.rows.append(chat_of(row, number, str(path)))
            ignored.update(_ignored(row))
        except UserError as e:
            chats.bad.append(f"line {number} {e}")
    if ignored:
        counted = ", ".join(f"{shortened(name)} ({count:,} rows)" for name, count in sorted(ignored.items())[:20])
        chats.remarks.append(f"fields of {path} that are not used: {counted}")
    return chats.check()


def chat_of(row: Mapping[str, Any], line: int = 0, file: str = "") -> Chat:
    """Reads a row.

    Raises:
      UserError: what is wrong with it, to follow the number of its line.
    """
    given = {name: value for name, value in row.items() if value is not None}
    for name, (why, without_effect) in REFUSED.items():
        if name in given and given[name] not in without_effect:
            raise UserError(f"has {name} {shortened(given[name], 30)}, but {why}")
    if isinstance(given.get("label"), bool):
        raise UserError("has a label that is true or false, as in preference data, which are not trained on")
    place: dict[str, Any] = {"line": line, "file": file}
    prompt, completion = given.get("prompt"), given.get("completion")
    if "messages" in given:
        if completion is not None:
            raise UserError("has both messages and a completion: leave one of them out")
        return _conversation(given, given["messages"], 0, place)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(given, [*prompt, *completion], len(prompt), place)
    if isinstance(prompt, str) and isinstance(completion, str):
        unused = [name for name in ("tools", "documents", "chat_template_kwargs") if given.get(name)]
        if unused:
            raise UserError(f"has {unused[0]}, but prompts that are text are not written by the chat template")
        if not completion.strip():
            raise UserError("has an empty completion")
        return Chat(prompt=prompt, completion=completion, **place)
    named = shortened(", ".join(row), 60)
    raise UserError(
        "has neither messages nor a prompt and its completion, both as text or both as lists of messages "
        f"(its fields are {named or 'none'})"
    )


def _ignored(row: Mapping[str, Any]) -> list[str]:
    """Fields of a good row that have no effect."""
    used = {*KNOWN, *REFUSED} - ({"prompt"} if row.get("messages") is not None else set())
    return [name for name, value in row.items() if value is not None and name not in used]


def _conversation(row: Mapping[str, Any], messages: Any, first: int, place: Mapping[str, Any]) -> Chat:
    """A conversation whose answers from the message number `first` on are trained on."""
    if not isinstance(messages, list) or not messages:
        raise UserError("has messages that are not a list")
    kept, untrained = [], set()
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"has a message without a role, number {number + 1}")
        is_trained = _is_trained(message, number + 1)
        if not is_trained or number < first:
            untrained.add(number)
        # The keys by which a message is chosen are for the trainer, and no part of the conversation.
        kept.append({key: value for key, value in message.items() if key not in ("weight", "train")})
        _check_content(message, number + 1, is_answer=message["role"] == ASSISTANT and number not in untrained)
    answers = frozenset(i for i, message in enumerate(kept) if message["role"] == ASSISTANT)
    if not any(number >= first for number in answers):
        raise UserError(f"has no message of the {ASSISTANT}" + (" in its completion" if first else ""))
    try:
        inputs = TemplateInputs.of(row)
    except UserError as e:
        raise UserError(f"has a wrong field: {e}") from e
    chat = Chat(tuple(kept), untrained=answers & untrained, inputs=inputs, **place)
    if not chat.trained:
        raise UserError("has no message to train on: weight is 0, or train is false, in all of the assistant's")
    return chat


def _is_trained(message: Message, number: int) -> bool:
    """Whether a message may be trained on, by its `weight` (OpenAI) or `train` (axolotl)."""
    for key in REFUSED_OF_MESSAGES:
        if message.get(key) is not None:
            raise UserError(
                f"has {key} in message {number}, which is not supported: weight 0 or 1, or train true or false, "
                "chooses the messages that are trained on"
            )
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise UserError(f"has weight {shortened(weight, 20)} in message {number}, and it must be 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise UserError(f"has train {shortened(train, 20)} in message {number}, and it must be true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise UserError(f"has weight {weight} and train {str(train).lower()} in message {number}: leave one out")
    if (weight or train) and message["role"] != ASSISTANT:
        name = "train true" if train else f"weight {weight}"
        raise UserError(
            f"has {name} in message {number}, of the {message['role']}: only the {ASSISTANT}'s are trained on"
        )
    return weight != 0 and train is not False


def _check_content(message: Message, number: int, *, is_answer: bool) -> None:
    content, calls = message.get("content"), any(message.get(key) for key in CALLS)
    if message["role"] == ASSISTANT and content is None and (calls or not is_answer):
        return
    if not isinstance(content, str):
        raise UserError(f"has a message whose content is not text, number {number}")
    if is_answer and not content.strip() and not calls and not any(message.get(key) for key in REASONING):
        raise UserError("has an empty answer")
