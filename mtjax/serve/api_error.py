"""Error responses."""

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
"""OpenAI's error `type` by HTTP status; all others are `invalid_request_error`."""
RETRY_SECONDS = 1
"""Seconds in the header `Retry-After` of statuses 429 and 503."""


class ApiError(Exception):
    """Ends a request with an error response.

    Args:
      status: HTTP status.
      message: what is wrong, the value, and what to do.
      field: the invalid field of the request's body.
    """

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's JSON format."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.status}}

    def response(self, *, as_text: bool = False) -> Response:
        """Builds the response; with `as_text` its body is the message only, as in Megatron-LM."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return json_response(self.message if as_text else self.body(), self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Builds a JSON response."""
    return Response(as_json(content), status, headers, "application/json")


def as_json(content: Any) -> bytes:
    """Encodes JSON as UTF-8; lone surrogates, which a client may have sent, become question marks."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
