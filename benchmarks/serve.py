"""Load test of `mtjax serve`: clients that request texts of random lengths, some of which disconnect early.

    python benchmarks/serve.py --from hf:FOLDER --clients 200 --seconds 120

Starts a server with a short queue, so that some requests are rejected, and sends requests from one process. Every
request must get a complete response, be rejected with 429, or be one whose client disconnected; the same prompt and
seed must give the same text each time; at the end nothing may be in flight; and the server's memory is sampled each
second. Results go to benchmarks/results/serve-load.json; the exit code is 1 if a request was lost.
"""

import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

RESULT = Path(__file__).parent / "results" / "serve-load.json"
CASES = 64
"""Number of different prompts, each with its seed."""


@dataclass(frozen=True)
class Options:
    """The load."""

    source: Annotated[str, tyro.conf.arg(name="from")]
    """Weights, named as for `mtjax serve`."""
    clients: int = 200
    """Number of concurrent clients."""
    seconds: float = 120
    """Duration of the load."""
    leaving: float = 0.15
    """Fraction of requests whose client disconnects early."""
    batch: int = 16
    """Sequences that the server generates at a time."""
    most_waiting: int = 128
    """Maximum number of texts in the server's queue."""
    longest: int = 64
    """Maximum tokens of a text."""


@dataclass
class Load:
    """State and counts of the load."""

    options: Options
    port: int
    codes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    waits: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """The longest text of each case."""
    lost: list[str] = field(default_factory=list)

    async def client(self, number: int, end: float) -> None:
        """Sends requests until the end."""
        rng = random.Random(number)
        while time.monotonic() < end:
            case, tokens, stream = rng.randrange(CASES), rng.randint(1, self.options.longest), rng.random() < 0.5
            leaves = rng.expovariate(4) if rng.random() < self.options.leaving else None
            code = await self.ask(case, tokens, stream, leaves)
            self.codes[code] += 1
            if code == "429":
                await asyncio.sleep(rng.uniform(0.5, 1.5))

    async def ask(self, case: int, tokens: int, stream: bool, leaves: float | None) -> str:
        """Sends a request; returns its status, or "left"."""
        rng = random.Random(case)
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 24))]
        fields = {"prompt": prompt, "seed": case, "max_tokens": tokens, "stream": stream, "temperature": 1.0}
        start = time.monotonic()
        try:
            async with asyncio.timeout(leaves):
                code, body = await post(self.port, fields)
        except TimeoutError:
            return "left"
        except (OSError, asyncio.IncompleteReadError, ValueError) as e:
            self.lost.append(f"{type(e).__name__}: {e}")
            return "broken"
        if code == 200:
            self.waits.append(time.monotonic() - start)
            self.check(case, tokens, body, stream)
        elif code != 429:
            self.lost.append(f"{code}: {body[:200]}")
        return str(code)

    def check(self, case: int, tokens: int, body: str, stream: bool) -> None:
        """Checks that a response is complete, and that its text agrees with other texts of its case."""
        if stream:
            *events, done = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
            choices = [json.loads(event)["choices"][0] for event in events]
            ended, is_complete = choices[-1]["finish_reason"], done == "[DONE]"
        else:
            response = json.loads(body)
            choices = response["choices"]
            ended, count = choices[0]["finish_reason"], response["usage"]["completion_tokens"]
            is_complete = ended == "stop" or count == tokens
            self.tokens += count
        text = "".join(choice["text"] for choice in choices)
        known = self.texts.setdefault(case, text)
        shorter, longer = sorted((text.rstrip("\ufffd"), known.rstrip("\ufffd")), key=len)
        if not (is_complete and ended in ("length", "stop") and longer.startswith(shorter)):
            self.lost.append(f"case {case}: {text!r} after {known!r}, {ended}")
        self.texts[case] = max(text, known, key=len)


async def post(port: int, fields: dict[str, Any]) -> tuple[int, str]:
    """Requests a completion over a new connection; returns status and body."""
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return await exchange(port, f"{head}\r\nConnection: close\r\n\r\n".encode() + body)


async def get(port: int, path: str) -> str:
    return (await exchange(port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()))[1]


async def exchange(port: int, request: bytes) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        code, body = int(head.split()[1]), b""
        if "transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
        else:
            body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        return code, body.decode()
    finally:
        writer.close()


async def numbers(port: int) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in (await get(port, "/metrics")).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def in_flight(counted: dict[str, float]) -> float:
    return counted["mtjax_slots_in_use"] + counted["mtjax_texts_waiting"]


def resident(process: int) -> float:
    """Returns the resident memory of a process in megabytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def sample(process: int, memory: list[float]) -> None:
    while True:
        memory.append(resident(process))
        await asyncio.sleep(1)


async def run(options: Options) -> int:
    arguments = ["--batch", str(options.batch), "--most-waiting", str(options.most_waiting), "--port", "0"]
    command = [sys.executable, "-m", "mtjax.serve", "--from", options.source, *arguments]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert server.stderr is not None
    try:
        while not (line := (await server.stderr.readline()).decode()).startswith("ready"):
            print(line, end="")
            assert line, "the server has ended"
        load = Load(options, int(line.split("http://127.0.0.1:")[1].split()[0]))
        await asyncio.gather(*(load.ask(case, options.longest, False, None) for case in range(CASES)))  # compiles
        load.waits, load.tokens, memory, start = [], 0, list[float](), time.monotonic()
        sampling = asyncio.create_task(sample(server.pid, memory))
        before = await numbers(load.port)
        await asyncio.gather(*(load.client(i, start + options.seconds) for i in range(options.clients)))
        seconds = time.monotonic() - start
        sampling.cancel()
        after = await numbers(load.port)
        for _ in range(100):  # the server is still cancelling requests whose clients disconnected last
            if not in_flight(after):
                break
            await asyncio.sleep(0.1)
            after = await numbers(load.port)
        server.send_signal(signal.SIGTERM)
        code = await server.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
    result = report(load, memory, before, after, seconds) | {"exit_code": code}
    print(json.dumps(result, indent=2))
    print(*load.lost[:5], sep="\n")
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(load.lost or in_flight(after) or code))


def report(
    load: Load, memory: list[float], before: dict[str, float], after: dict[str, float], seconds: float
) -> dict[str, Any]:
    gained = {name: after[name] - before.get(name, 0) for name in after}
    ended = {
        reason: gained.get(f'mtjax_texts_total{{ended="{reason}"}}', 0.0) for reason in ("length", "stop", "cancelled")
    }
    third, waits = len(memory) // 3, sorted(load.waits)
    return {
        "date": f"{datetime.date.today()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("jax", "starlette", "uvicorn")},
        "options": {name: value for name, value in vars(load.options).items() if name != "source"},
        "seconds": round(seconds, 1),
        "requests": dict(load.codes),
        "lost": len(load.lost),
        "texts_ended": ended,
        "tokens_per_second": round(gained["mtjax_generated_tokens_total"] / seconds, 1),
        "seconds_to_answer": {
            "median": round(statistics.median(waits), 2),
            "99th percentile": round(waits[int(0.99 * len(waits))], 2),
        },
        "megabytes": {
            "start": round(memory[0], 1),
            "after a third": round(memory[third], 1),
            "after two thirds": round(memory[2 * third], 1),
            "end": round(memory[-1], 1),
            "most": round(max(memory), 1),
        },
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(run(tyro.cli(Options, description=__doc__))))
