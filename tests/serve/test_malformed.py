"""Invalid requests: each gets an error message, none a 500, and the server keeps running."""

import json
import math
import socket
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import hypothesis.strategies as some
import pytest

from mtjax.serve import server, service
from tests.serve.asking import ask
from tests.serve.conftest import BODY, CONTEXT

USER = {"role": "user", "content": "the cat"}
COMPLETION, CHAT, API = "/v1/completions", "/v1/chat/completions", "/api"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": "tiny", "prompt": "the cat", "max_tokens": 1},
    CHAT: {"model": "tiny", "messages": [USER], "max_tokens": 1},
    API: {"prompts": ["the cat"], "tokens_to_generate": 1},
    "/tokenize": {"prompt": "the cat"},
    "/detokenize": {"tokens": [1, 2]},
}
texts = some.text(max_size=8)
containers = some.lists(some.none(), min_size=1, max_size=3) | some.dictionaries(texts, some.none(), min_size=1)
not_numbers = some.text(max_size=8) | some.booleans() | containers
not_whole = not_numbers | some.floats().filter(lambda x: x != x or math.isinf(x) or not x.is_integer())
not_flags = some.text(max_size=8) | some.integers() | containers
not_texts = some.integers() | some.booleans() | containers
huge = some.integers(min_value=2**64) | some.integers(max_value=-(2**63) - 1)
below_0 = some.floats(max_value=-1e-3, allow_nan=False)
NO_PROMPTS = ([], [[]], [-1], [10**6], [1.5], [["x"]], ["a", 1], "\ud800")
ROLES = ([{}], [{"role": "robot", "content": "x"}], [USER | {"role": ["user"]}], [USER | {"content": None}])
PARTS = ([USER | {"content": [{"type": "image_url"}]}], [USER | {"content": "\ud800"}])
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
KEYS = ([USER | {"bogus": 3}], [USER | {"prefix": True}], [{"role": "assistant", "content": "x", "tool_calls": [CALL]}])
NO_MESSAGES = ([], *ROLES, *PARTS, *KEYS, [{"role": "assistant", "content": "x", "refusal": "no"}])
WRONG: dict[str, dict[str, some.SearchStrategy[Any]]] = {
    COMPLETION: {
        "max_tokens": not_whole | huge | some.integers(min_value=CONTEXT),
        "n": not_whole | huge | some.integers(max_value=0),
        "seed": not_whole | huge,
        "temperature": not_numbers | below_0 | huge,
        "top_p": not_numbers | below_0 | some.floats(min_value=1.001, allow_nan=False) | some.just(0),
        "top_k": not_whole | huge,
        "min_p": not_numbers | below_0,
        "repetition_penalty": not_numbers | below_0,
        "presence_penalty": not_numbers | huge,
        "frequency_penalty": not_numbers | huge,
        "logprobs": not_whole | some.integers(min_value=21),
        "echo": not_flags,
        "stream": not_flags,
        "stop": some.integers() | some.lists(some.integers(), min_size=1) | some.just(["x"] * 17),
        "prompt": some.integers()
        | some.booleans()
        | some.sampled_from([[], [[]], [-1], [10**6], [1.5], [["x"]], ["a", 1]]),
        "suffix": some.text(min_size=1),
        "best_of": some.integers(min_value=2),
        "logit_bias": some.just({"1": 5}),
        "model": not_texts | some.text().filter(lambda name: name != "tiny"),
        "stream_options": some.just({"include_usage": True}) | not_flags,
        "nothing": some.just(1),
    },
    CHAT: {
        "messages": not_texts | some.text() | some.sampled_from(NO_MESSAGES),
        "max_completion_tokens": not_whole | huge | some.integers(min_value=CONTEXT),
        "logprobs": some.integers() | some.text(),
        "top_logprobs": some.just(2),
        "tools": some.just([{"type": "function"}]) | not_texts | some.text(max_size=8),
        "documents": some.just([{"text": "x"}]) | some.integers() | some.text(max_size=8),
        "chat_template_kwargs": some.sampled_from([[], "x", 3, {"enable_thinking": True}, {"messages": []}]),
        "tool_choice": some.sampled_from(["required", {"type": "function", "function": {"name": "f"}}, 3]),
        "response_format": some.just({"type": "json_object"}),
    },
    API: {
        "prompts": not_texts | some.sampled_from([[], ["x"] * 129, [""], ["\udfff"], "x"]),
        "tokens_to_generate": not_whole | huge | some.just(0),
        "temperature": not_numbers | some.just(0) | some.floats(min_value=100.1, allow_nan=False),
        "top_k": not_whole | some.integers(min_value=1001),
        "top_p": not_numbers | some.floats(min_value=1.001, allow_nan=False),
        "logprobs": not_flags,
        "add_BOS": not_flags,
        "random_seed": not_whole | huge | some.integers(max_value=-1),
        "beam_width": some.sampled_from([0, -1, 11, 2.5, True, "4"]),
        "length_penalty": some.sampled_from([101, -1e9, True, "1"]),
        "stop_token": some.sampled_from([-1, 2.5, True, "1"]),
        "max_len": some.just(4),
    },
    "/tokenize": {"prompt": not_texts | some.just("\ud800"), "add_special_tokens": some.text()},
    "/detokenize": {"tokens": not_flags | some.just([-1]) | some.just([10**9])},
}
CASES = [(path, field) for path, fields in WRONG.items() for field in fields]
many = hypothesis.settings(max_examples=200, suppress_health_check=list(hypothesis.HealthCheck), database=None)
values = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**70), 2**70) | some.floats() | some.text(max_size=20),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def reason(path: str, answer: Any) -> str:
    return answer if path == API else answer["error"]["message"]


@many
@hypothesis.given(data=some.data(), case=some.sampled_from(CASES))
def test_error_names_the_invalid_field(live, data, case) -> None:
    path, field = case
    value = data.draw(WRONG[path][field])
    status, answer = ask(live, "PUT" if path == API else "POST", path, GOOD[path] | {field: value})
    assert status in (400, 404), (field, value, answer)
    assert field.partition("_")[0].rstrip("s") in reason(path, answer) or "JSON" in reason(path, answer)


@hypothesis.settings(many, max_examples=100)
@hypothesis.given(path=some.sampled_from(list(GOOD)), data=some.data())
def test_arbitrary_bodies_get_a_response(live, path, data) -> None:
    names = some.sampled_from(sorted({name for _, name in CASES})) | some.text(max_size=5)
    fields = data.draw(some.dictionaries(names, values, max_size=3))
    body = data.draw(some.just(GOOD[path] | fields) | values | some.binary(max_size=30))
    status, answer = ask(live, "PUT" if path == API else "POST", path, body)
    assert status == 200 or (400 <= status < 500 and reason(path, answer)), answer


def test_invalid_bodies(live, monkeypatch) -> None:
    def status(body: bytes, **headers: str) -> tuple[int, str]:
        code, answer = ask(live, "POST", COMPLETION, body, {"Content-Type": "application/json"} | headers)
        return code, answer["error"]["message"]

    assert status(b"") == (400, status(b"")[1]) and "not JSON" in status(b"{")[1]
    assert "not JSON" in status(b"[" * 10_000)[1] and "not JSON" in status(b'{"prompt": "\xff"}')[1]
    assert "NaN" in status(b'{"prompt": "x", "temperature": NaN}')[1]
    assert "not JSON" in status(json.dumps(GOOD[COMPLETION]).encode("utf-16"))[1]
    assert status(b"x" * (BODY + 1))[0] == 413
    assert status(b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert ask(live, "GET", COMPLETION)[0] == 405 and ask(live, "POST", "/nothing", {})[0] == 404
    monkeypatch.setattr(service, "BODY_SECONDS", 0.2)
    host = urlsplit(live.address)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer other\r\nContent-Type: application/json\r\n"
    for sent, expected in (
        (f"{head}Content-Length: 50\r\n\r\n{{", b"408"),  # slow
        (f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (f"{head}Content-Length: many\r\n\r\n", b"400"),
        ("nonsense\r\n\r\n", b"400"),
        (f"{head}X: {'x' * 70_000}\r\n\r\n", b"400"),
    ):
        with socket.create_connection((host.hostname, host.port), timeout=300) as raw:
            raw.sendall(sent.encode())
            assert expected in raw.recv(4096).split(b"\r\n")[0], sent[-60:]
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    complete = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for first, slow in ((b"", b"GET /health HTTP/1.1\r\nHo"), (b"", b""), (complete, b"GET /he")):
        with socket.create_connection((host.hostname, host.port), timeout=300) as raw:
            raw.sendall(first)
            answered = b""
            while first and not answered.endswith(b"ok\n"):
                answered += raw.recv(4096)
            raw.sendall(slow)
            assert b"408" in raw.recv(4096).split(b"\r\n")[0] and raw.recv(4096) == b""
    with socket.create_connection((host.hostname, host.port)) as raw:  # and one that leaves in the middle
        raw.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
    assert ask(live, "GET", "/health", headers={}) == (200, "ok\n")


@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", COMPLETION, CHAT, API, "/tokenize", "/detokenize"])
def test_requests_without_a_key_are_rejected(live, path) -> None:
    method = "PUT" if path == API else "POST" if path in GOOD else "GET"
    for header in ("", "Bearer", "Bearer ", "Basic b3RoZXI=", "secret-key", "Bearer secret-key\xe9"):
        assert ask(live, method, path, GOOD.get(path), {"Authorization": header})[0] == 401
