"""`POST /v1/chat/completions`: OpenAI's chats, by the tokenizer's chat template."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import shortened
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.sampling import MOST_LIKELY
from mtjax.serve.answers import WITHOUT_EFFECT, Asked, Texts
from mtjax.serve.fields import Fields, checked_text, wrong
from mtjax.serve.logprobs import chat_logprobs
from mtjax.serve.refused import Refused
from mtjax.serve.service import Service
from mtjax.serve.tokens import Tokens

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Of messages, and what templates know them as."""
MOST_MESSAGES = 4096
TOOLS = "this server calls no tools"
LACKS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (TOOLS, ([],)),
    "tool_choice": (TOOLS, ("none", "auto")),
    "parallel_tool_calls": (TOOLS, (True, False)),
    "functions": (TOOLS, ([],)),
    "function_call": (TOOLS, ("none", "auto")),
    "response_format": ("this server writes plain text", ({"type": "text"},)),
    "modalities": ("this server writes plain text", (["text"],)),
    "audio": ("this server writes plain text", ()),
    "prediction": ("this server has no predicted outputs", ()),
    "web_search_options": ("this server searches nothing", ()),
    "reasoning_effort": ("this server has no such setting", ("none",)),
    "verbosity": ("this server has no such setting", ()),
}
"""Fields for what there is not here: why, and the values that ask for nothing."""


async def answer(service: Service, request: HttpRequest) -> Response:
    """Answers one.

    Raises:
      Refused: something is wrong with it.
    """
    fields = Fields(await service.read_object(request), WITHOUT_EFFECT)
    asked = Asked.of(service, fields)
    messages = read_messages(fields.take("messages"))
    older, tokens = fields.whole("max_tokens", 1, 2**31), fields.whole("max_completion_tokens", 1, 2**31)
    if older is not None and tokens is not None and older != tokens:
        raise Refused(400, f"max_tokens is {older} and max_completion_tokens {tokens}: give one of them", "max_tokens")
    with_logprobs, most_likely = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_LIKELY)
    if most_likely is not None and not with_logprobs:
        raise Refused(400, "top_logprobs has an effect with logprobs only: set that, or leave it out", "top_logprobs")
    for name, (why, same) in LACKS.items():
        fields.without(name, why, *same)
    fields.close()
    prompt = await service.tokens.encode_chat(messages)
    field = "max_tokens" if tokens is None else "max_completion_tokens"
    room = service.room(len(prompt), older if tokens is None else tokens, field)
    sampling = replace(asked.sampling, max_tokens=room)
    texts = Texts(service, asked, [prompt], sampling, logprobs=with_logprobs)
    return await texts.answer(request, Form(service.tokens, (most_likely or 0) if with_logprobs else None))


def read_messages(given: Any) -> list[dict[str, str]]:
    """A conversation.

    Raises:
      Refused: it is not a list of messages, each with a role and text.
    """
    if not isinstance(given, list) or not given:
        raise wrong("messages", shortened(given), "a list of at least one message")
    if len(given) > MOST_MESSAGES:
        raise wrong("messages", f"a list of {len(given)}", f"of at most {MOST_MESSAGES}")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise wrong(place, shortened(given), "an object with role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{place}.role", shortened(role), f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        parts = [part.get("text") for part in texts]
        if len(texts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise wrong(f"{place}.content", shortened(content), "text: this server reads no images, sounds or files")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise wrong(f"{place}.content", shortened(content), "text")
    if given.get("tool_calls") or given.get("function_call"):
        raise Refused(400, f"{place} calls a tool, and {TOOLS}", place)
    return {"role": ROLES[role], "content": checked_text(content, f"{place}.content")}


class Form:
    """How chats are written."""

    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokens: Tokens, most_likely: int | None) -> None:
        self._tokens, self._most = tokens, most_likely

    def whole(self, index: int, text: Completion) -> dict[str, Any]:
        """A choice: the assistant's message."""
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"message": message, "logprobs": self._of(text.pieces)}

    def first(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """What is said."""
        told = piece.text or self._most is not None
        return {"delta": {"content": piece.text}, "logprobs": self._of([piece])} if told else None

    def last(self) -> dict[str, Any]:
        """Nothing more."""
        return {"delta": {}, "logprobs": None}

    def _of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._most is None else chat_logprobs(self._tokens, pieces, self._most)
