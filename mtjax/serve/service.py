"""What all endpoints share: the model's name, tokenizer, engines, limits and API keys."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
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
"""Timeout for the body of a request."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status if the client has disconnected."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body: int
    """Bytes of the body."""
    tokens: int
    """Generated tokens of each text."""
    seconds: float
    """Timeout, including the time in the queue."""


class Keys:
    """The valid API keys, which are compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str) -> None:
        """Checks the header `Authorization: Bearer KEY`; without any valid keys, all requests are accepted.

        Raises:
          ApiError: the key is missing or invalid.
        """
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        # No early exit, and digests of equal length: the time reveals neither which key matches nor its length.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            problem = "is invalid" if key else "is missing"
            raise ApiError(401, f"the API key {problem}: send the header Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
      name: the model's name in requests.
      tokens: the tokenizer.
      stop_ids: tokens that end a text.
      host: the engines.
      limits: limits of a request.
      keys: the valid API keys.
      created: when the service was built, in seconds since 1970; `/v1/models` lists it.
    """

    name: str
    tokens: Tokens
    stop_ids: frozenset[int]
    host: Host
    limits: Limits
    keys: Keys
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: Any) -> None:
        """Checks a request's model name, which may be None.

        Raises:
          ApiError: it is not the name of this model.
        """
        if name is not None and not isinstance(name, str):
            raise invalid_value("model", name, "a string")
        if name is not None and name != self.name:
            raise ApiError(404, f"unknown model {name[:200]!r}: this server has {self.name!r}", "model")

    async def read_object(self, request: HttpRequest) -> dict[str, Any]:
        """Reads the JSON object of a request's body.

        Raises:
          ApiError: the body is too large, takes too long, or is not a JSON object.
        """
        # A browser can send application/json to another origin only after a CORS preflight, which this server rejects.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type is {kind[:100]!r}: send the header Content-Type: application/json")
        chunks, size = [], 0
        try:
            # A client that sends a byte now and then would keep its connection forever.
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self.limits.body:
                        raise ApiError(413, f"the body has more than {self.limits.body} bytes, the server's limit")
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, f"the body was not received within {BODY_SECONDS} s") from None
        return parse_object(b"".join(chunks))

    def max_new_tokens(self, longest: int, tokens: int | None, field: str, default: int | None = None) -> int:
        """Returns the maximum number of tokens to generate after a prompt.

        Args:
          longest: tokens of the longest prompt.
          tokens: the requested maximum; None for `default`.
          field: name of the request's field, for error messages.
          default: default maximum; None for all that context and limits allow.

        Raises:
          ApiError: context or limits do not allow as many tokens.
        """
        context = self.host.max_context
        longest = (
            0 if self.host.is_encoder_decoder else longest
        )  # the prompt is in the encoder, whose limit the engine checks
        if longest >= context:
            raise ApiError(
                400, f"the prompt has {longest} tokens, and the model's context length is {context}", "prompt"
            )
        available = min(context - longest, self.limits.tokens)
        if tokens is None:
            return available if default is None else min(default, available)
        if tokens > self.limits.tokens:
            raise ApiError(400, f"{field} is {tokens}, and the server's limit is {self.limits.tokens}", field)
        if tokens > available:
            message = f"{longest} prompt tokens and {field} {tokens} exceed the context length of {context}"
            raise ApiError(400, f"{message}: use at most {available}", field)
        return tokens

    def pending_response(self) -> PendingResponse:
        """Creates the pending response of a request."""
        return PendingResponse(self.limits.seconds)

    def completion(self, prompt: Sequence[int], sampling: Sampling, **more: Any) -> Completion:
        """Creates the completion of a prompt."""
        more = {"stop_ids": self.stop_ids, "continues": not self.host.is_encoder_decoder, **more}
        return Completion(self.tokens.decoder, tuple(prompt), sampling, **more)


async def answered(host: Host, pending: PendingResponse, receive: Receive, work: Awaitable[Response]) -> Response:
    """Awaits a response, and cancels its texts if it is not completed."""
    try:
        return await _unless_disconnected(receive, work)
    finally:
        # Texts of a client that has gone would keep their slots until their last token.
        host.cancel(pending)


async def _unless_disconnected(receive: Receive, work: Awaitable[Response]) -> Response:
    """Awaits a response; cancels it if the client disconnects before."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    response, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({response, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return response.result() if response.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (response, disconnect):
            task.cancel()
        # Awaited after they were cancelled, or asyncio would report exceptions that were not retrieved.
        await asyncio.gather(response, disconnect, return_exceptions=True)


Handler = Callable[[Service, HttpRequest], Awaitable[Response]]


def random_seed() -> int:
    """Returns the seed for a request without one."""
    return secrets.randbits(63)
