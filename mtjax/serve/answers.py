"""What completions and chat completions share: fields, and responses in full or as server-sent events."""

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
from mtjax.serve.service import Service, answered, random_seed

MOST_SAMPLES = 128
"""Maximum of `n`."""
MOST_STOPS = 16
"""Maximum number of stop sequences."""
IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields for OpenAI's accounting, which have no effect here."""
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CommonFields:
    """Fields of both completions and chat completions."""

    sampling: Sampling
    """Sampling parameters without `max_tokens`."""
    has_seed: bool
    """Whether the request has a seed; if not, each of its prompts uses different seeds."""
    samples: int
    """Number of texts for each prompt."""
    stops: tuple[str, ...]
    """Stop sequences."""
    stream: bool
    usage: bool
    """Whether the last event has the token counts."""

    @classmethod
    def of(cls, service: Service, fields: Fields) -> "CommonFields":
        """Takes the shared fields of a request.

        Raises:
          ApiError: a field is invalid.
        """
        service.check_name(fields.take("model"))
        has_seed = fields.has("seed")
        # OpenAI's default temperature, not the greedy 0 of `mtjax generate`.
        sampling = fields.sampling(temperature=1.0, seed=random_seed())
        samples = fields.integer("n", 1, MOST_SAMPLES) or 1
        stops = strings_or_one(fields.take("stop"), "stop", MOST_STOPS)
        stream, options = fields.boolean("stream"), fields.take("stream_options")
        if options is not None and not stream:
            raise ApiError(
                400, "stream_options requires stream: set it to true, or remove stream_options", "stream_options"
            )
        if options is not None and not isinstance(options, dict):
            raise invalid_value("stream_options", shortened(options), "an object")
        # OpenAI pads events with random characters unless this is false; here nothing is padded.
        more = Fields(options or {}, without_effect=["include_obfuscation"])
        usage = more.boolean("include_usage")
        more.reject_unknown()
        # Rejected rather than ignored: an ignored field would change the texts without a word.
        fields.reject_unsupported("logit_bias", "this server does not support it", {})
        return cls(sampling, has_seed, samples, stops, stream, usage)


class ResponseFormat(Protocol):
    """The JSON format of one kind of response."""

    @property
    def prefix(self) -> str:
        """Prefix of response ids."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """`object` of a full response, and of an event."""
        ...

    @property
    def has_text(self) -> bool:
        """Whether choices have the generated text: not if a prompt is only scored."""
        ...

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """Returns a choice of a full response, without `index` and `finish_reason`."""
        ...

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Returns the choice of a text's first event, before any piece; None for no event."""
        ...

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """Returns the choice of an event for a piece of the prompt or the text; None for no event."""
        ...

    def last_choice(self) -> dict[str, Any]:
        """Returns the choice of the event with the finish reason."""
        ...


class Texts:
    """The texts of one request: samples of each prompt."""

    def __init__(
        self, service: Service, fields: CommonFields, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> None:
        self._service, self._fields, self._prompts = service, fields, prompts
        # Created here, as its timeout includes the time in the queue.
        self._pending = service.pending_response()
        self._texts = [
            service.completion(
                prompt, with_text_seed(sampling, number, 0 if fields.has_seed else index), stops=fields.stops, **more
            )
            for index, prompt in enumerate(prompts)
            for number in range(fields.samples)
        ]

    async def respond(self, request: HttpRequest, form: ResponseFormat) -> Response:
        """Submits the texts; returns a stream of events, or waits for the texts and returns the full response.

        Raises:
          ApiError: the texts are rejected, or not done before the timeout.
        """
        # Only a stream reads pieces; a full response waits for the ends of texts.
        if self._fields.stream:
            for index, text in enumerate(self._texts):
                text.on_piece = partial(self._put_piece, index, text)
        self._service.host.submit(self._pending, [text.request for text in self._texts])
        if self._fields.stream:
            return EventStream(self._events(form), self._service, self._pending)
        return await answered(self._service.host, self._pending, request.receive, self._full_response(form))

    def _put_piece(self, index: int, text: Completion, piece: Piece) -> None:
        # Pieces of an echoed prompt come before the first piece of the text.
        self._pending.put_event(TextEvent(index, piece, is_prompt=not text.pieces))

    async def _full_response(self, form: ResponseFormat) -> Response:
        await self._pending.done()
        choices = [
            {"index": index, **form.full_choice(index, text), "finish_reason": text.ended}
            for index, text in enumerate(self._texts)
        ]
        return json_response({**self._head(form, form.names[0]), "choices": choices, "usage": self._usage(form)})

    async def _events(self, form: ResponseFormat) -> AsyncIterator[bytes]:
        head = self._head(form, form.names[1])
        # OpenAI's API: with include_usage every event has `usage`, which is null in all but the last.
        counted = {"usage": None} if self._fields.usage else {}

        def event(index: int, choice: dict[str, Any], ended: str | None = None) -> bytes:
            choices = [{"index": index, **choice, "finish_reason": ended}]
            return b"data: " + as_json({**head, "choices": choices, **counted}) + b"\n\n"

        try:
            for index in range(len(self._texts)):
                # Before the engine has said anything, so that a client knows at once that its request was accepted.
                if first := form.first_choice(index):
                    yield event(index, first)
            async for update in self._pending.events():
                if update.piece is None:
                    yield event(update.text, form.last_choice(), self._texts[update.text].ended)
                elif choice := form.piece_choice(update.text, update.piece, update.is_prompt):
                    yield event(update.text, choice)
        except ApiError as e:  # the status line has already been sent: the error becomes an event
            yield b"data: " + as_json(e.body()) + b"\n\n"
            return
        if self._fields.usage:
            yield b"data: " + as_json({**head, "choices": [], "usage": self._usage(form)}) + b"\n\n"
        yield DONE

    def _head(self, form: ResponseFormat, name: str) -> dict[str, Any]:
        return {
            "id": f"{form.prefix}-{uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": self._service.name,
        }

    def _usage(self, form: ResponseFormat) -> dict[str, int]:
        # Once for each prompt, however many texts continue it, as in OpenAI's API.
        prompt_tokens = sum(map(len, self._prompts))
        # The engine generates a token even if a prompt is only scored; then it is not returned.
        pieces = (piece for text in self._texts for piece in text.pieces) if form.has_text else ()
        generated = sum(piece.token is not None for piece in pieces)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        }


class EventStream(StreamingResponse):
    """A response of server-sent events; when it ends, for whatever reason, its texts are cancelled."""

    def __init__(self, events: AsyncIterator[bytes], service: Service, pending: PendingResponse) -> None:
        # X-Accel-Buffering: nginx would otherwise buffer the events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._service, self._pending = service, pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the last one, or until the client disconnects or the send timeout expires."""
        try:
            async with self._pending.send_timeout():
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return  # closes the connection
        finally:
            self._service.host.cancel(self._pending)
