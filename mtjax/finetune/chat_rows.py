"""Reads conversations from JSON lines with `messages`, or with `prompt` and `completion`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import json_objects, read_lines
from mtjax.errors import UserError, shortened
from mtjax.finetune.rows import Examples
from mtjax.generate.chat import REASONING, Message, TemplateInputs

ASSISTANT = "assistant"
"""The role whose messages are trained on."""
PASSAGES = "passages"
"""Field of a row of a Retro: texts that its encoder reads for the completion, as in a line of `mtjax generate`."""
KNOWN = ("messages", "prompt", "completion", "tools", "documents", "chat_template_kwargs")
"""Fields of a row that have an effect."""
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), ("only text is trained on", ([],))),
    **dict.fromkeys(("weight", "loss_weight"), ("weights of rows are not supported: add a weight to messages", (1,))),
    **dict.fromkeys(
        ("input_ids", "labels", "loss_mask", "completion_mask", "assistant_masks"),
        ("rows must be text, which is encoded with the chat template", ()),
    ),
    **dict.fromkeys(("functions", "function_call"), ("functions must be given as tools", ([], "none", "auto"))),
    **dict.fromkeys(
        ("train_on_input", "train_on_inputs", "train_on_prompt"), ("only answers are trained on", (False,))
    ),
    "system": ("it must be a message with the role system", ("",)),
    "chat_template": ("the template is that of the tokenizer or of --chat-template", ()),
    "continue_final_message": ("answers are always trained on from their beginning", (False,)),
}
"""Unsupported fields of a row -> the reason, and values that have no effect and are therefore accepted."""
REFUSED_OF_MESSAGES = ("train_detail", "training", "trainable", "loss", "loss_mask", "loss_weight", "mask", "masked")
"""Keys of messages with which other trainers select what is trained on."""
CALLS = ("tool_calls", "function_call")


@dataclass(frozen=True)
class Chat:
    """A conversation, or a prompt and its completion.

    Attributes:
      messages: the messages, including answers of the assistant; empty for a prompt and its completion.
      prompt: text of the prompt.
      completion: text of the completion.
      passages: texts that the encoder of a Retro reads for the completion; None where it reads none.
      untrained: indices of the assistant's messages that are not trained on.
      inputs: inputs of the template other than the messages.
      line: number of the line in `file`, from 1.
      file: path of the file.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    passages: tuple[str, ...] | None = None
    untrained: frozenset[int] = frozenset()
    inputs: TemplateInputs = field(default_factory=TemplateInputs)
    line: int = field(default=0, compare=False)
    file: str = field(default="", compare=False)

    @property
    def trained(self) -> list[int]:
        """Indices of the messages that are trained on."""
        answers = (number for number, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return [number for number in answers if number not in self.untrained]


def read_chats(path: Path, *, with_passages: bool = False) -> Examples:
    """Reads the conversations of a file, and their passages if the model reads any.

    Raises:
      UserError: it can't be read, or most rows are bad.
    """
    chats: Examples = Examples(path)
    ignored: Counter[str] = Counter()
    for number, row in json_objects(read_lines(path)):
        try:
            if isinstance(row, str):
                raise UserError(row)
            chat, used = chat_of(row, number, str(path)), ()
            if with_passages:
                chat, used = replace(chat, passages=passages_of(row)), (PASSAGES,)
            chats.rows.append(chat)
            ignored.update(name for name in _ignored(row) if name not in used)
        except UserError as e:
            chats.bad.append(f"line {number} {e}")
    if ignored:
        counted = ", ".join(f"{shortened(name)} ({count:,} rows)" for name, count in sorted(ignored.items())[:20])
        chats.remarks.append(f"unused fields in {path}: {counted}")
    return chats.check()


def chat_of(row: Mapping[str, Any], line: int = 0, file: str = "") -> Chat:
    """Parses a row.

    Raises:
      UserError: the row is invalid; the message is to be printed after the number of its line.
    """
    # Data sets of several formats have all fields in every row, null where they don't apply.
    given = {name: value for name, value in row.items() if value is not None}
    for name, (why, without_effect) in REFUSED.items():
        # Refused rather than ignored: each would change what is trained on in the trainer that the row was made for.
        if name in given and given[name] not in without_effect:
            raise UserError(f"has {name} {shortened(given[name], 30)}, but {why}")
    # KTO's rows have prompt and completion, too, but some completions are bad ones.
    if isinstance(given.get("label"), bool):
        raise UserError("has a boolean label, as in preference data, which is not supported")
    source: dict[str, Any] = {"line": line, "file": file}
    prompt, completion = given.get("prompt"), given.get("completion")
    if "messages" in given:
        if completion is not None:
            raise UserError("has both messages and a completion: remove one of them")
        return _conversation(given, given["messages"], 0, source)
    if isinstance(prompt, list) and isinstance(completion, list):
        # TRL's conversational format: answers within the prompt are context.
        return _conversation(given, [*prompt, *completion], len(prompt), source)
    if isinstance(prompt, str) and isinstance(completion, str):
        unused = [name for name in ("tools", "documents", "chat_template_kwargs") if given.get(name)]
        if unused:
            raise UserError(f"has {unused[0]}, but a prompt that is text is not rendered with the chat template")
        if not completion.strip():
            raise UserError("has an empty completion")
        return Chat(prompt=prompt, completion=completion, **source)
    named = shortened(", ".join(row), 60)
    raise UserError(
        "has neither messages nor a prompt and its completion, both as text or both as lists of messages "
        f"(its fields are {named or 'none'})"
    )


def passages_of(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the passages of a valid row; None if it has none.

    Raises:
      UserError: they are not texts, or can't be read as `mtjax generate` reads those of its lines.
    """
    if row.get("neighbours") is not None:
        raise UserError("has neighbours, which mtjax finetune does not read: give passages, which the completion reads")
    passages = row.get(PASSAGES)
    if passages is None:
        return None
    if not isinstance(passages, list) or not all(isinstance(text, str) for text in passages):
        raise UserError(f'has passages {shortened(passages, 60)}, which must be a list of texts: ["one", "two"]')
    if not isinstance(row.get("prompt"), str):
        raise UserError(
            "has passages beside messages, and mtjax generate reads passages beside a prompt that is text: give prompt "
            "and completion as texts"
        )
    return tuple(passages)


def _ignored(row: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a valid row that have no effect."""
    # Beside messages a prompt is not read; some data sets have both.
    used = {*KNOWN, *REFUSED} - ({"prompt"} if row.get("messages") is not None else set())
    return [name for name, value in row.items() if value is not None and name not in used]


def _conversation(row: Mapping[str, Any], messages: Any, first: int, source: Mapping[str, Any]) -> Chat:
    """Parses a conversation; answers from message number `first` are trained on.

    Raises:
      UserError: it is invalid.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("has messages that are not a list")
    cleaned, untrained = [], set()
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"has no role in message {number + 1}")
        is_trained = _is_trained(message, number + 1)
        if not is_trained or number < first:
            untrained.add(number)
        # These keys select what is trained on; the template must not see them.
        cleaned.append({key: value for key, value in message.items() if key not in ("weight", "train")})
        _check_content(message, number + 1, is_answer=message["role"] == ASSISTANT and number not in untrained)
    answers = frozenset(i for i, message in enumerate(cleaned) if message["role"] == ASSISTANT)
    if not any(number >= first for number in answers):
        raise UserError(f"has no message of the {ASSISTANT}" + (" in its completion" if first else ""))
    try:
        inputs = TemplateInputs.of(row)
    except UserError as e:
        raise UserError(f"has an invalid field: {e}") from e
    chat = Chat(tuple(cleaned), untrained=answers & untrained, inputs=inputs, **source)
    if not chat.trained:
        raise UserError(f"has no message to train on: all messages of the {ASSISTANT} have weight 0 or train false")
    return chat


def _is_trained(message: Message, number: int) -> bool:
    """Returns whether a message may be trained on, by its `weight` (OpenAI) or `train` (axolotl).

    Raises:
      UserError: a key is unsupported or invalid.
    """
    for key in REFUSED_OF_MESSAGES:
        if message.get(key) is not None:
            raise UserError(
                f"has {key} in message {number}, which is not supported: use weight (0 or 1) or train (true or "
                "false) to select the messages that are trained on"
            )
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise UserError(f"has weight {shortened(weight, 20)} in message {number}, but it must be 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise UserError(f"has train {shortened(train, 20)} in message {number}, but it must be true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise UserError(f"has weight {weight} and train {str(train).lower()} in message {number}: remove one of them")
    if (weight or train) and message["role"] != ASSISTANT:
        name = "train true" if train else f"weight {weight}"
        raise UserError(
            f"has {name} in message {number}, of the {message['role']}: only the {ASSISTANT}'s messages are trained on"
        )
    return weight != 0 and train is not False


def _check_content(message: Message, number: int, *, is_answer: bool) -> None:
    """Checks that a message has content; `is_answer` if it is trained on.

    Raises:
      UserError: it has none, or it is not text.
    """
    content, calls = message.get("content"), any(message.get(key) for key in CALLS)
    # OpenAI's format has null content beside tool calls.
    if message["role"] == ASSISTANT and content is None and (calls or not is_answer):
        return
    if not isinstance(content, str):
        raise UserError(f"has content that is not text in message {number}")
    if is_answer and not content.strip() and not calls and not any(message.get(key) for key in REASONING):
        raise UserError("has an empty answer")
