"""One server for all tests of this folder, in a thread, with a tiny GPT-2 of random weights."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from tests.convert.hf_folders import GPT2_CONFIG, HIDDEN, gpt2_shapes, random_tensors, write_folder

pytest.importorskip("starlette", reason="needs the extra serve: pip install '.[serve]'")

from mtjax.serve.command import load
from mtjax.serve.host import Host
from mtjax.serve.options import Options
from mtjax.serve.server import HTTPServer, address_of, listen
from mtjax.serve.service import Keys, Limits, Service
from mtjax.serve.tokens import Tokens

CONTEXT, SLOTS, WAITING, BODY, KEY = 96, 4, 36, 20_000, "secret-key"
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@dataclass(frozen=True)
class Live:
    """A running server."""

    address: str
    service: Service
    folder: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Builds a GPT-2 with random weights and a chat template."""
    shapes = gpt2_shapes() | {"transformer.wpe.weight": (CONTEXT, HIDDEN)}
    config = GPT2_CONFIG | {"n_positions": CONTEXT}
    folder = write_folder(tmp_path_factory.mktemp("hf") / "tiny", random_tensors(shapes), config, tokenizer=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def live(folder) -> Iterator[Live]:
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    with served(folder, SLOTS) as live:
        yield live


@contextmanager
def served(folder: Path, sequences: int, mesh: str = "1x1") -> Iterator[Live]:
    """Runs a server of these weights in a thread."""
    loaded = load(Options(f"hf:{folder}", mesh=mesh, batch=sequences), processes=1)
    host, model = Host(loaded.engines, sequences, WAITING), loaded.model
    limits = Limits(BODY, host.max_context, 60)
    tokens = Tokens(model.tokenizer, model.folder, model.first_ids, model.prompt_ids)
    service = Service(folder.name, tokens, model.stop_ids, host, limits, Keys([KEY, "other"]))
    bound, ready = listen("127.0.0.1", 0), threading.Event()
    server = HTTPServer(service, 10, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), name="server")
    thread.start()
    assert ready.wait(300)
    yield Live(address_of(bound), service, folder)
    server.drain()
    thread.join(120)
    bound.close()
    assert not thread.is_alive() and host.failure is None
