"""What every kind of request needs: the model's name, its tokenizer, the engine, and the limits."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from mtjax.generate.completion import Completion
from mtjax.generate.request import Sampling
from mtjax.serve.api_error import ApiError
from mtjax.serve.fields import invalid_value, parse_object
from mtjax.serve.host import Host, PendingResponse
from mtjax.serve.tokens import Tokens

BODY_SECONDS = 30
"""That a client has to send the body of a request."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status of a client that has left."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body: int
    """Bytes of its body."""
    tokens: int
    """Tokens of each text."""
    seconds: float
    """Until its texts are done, waiting included."""


class Keys:
    """Who may ask. Comparing takes the same time for any key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str) -> None:
        """Checks the header `Authorization: Bearer KEY`; with no keys everybody may ask.

        Raises:
          Refused: it is not one of the keys.
        """
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            what = "is not one of this server's" if key else "is missing"
            raise ApiError(401, f"the API key {what}: send the header Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
      name: under which clients ask for it.
      tokens: its tokenizer.
      stop_ids: tokens that end a text.
      host: its engine.
      limits: of a request.
      keys: that clients have.
    """

    name: str
    tokens: Tokens
    stop_ids: frozenset[int]
    host: Host
    limits: Limits
    keys: Keys
    created: int = int(time.time())

    def check_name(self, name: Any) -> None:
        """Checks the model that a client names; none is this one.

        Raises:
          Refused: there is no such model.
        """
        if name is not None and not isinstance(name, str):
            raise invalid_value("model", name, "a string")
        if name is not None and name != self.name:
            raise ApiError(404, f"no model is called {name[:200]!r} here: this is {self.name!r}", "model")

    async def read_object(self, request: HttpRequest) -> dict[str, Any]:
        """The JSON object that a request brings.

        Raises:
          Refused: it is too large, comes too slowly, or is not an object in JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type is {kind[:100]!r}: send the header Content-Type: application/json")
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self.limits.body:
                        raise ApiError(413, f"the body has more than {self.limits.body} bytes, the most that is read")
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS} s") from None
        return parse_object(b"".join(parts))

    def max_new_tokens(self, longest: int, tokens: int | None, field: str, default: int | None = None) -> int:
        """Tokens to write behind a prompt.

        Args:
          longest: tokens of the longest prompt.
          tokens: that were asked for; None for `default`, or all that there is room for.
          field: that asked.
          default: at most, when none were asked for.

        Raises:
          Refused: context or limits don't have that many.
        """
        context = self.host.max_context
        longest = (
            0 if self.host.is_encoder_decoder else longest
        )  # the engine knows how long a text may be that is answered
        if longest >= context:
            raise ApiError(400, f"the prompt has {longest} tokens, and the model's context ends at {context}", "prompt")
        room = min(context - longest, self.limits.tokens)
        if tokens is None:
            return room if default is None else min(default, room)
        if tokens > self.limits.tokens:
            raise ApiError(400, f"{field} is {tokens}, and this server writes at most {self.limits.tokens}", field)
        if tokens > room:
            said = f"{longest} tokens of the prompt and {field} {tokens} are more than the context of {context} tokens"
            raise ApiError(400, f"{said}: ask for at most {room}", field)
        return tokens

    def pending_response(self) -> PendingResponse:
        """For the texts of one request."""
        return PendingResponse(self.limits.seconds)

    def completion(self, prompt: Sequence[int], sampling: Sampling, **more: Any) -> Completion:
        """A text to be written."""
        return Completion(self.tokens.decoder, tuple(prompt), sampling, **{"stop_ids": self.stop_ids, **more})


async def unless_disconnected(receive: Receive, work: Awaitable[Response]) -> Response:
    """The answer of some work, which is cancelled when the client leaves before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


Handler = Callable[[Service, HttpRequest], Awaitable[Response]]


def random_seed() -> int:
    """For texts whose request has none."""
    return secrets.randbits(63)
