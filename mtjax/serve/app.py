"""The routes, and what is true of all of them: keys, errors, counting."""

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
"""Megatron-LM's."""


def make_app(service: Service) -> ASGIApp:
    """The application of a service."""

    def route(path: str, handler: Handler, method: str = "GET", *, open_to_all: bool = False) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            if not open_to_all:
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
        route("/health", health, open_to_all=True),
        route("/metrics", metrics, open_to_all=True),
        route("/", page, open_to_all=True),
    ]
    paths = [one.path for one in routes]

    async def refused(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(as_text=request.url.path == API)

    async def unknown(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        said = f"no path is called {path[:200]!r}{nearest(path, paths)}"
        if error.status_code == 405:
            said = f"{path} does not take {method[:20]}, but {(error.headers or {}).get('Allow', 'another method')}"
        answer = ApiError(error.status_code, said).response()
        answer.headers.update(error.headers or {})
        return answer

    async def left(request: HttpRequest, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    handlers: dict[Any, Callable[[HttpRequest, Exception], Any]] = {
        ApiError: refused,
        HTTPException: unknown,
        ClientDisconnect: left,
    }
    return Counting(Starlette(routes=routes, exception_handlers=handlers), service, frozenset(paths))


class Counting:
    """Counts answers by path and status; an error that nobody expected is answered too, and written to the log."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        code = CLIENT_CLOSED_REQUEST

        async def sending(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                if self._service.host.draining:  # the connection is not for another request
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.host.metrics.requests.labels(path, str(code)).inc()


async def models(service: Service, request: HttpRequest) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_described(service)]})


async def model(service: Service, request: HttpRequest) -> Response:
    """It, by name.

    Raises:
      Refused: there is no such model.
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
    """Whether the server takes requests."""
    host = service.host
    state = "failed" if host.failure is not None else "stopping" if host.draining else "ok"
    return PlainTextResponse(f"{state}\n", 200 if state == "ok" else 503)


async def metrics(service: Service, request: HttpRequest) -> Response:
    """For Prometheus."""
    return Response(service.host.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def page(service: Service, request: HttpRequest) -> Response:
    """A page to try the model in a browser; it loads nothing from anywhere else."""
    rules = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {"Content-Security-Policy": f"{rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
    return HTMLResponse(files("mtjax.serve").joinpath("page.html").read_text(encoding="utf-8"), headers=headers)
