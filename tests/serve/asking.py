"""Plain HTTP, as no client library would let one ask."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from tests.serve.conftest import Live

JSON = {"Content-Type": "application/json"}


def ask(live: Live, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and JSON (or text) of an answer; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(live.address).netloc, timeout=60)
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, live.headers | (JSON if headers is None else headers))
        answer = connection.getresponse()
        text, kind = answer.read().decode(), answer.getheader("Content-Type") or ""
        return answer.status, json.loads(text) if kind.startswith("application/json") else text
    finally:
        connection.close()
