"""`POST /v1/chat/completions`: OpenAI's chat completions, with the tokenizer's chat template."""

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
"""Roles of messages, and the roles that templates know."""
KEYS = ("role", "content", "name", "tool_call_id", *REASONING)
"""Keys that any message may have, even if the template ignores the reasoning: the conversation stays complete."""
EMPTY = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""Keys of messages in OpenAI's responses, which clients send back, often empty."""
INPUTS = ("tools", "documents", "chat_template_kwargs")
"""Fields for the template."""
MOST_MESSAGES = 4096
TOOLS = "this server only renders tools into the prompt: it can't force calls, and calls are part of the text"
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "parallel_tool_calls": (TOOLS, (True, False)),
    "functions": ("it was replaced by tools", ([],)),
    "function_call": ("it was replaced by tools", ("none", "auto")),
    "response_format": ("this server generates plain text only", ({"type": "text"},)),
    "modalities": ("this server generates plain text only", (["text"],)),
    "audio": ("this server generates plain text only", ()),
    "prediction": ("this server does not support predicted outputs", ()),
    "web_search_options": ("this server has no web search", ()),
    "reasoning_effort": ("this server does not support it", ("none",)),
    "verbosity": ("this server does not support it", ()),
}
"""Unsupported fields: the reason, and the values that are accepted because they change nothing."""


async def create_chat_completion(service: Service, request: HttpRequest) -> Response:
    """Handles a chat completion request.

    Raises:
      ApiError: the request is invalid.
    """
    fields = Fields(await service.read_object(request), IGNORED_FIELDS)
    common = CommonFields.of(service, fields)
    template = service.tokens.template
    messages = read_messages(fields.take("messages"), template)
    inputs = read_inputs(fields, template)
    max_tokens, max_completion_tokens = (
        fields.integer("max_tokens", 1, 2**31),
        fields.integer("max_completion_tokens", 1, 2**31),
    )
    # OpenAI renamed the field: a request with both is served if they agree.
    if None not in (max_tokens, max_completion_tokens) and max_tokens != max_completion_tokens:
        message = f"max_tokens is {max_tokens} and max_completion_tokens is {max_completion_tokens}: send one of them"
        raise ApiError(400, message, "max_tokens")
    with_logprobs, most_likely = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MOST_LIKELY)
    if most_likely is not None and not with_logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: set it to true, or remove top_logprobs", "top_logprobs")
    for name, (reason, accepted) in UNSUPPORTED.items():
        fields.reject_unsupported(name, reason, *accepted)
    fields.reject_unknown()
    prompt = await service.tokens.encode_chat(messages, inputs)
    field = "max_tokens" if max_completion_tokens is None else "max_completion_tokens"
    requested = max_tokens if max_completion_tokens is None else max_completion_tokens
    max_new_tokens = service.max_new_tokens(len(prompt), requested, field)
    sampling = replace(common.sampling, max_tokens=max_new_tokens)
    texts = Texts(service, common, [prompt], sampling, logprobs=with_logprobs)
    return await texts.respond(request, ChatFormat(service.tokens, (most_likely or 0) if with_logprobs else None))


def read_inputs(fields: Fields, template: ChatTemplate | None) -> TemplateInputs:
    """Takes the template's inputs other than the messages; with `tool_choice` "none" the template gets no tools.

    Raises:
      ApiError: a field is invalid, or the template does not use it.
    """
    values = {name: fields.take(name) for name in INPUTS}
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice is {shortened(choice)}, and {TOOLS}: remove it", "tool_choice")
    if choice == "none":
        values["tools"] = None
    for name, value in values.items():
        try:
            # One by one, so that an error names its field.
            inputs = TemplateInputs.of({name: value})
            if template is not None:
                template.check(inputs)
        except UserError as e:
            raise ApiError(400, str(e), name) from e
    return TemplateInputs.of(values)


def read_messages(given: Any, template: ChatTemplate | None = None) -> list[dict[str, Any]]:
    """Validates the messages of a conversation.

    Raises:
      ApiError: the value is not a list of messages with a role and text, or a message has a key that is neither known
        nor used by the template.
    """
    if not isinstance(given, list) or not given:
        raise invalid_value("messages", shortened(given), "a list of at least one message")
    if len(given) > MOST_MESSAGES:
        raise invalid_value("messages", f"a list of {len(given)}", f"of at most {MOST_MESSAGES}")
    return [_message(message, f"messages[{number}]", template) for number, message in enumerate(given)]


def _message(given: Any, name: str, template: ChatTemplate | None) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid_value(name, shortened(given), "an object with role and content")
    # Clients append the server's answers to the conversation: their nulls and empty lists say nothing.
    message = {key: value for key, value in given.items() if value is not None and (value != [] or key not in EMPTY)}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(f"{name}.role", shortened(role), f"one of {', '.join(ROLES)}")
    for key in message:
        if key in KEYS or (template is not None and template.reads_key(key)):
            continue
        if key in EMPTY:
            raise ApiError(400, f"{name} has {key}, and this model's chat_template does not use it: remove it", name)
        raise ApiError(400, f"{name} has an unknown field {shortened(repr(key))}{nearest(key, KEYS + EMPTY)}", name)
    # OpenAI's answers with tool calls have null for content.
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message
    return message | {"role": ROLES[role], "content": _text(content, f"{name}.content")}


def _text(content: Any, name: str) -> str:
    """Returns the text of a message's content, which is a string or a list of content parts."""
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        parts = [part.get("text") for part in texts]
        if len(texts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise invalid_value(name, shortened(content), "text: this server does not support images, audio or files")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise invalid_value(name, shortened(content), "text")
    return checked_text(content, name)


class ChatFormat:
    """The JSON format of chat completions."""

    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")
    has_text = True

    def __init__(self, tokens: Tokens, most_likely: int | None) -> None:
        self._tokens, self._top_logprobs = tokens, most_likely

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """Returns a choice with the assistant's message."""
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(text.pieces)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Returns a delta with the role."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """Returns a delta with the piece's text; None if it has neither text nor log-probabilities."""
        # A token within a character or a stop sequence adds no text, but has a log-probability.
        has_content = piece.text or self._top_logprobs is not None
        return {"delta": {"content": piece.text}, "logprobs": self._logprobs([piece])} if has_content else None

    def last_choice(self) -> dict[str, Any]:
        """Returns an empty delta."""
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._top_logprobs is None else chat_logprobs(self._tokens, pieces, self._top_logprobs)
