"""The ASGI application: routes, authentication, error responses and request metrics."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtjax.errors import nearest
from mtjax.serve import chats, completions, megatron, vocabulary
from mtjax.serve.api_error import ApiError, json_response
from mtjax.serve.service import CLIENT_CLOSED_REQUEST, Handler, Service

API = "/api"
"""Megatron-LM's path."""


def make_app(service: Service) -> ASGIApp:
    """Builds the ASGI application of a service."""

    def route(path: str, handler: Handler, method: str = "GET", *, is_public: bool = False) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            if not is_public:
                service.keys.check(request.headers.get("authorization", ""))
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/v1/completions", completions.create_completion, "POST"),
        route("/v1/chat/completions", chats.create_chat_completion, "POST"),
        route("/v1/models", models),
        route("/v1/models/{name:path}", model),
        route("/tokenize", vocabulary.tokenize, "POST"),
        route("/detokenize", vocabulary.detokenize, "POST"),
        route("/tokenizer_info", vocabulary.tokenizer_info),
        route(API, megatron.generate, "PUT"),
        # Without a key: load balancers and Prometheus have none, and the page asks for one.
        route("/health", health, is_public=True),
        route("/metrics", metrics, is_public=True),
        route("/", page, is_public=True),
    ]
    paths = [one.path for one in routes]

    async def on_api_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(as_text=request.url.path == API)

    async def on_http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        # Starlette's own answers are plain text, not OpenAI's JSON.
        message = f"unknown path {path[:200]!r}{nearest(path, paths)}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} does not support the method {method[:20]}: use {allowed}"
        response = ApiError(error.status_code, message).response()
        # `Allow` of status 405, which HTTP requires.
        response.headers.update(error.headers or {})
        return response

    async def on_disconnect(request: HttpRequest, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    handlers: dict[Any, Callable[[HttpRequest, Exception], Any]] = {
        ApiError: on_api_error,
        HTTPException: on_http_error,
        ClientDisconnect: on_disconnect,
    }
    return Counting(Starlette(routes=routes, exception_handlers=handlers), service, frozenset(paths))


class Counting:
    """Middleware that counts responses by path and status, and closes connections while the server drains."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request and counts its response."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Kept if the response never starts.
        code = CLIENT_CLOSED_REQUEST

        async def counting_send(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                if self._service.host.draining:  # so that the client does not reuse the connection
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            # Clients choose paths: a label for each of them would let the metrics grow without limit.
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.host.metrics.requests.labels(path, str(code)).inc()


async def models(service: Service, request: HttpRequest) -> Response:
    """Lists the model."""
    return json_response({"object": "list", "data": [_described(service)]})


async def model(service: Service, request: HttpRequest) -> Response:
    """Describes the model with a given name.

    Raises:
      ApiError: the name is not that of the model.
    """
    service.check_name(request.path_params["name"])
    return json_response(_described(service))


def _described(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mtjax",
        "max_model_len": service.host.max_context,
    }


async def health(service: Service, request: HttpRequest) -> Response:
    """Returns the state: "ok", or with status 503 "stopping" or "failed"."""
    host = service.host
    state = "failed" if host.failure is not None else "stopping" if host.draining else "ok"
    return PlainTextResponse(f"{state}\n", 200 if state == "ok" else 503)


async def metrics(service: Service, request: HttpRequest) -> Response:
    """Returns the metrics in Prometheus' text format."""
    return Response(service.host.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def page(service: Service, request: HttpRequest) -> Response:
    """Returns a web page to try the model; it loads no external resources."""
    # Only inline scripts and styles, and requests to this server.
    rules = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {"Content-Security-Policy": f"{rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
    return HTMLResponse(files("mtjax.serve").joinpath("page.html").read_text(encoding="utf-8"), headers=headers)
