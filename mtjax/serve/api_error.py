"""A request that is answered with an error, and how errors are written."""

import json
from typing import Any

from starlette.responses import Response

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""OpenAI's `type` of an error, by status; others are `invalid_request_error`."""
RETRY_SECONDS = 1
"""What `Retry-After` says with 429 and 503."""


class ApiError(Exception):
    """Ends a request with an error.

    Args:
      status: of HTTP.
      message: what was wrong, with the value, and what to do.
      field: of the request's body that was wrong.
    """

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field

    def body(self) -> dict[str, Any]:
        """As OpenAI writes errors."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.status}}

    def response(self, *, as_text: bool = False) -> Response:
        """The answer; with `as_text` the message alone, as Megatron-LM has it."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return json_response(self.message if as_text else self.body(), self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(as_json(content), status, headers, "application/json")


def as_json(content: Any) -> bytes:
    """JSON in UTF-8; halves of characters, which a client may have sent, become question marks."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
