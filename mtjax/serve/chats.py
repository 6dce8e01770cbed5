"""`POST /v1/chat/completions`: OpenAI's chats, by the tokenizer's chat template."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import UserError, nearest, shortened
from mtjax.generate.chat import REASONING, ChatTemplate, TemplateInputs
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.sampling import MOST_LIKELY
from mtjax.serve.answers import IGNORED_FIELDS, CommonFields, Texts
from mtjax.serve.api_error import ApiError
from mtjax.serve.fields import Fields, checked_text, invalid_value
from mtjax.serve.logprobs import chat_logprobs
from mtjax.serve.service import Service
from mtjax.serve.tokens import Tokens

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Of messages, and what templates know them as."""
KEYS = ("role", "content", "name", "tool_call_id", *REASONING)
"""Keys that any message may have; a template that does not read the last ones loses no text of the conversation."""
EMPTY = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""Keys of the messages in OpenAI's answers: clients send them back, often empty."""
INPUTS = ("tools", "documents", "chat_template_kwargs")
"""Fields that the template reads."""
MOST_MESSAGES = 4096
TOOLS = "this server only writes tools into the prompt: the model decides, and a call is part of its text"
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "parallel_tool_calls": (TOOLS, (True, False)),
    "functions": ("functions are given as tools", ([],)),
    "function_call": ("functions are given as tools", ("none", "auto")),
    "response_format": ("this server writes plain text", ({"type": "text"},)),
    "modalities": ("this server writes plain text", (["text"],)),
    "audio": ("this server writes plain text", ()),
    "prediction": ("this server has no predicted outputs", ()),
    "web_search_options": ("this server searches nothing", ()),
    "reasoning_effort": ("this server has no such setting", ("none",)),
    "verbosity": ("this server has no such setting", ()),
}
"""Fields for what there is not here: why, and the values that ask for nothing."""


async def create_chat_completion(service: Service, request: HttpRequest) -> Response:
    """Answers one.

    Raises:
      Refused: something is wrong with it.
    """
    fields = Fields(await service.read_object(request), IGNORED_FIELDS)
    common = CommonFields.of(service, fields)
    template = service.tokens.template
    messages = read_messages(fields.take("messages"), template)
    inputs = read_inputs(fields, template)
    older, tokens = fields.integer("max_tokens", 1, 2**31), fields.integer("max_completion_tokens", 1, 2**31)
    if older is not None and tokens is not None and older != tokens:
        raise ApiError(400, f"max_tokens is {older} and max_completion_tokens {tokens}: give one of them", "max_tokens")
    with_logprobs, most_likely = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MOST_LIKELY)
    if most_likely is not None and not with_logprobs:
        raise ApiError(400, "top_logprobs has an effect with logprobs only: set that, or leave it out", "top_logprobs")
    for name, (why, same) in UNSUPPORTED.items():
        fields.reject_unsupported(name, why, *same)
    fields.reject_unknown()
    prompt = await service.tokens.encode_chat(messages, inputs)
    field = "max_tokens" if tokens is None else "max_completion_tokens"
    room = service.max_new_tokens(len(prompt), older if tokens is None else tokens, field)
    sampling = replace(common.sampling, max_tokens=room)
    texts = Texts(service, common, [prompt], sampling, logprobs=with_logprobs)
    return await texts.respond(request, ChatFormat(service.tokens, (most_likely or 0) if with_logprobs else None))


def read_inputs(fields: Fields, template: ChatTemplate | None) -> TemplateInputs:
    """Reads the template's inputs other than the messages; with `tool_choice` "none" the template gets no tools.

    Raises:
      Refused: a field is wrong, or the template does not read it.
    """
    values = {name: fields.take(name) for name in INPUTS}
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice is {shortened(choice)}, and {TOOLS}: leave it out", "tool_choice")
    if choice == "none":
        values["tools"] = None
    for name, value in values.items():
        try:
            inputs = TemplateInputs.of({name: value})
            if template is not None:
                template.check(inputs)
        except UserError as e:
            raise ApiError(400, str(e), name) from e
    return TemplateInputs.of(values)


def read_messages(given: Any, template: ChatTemplate | None = None) -> list[dict[str, Any]]:
    """Reads a conversation.

    Raises:
      Refused: it is not a list of messages with a role and text, or a message has a key that is neither known nor read
        by the template.
    """
    if not isinstance(given, list) or not given:
        raise invalid_value("messages", shortened(given), "a list of at least one message")
    if len(given) > MOST_MESSAGES:
        raise invalid_value("messages", f"a list of {len(given)}", f"of at most {MOST_MESSAGES}")
    return [_message(message, f"messages[{number}]", template) for number, message in enumerate(given)]


def _message(given: Any, place: str, template: ChatTemplate | None) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid_value(place, shortened(given), "an object with role and content")
    message = {key: value for key, value in given.items() if value is not None and (value != [] or key not in EMPTY)}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(f"{place}.role", shortened(role), f"one of {', '.join(ROLES)}")
    for key in message:
        if key in KEYS or (template is not None and template.reads_key(key)):
            continue
        if key in EMPTY:
            raise ApiError(400, f"{place} has {key}, and this model's chat_template writes none: leave it out", place)
        raise ApiError(400, f"{place} has no field called {shortened(repr(key))}{nearest(key, KEYS + EMPTY)}", place)
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message
    return message | {"role": ROLES[role], "content": _text(content, f"{place}.content")}


def _text(content: Any, name: str) -> str:
    """The text of a message, which is a string or parts."""
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        parts = [part.get("text") for part in texts]
        if len(texts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise invalid_value(name, shortened(content), "text: this server reads no images, sounds or files")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise invalid_value(name, shortened(content), "text")
    return checked_text(content, name)


class ChatFormat:
    """How chats are written."""

    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokens: Tokens, most_likely: int | None) -> None:
        self._tokens, self._most = tokens, most_likely

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """A choice: the assistant's message."""
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"message": message, "logprobs": self._of(text.pieces)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """What is said."""
        told = piece.text or self._most is not None
        return {"delta": {"content": piece.text}, "logprobs": self._of([piece])} if told else None

    def last_choice(self) -> dict[str, Any]:
        """Nothing more."""
        return {"delta": {}, "logprobs": None}

    def _of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._most is None else chat_logprobs(self._tokens, pieces, self._most)
