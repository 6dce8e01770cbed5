"""Serving with two processes of four devices each."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtjax.errors import LOST
from tests.serve.asking import JSON, ask, send
from tests.serve.conftest import Live

pytestmark = pytest.mark.long
Process = subprocess.Popen[str]


@contextmanager
def two(folder: Path, mesh: str) -> Iterator[tuple[str, list[Process]]]:
    """Starts two processes; yields the address and the processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "mtjax.serve", "--from", f"hf:{folder}", "--mesh", mesh, "--batch", "3"]
    command += ["--port", "0", "--coordinator", coordinator, "--num-processes", "2", "--peer-timeout", "10"]
    processes = [
        subprocess.Popen([*command, "--process-id", str(number)], stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    try:
        assert processes[0].stderr is not None
        ready = next(line for line in iter(processes[0].stderr.readline, "") if line.startswith("ready"))
        address = re.search(r"http://\S+", ready)
        assert address is not None
        yield address[0], processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def bodies_of(live: Live) -> list[dict[str, Any]]:
    """Returns request bodies for texts that end by length, by stop sequences and after scoring a prompt."""
    _, greedy = ask(live, "POST", "/v1/completions", {"prompt": "the cat", "max_tokens": 12, "temperature": 0})
    cut = greedy["choices"][0]["text"][3:5]
    return [
        {"prompt": ["the cat", "the dog went on to the end of the road"], "max_tokens": 9, "seed": 3, "n": 3},
        {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "stop": cut},
        {"prompt": "the cat and the dog", "max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True},
        {"prompt": "the cat", "max_tokens": 30, "seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 50},
    ]


def check_same(live: Live, address: str) -> None:
    """Checks that another server returns the same texts as the one of one process."""
    bodies = bodies_of(live)
    expected = [ask(live, "POST", "/v1/completions", body)[1] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        encoded = [json.dumps(body).encode() for body in bodies]
        answers = list(pool.map(lambda body: send(address, "POST", "/v1/completions", body, JSON).json, encoded))
    for answer, same in zip(answers, expected, strict=True):
        texts, others = ([choice["text"] for choice in one["choices"]] for one in (answer, same))
        assert texts == others and answer["usage"] == same["usage"]
    scores, others = (one[2]["choices"][0]["logprobs"]["token_logprobs"] for one in (answers, expected))
    assert scores[1:] == pytest.approx(others[1:], abs=1e-4)


def test_two_processes_generate_the_same_as_one(live) -> None:
    with two(live.folder, "1x8") as (address, processes):
        check_same(live, address)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(300) for process in processes] == [0, 0]


def test_replicas_in_two_processes_share_the_load_and_exit_if_one_is_lost(live) -> None:
    with two(live.folder, "4x2") as (address, processes):
        check_same(live, address)
        page = send(address, "GET", "/metrics").text
        written = re.findall(r'mtjax_replica_generated_tokens_total\{replica="\d"\} (\S+)', page)
        assert len(written) == 4 and all(float(count) > 0 for count in written)
        processes[1].send_signal(signal.SIGKILL)
        _, output = processes[0].communicate(timeout=300)
        assert processes[0].returncode == LOST
        error = next(line for line in output.splitlines() if line.startswith("error: "))
        assert error.startswith("error: process 1 (") and error.endswith("start the server again")
