"""Texts for a request of OpenAI's kind: asked of the engine, answered whole or as server-sent events."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtjax.errors import shortened
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.serve.api_error import ApiError, as_json, json_response
from mtjax.serve.fields import Fields, invalid_value, strings_or_one
from mtjax.serve.host import PendingResponse, TextEvent
from mtjax.serve.service import Service, random_seed, unless_disconnected

MOST_SAMPLES = 128
"""Of `n`."""
MOST_STOPS = 16
"""Strings of `stop`."""
IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields for OpenAI's own books."""
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CommonFields:
    """What completions and chats have in common."""

    sampling: Sampling
    """Without the number of tokens."""
    has_seed: bool
    """Whether the request gives a seed; if not, each of its prompts draws different noise."""
    samples: int
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    """Whether the last event tells the tokens."""

    @classmethod
    def of(cls, service: Service, fields: Fields) -> "CommonFields":
        """Reads the fields.

        Raises:
          Refused: one is wrong.
        """
        service.check_name(fields.take("model"))
        has_seed = fields.has("seed")
        sampling = fields.sampling(temperature=1.0, seed=random_seed())
        samples = fields.integer("n", 1, MOST_SAMPLES) or 1
        stops = strings_or_one(fields.take("stop"), "stop", MOST_STOPS)
        stream, options = fields.boolean("stream"), fields.take("stream_options")
        if options is not None and not stream:
            raise ApiError(400, "stream_options has an effect with stream only: leave it out", "stream_options")
        if options is not None and not isinstance(options, dict):
            raise invalid_value("stream_options", shortened(options), "an object")
        more = Fields(options or {}, without_effect=["include_obfuscation"])
        usage = more.boolean("include_usage")
        more.reject_unknown()
        fields.reject_unsupported("logit_bias", "this server has no bias of logits", {})
        return cls(sampling, has_seed, samples, stops, stream, usage)


class ResponseFormat(Protocol):
    """How one kind of answer is written."""

    @property
    def prefix(self) -> str:
        """Of ids."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """`object` of the answer, and of an event."""
        ...

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """A choice, without `index` and `finish_reason`."""
        ...

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The choice of an event before any piece; None for no event."""
        ...

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """The choice of an event with a piece of the prompt or the text; None if nothing is to be said of it."""
        ...

    def last_choice(self) -> dict[str, Any]:
        """The choice of the event that tells why a text ended."""
        ...


class Texts:
    """Several samples of each prompt."""

    def __init__(
        self, service: Service, fields: CommonFields, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> None:
        self._service, self._fields, self._prompts = service, fields, prompts
        self._pending = service.pending_response()
        self._texts = [
            service.completion(
                prompt, with_text_seed(sampling, number, 0 if fields.has_seed else place), stops=fields.stops, **more
            )
            for place, prompt in enumerate(prompts)
            for number in range(fields.samples)
        ]

    async def respond(self, request: HttpRequest, form: ResponseFormat) -> Response:
        """Waits for the texts, or begins to stream them.

        Raises:
          Refused: the engine does not take them, or they are not done in time.
        """
        if self._fields.stream:
            for index, text in enumerate(self._texts):
                text.on_piece = partial(self._put_piece, index, text)
        self._service.host.submit(self._pending, [text.request for text in self._texts])
        if self._fields.stream:
            return EventStream(self._events(form), self._service, self._pending)
        try:
            return await unless_disconnected(request.receive, self._full_response(form))
        finally:
            self._service.host.cancel(self._pending)

    def _put_piece(self, index: int, text: Completion, piece: Piece) -> None:
        self._pending.put_event(TextEvent(index, piece, is_prompt=not text.pieces))

    async def _full_response(self, form: ResponseFormat) -> Response:
        await self._pending.done()
        choices = [
            {"index": index, **form.full_choice(index, text), "finish_reason": text.ended}
            for index, text in enumerate(self._texts)
        ]
        return json_response({**self._head(form, form.names[0]), "choices": choices, "usage": self._usage()})

    async def _events(self, form: ResponseFormat) -> AsyncIterator[bytes]:
        head = self._head(form, form.names[1])
        counted = {"usage": None} if self._fields.usage else {}

        def event(index: int, choice: dict[str, Any], ended: str | None = None) -> bytes:
            choices = [{"index": index, **choice, "finish_reason": ended}]
            return b"data: " + as_json({**head, "choices": choices, **counted}) + b"\n\n"

        try:
            for index in range(len(self._texts)):
                if first := form.first_choice(index):
                    yield event(index, first)
            async for news in self._pending.events():
                if news.piece is None:
                    yield event(news.text, form.last_choice(), self._texts[news.text].ended)
                elif choice := form.piece_choice(news.text, news.piece, news.is_prompt):
                    yield event(news.text, choice)
        except ApiError as e:  # too late for a status
            yield b"data: " + as_json(e.body()) + b"\n\n"
            return
        if self._fields.usage:
            yield b"data: " + as_json({**head, "choices": [], "usage": self._usage()}) + b"\n\n"
        yield DONE

    def _head(self, form: ResponseFormat, name: str) -> dict[str, Any]:
        return {
            "id": f"{form.prefix}-{uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": self._service.name,
        }

    def _usage(self) -> dict[str, int]:
        read = sum(map(len, self._prompts))
        written = sum(piece.token is not None for text in self._texts for piece in text.pieces)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class EventStream(StreamingResponse):
    """Server-sent events; whatever ends them, the engine hears of it."""

    def __init__(self, events: AsyncIterator[bytes], service: Service, pending: PendingResponse) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._service, self._pending = service, pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until all are sent, or the client leaves, or reads too slowly."""
        try:
            async with self._pending.send_timeout():
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return  # the connection is cut
        finally:
            self._service.host.cancel(self._pending)
