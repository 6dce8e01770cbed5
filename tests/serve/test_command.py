"""The command `mtjax serve`: error messages, the documented curl commands, and SIGTERM."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from mtjax.cli import main
from mtjax.serve.command import read_keys
from tests.serve.asking import JSON, Answer, send

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"


def refused(capsys, *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("error: ") and output.err.count("\n") == 1
    return output.err


def test_what_is_wrong_is_said(folder, tmp_path, capsys, monkeypatch) -> None:
    weights = ("--from", f"hf:{folder}")
    assert "--from is missing" in refused(capsys)
    assert "port is 65536" in refused(capsys, *weights, "--port", "65536")
    assert "can't listen on 203.0.113.1" in refused(capsys, *weights, "--host", "203.0.113.1")
    assert "can't be read" in refused(capsys, *weights, "--keys", str(tmp_path / "none"))
    (tmp_path / "keys").write_text("\n\n")
    assert "has no key" in refused(capsys, *weights, "--keys", str(tmp_path / "keys"))
    (tmp_path / "keys").write_text(" one \n\ntwo\n")
    assert read_keys(tmp_path / "keys", {"MTJAX_API_KEYS": "three, four"}) == ["three", "four", "one", "two"]
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install '.[serve]'" in refused(capsys, *weights)


def curls(address: str) -> list[list[str]]:
    """Returns the curl commands of the docs, with this address, and a seed: by chance a text may end at once."""
    text = DOCS.read_text().replace("\\\n", " ").replace("http://127.0.0.1:8000", address).replace("default-1", "tiny")
    text = text.replace('"max_tokens": 24', '"max_tokens": 24, "seed": 1')
    return [shlex.split(line) for line in re.findall(r"^ {4}(curl .*)$", text, re.MULTILINE)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_as_documented_and_sigterm(folder) -> None:
    command = [
        sys.executable,
        "-m",
        "mtjax.serve",
        "--from",
        f"hf:{folder}",
        "--port",
        "0",
        "--batch",
        "1",
        "--mesh",
        "2x1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            ready = next(line for line in lines if line.startswith("ready"))
            address = re.search(r"http://\S+", ready)
            assert "'tiny'" in ready and "no API key" in ready and address is not None
            check_curl(address[0])
            check_drain(address[0], process)
            assert process.wait(300) == 0
            assert process.stderr.read().endswith("stopped\n")
        finally:
            process.kill()


def check_curl(address: str) -> None:
    one, chat, api = (subprocess.run([*command, "-sS"], capture_output=True, text=True) for command in curls(address))
    assert json.loads(one.stdout)["usage"]["completion_tokens"] > 0, one
    assert chat.stdout.endswith("data: [DONE]\n\n") and chat.stdout.startswith("data: {"), chat
    assert json.loads(api.stdout)["text"][0].startswith("The function returns"), api


def check_drain(address: str, process: subprocess.Popen[str]) -> None:
    """Checks that texts in flight are finished, and new requests rejected."""
    body = json.dumps({"prompt": "the cat", "max_tokens": 80, "n": 10}).encode()
    ask = partial(send, address, "POST", "/v1/completions", body, JSON)
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(ask()))
    waiting.start()
    while "mtjax_slots_in_use 2.0" not in send(address, "GET", "/metrics").text:
        assert waiting.is_alive()
    process.send_signal(signal.SIGTERM)
    while (health := send(address, "GET", "/health")).status == 200:
        pass
    refusal = ask()
    assert waiting.is_alive()
    assert (health.status, health.text) == (503, "stopping\n") and refusal.status == 503
    assert refusal.headers["Retry-After"] == "1"
    waiting.join()
    ends = [choice["finish_reason"] for choice in answers[0].json["choices"]]
    assert len(ends) == 10 and {*ends} <= {"length", "stop"}
