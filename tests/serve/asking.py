"""Raw HTTP requests, including invalid ones that client libraries prevent."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from tests.serve.conftest import Live

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def send(
    address: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Answer:
    """Sends a request over a new connection."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())
    finally:
        connection.close()


def ask(live: Live, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Sends a request; returns status and JSON (or text). A body that is not bytes is sent as JSON."""
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    answer = send(live.address, method, path, sent, live.headers | (JSON if headers is None else headers))
    is_json = (answer.headers["Content-Type"] or "").startswith("application/json")
    return answer.status, answer.json if is_json else answer.text
