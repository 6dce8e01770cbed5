"""Remote replicas, with threads in place of processes: listeners get the same events as from a local engine."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest

pytest.importorskip("starlette", reason="needs the extra serve: pip install '.[serve]'")

from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.layout.mesh import parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.serve import kv_mailbox, lockstep
from mtjax.serve.lockstep import LockstepLeader, follow
from mtjax.serve.remote_replica import RemoteReplica, serve_replica
from mtjax.serve.replicas import replicas_on
from tests.tiny import drawn_parameters, mesh_of, tiny_config


class Service:
    """A fake of jax's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


@dataclass
class RecordedEvents:
    """The events of a request."""

    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def request(self, ids: tuple[int, ...], sampling: Sampling, last: Callable[[int], bool], **options: Any) -> Request:
        def on_token(token: Token) -> bool:
            self.tokens.append(token)
            return last(len(self.tokens))

        listeners = {"on_token": on_token, "on_prompt": self.prompt.extend, "on_end": self.ends.append}
        return Request(ids, sampling, **options, **listeners)


def ask(engine: Engine | RemoteReplica) -> list[RecordedEvents]:
    """Submits five requests: sampled, with log-probabilities, ended by the listener, by a stop token, and cancelled."""
    recorded = [RecordedEvents() for _ in range(5)]
    drawn = Sampling(12, temperature=1.5, seed=3)
    never, third = (lambda count: False), (lambda count: count == 3)
    engine.submit(recorded[0].request((5, 6, 7), drawn, never))
    engine.submit(recorded[1].request((8, 9), Sampling(4), never, logprobs=True, echo=True))
    engine.submit(recorded[2].request((5, 6), drawn, third))
    engine.submit(recorded[3].request((7,), Sampling(40, 1.5, seed=1), never, stop_ids=frozenset(range(0, 250, 3))))
    engine.submit(left := recorded[4].request((1, 2, 3), Sampling(60), never))
    engine.cancel(left)
    engine.run()
    return recorded


@pytest.mark.long
def test_remote_replica_of_two_processes_equals_local_engine(monkeypatch) -> None:
    placed = ShardedModel(tiny_config(init_std=0.3, sequence_length=64), mesh_of("1x1"))
    decoder, service = GenerationPrograms(placed, drawn_parameters(placed)), Service()
    for module in (kv_mailbox, lockstep):
        monkeypatch.setattr(module, "service", lambda: service)
    monkeypatch.setattr(kv_mailbox, "POLL_MS", 200)
    local, first, second = (Engine(decoder, 2, chunks=(8,), min_cache_length=64) for _ in range(3))
    expected = ask(local)
    assert [events.ends for events in expected] == [["length"], ["length"], ["stop"], ["stop"], ["cancelled"]]
    leader = threading.Thread(target=serve_replica, args=(LockstepLeader(first, 1), 1), daemon=True)
    follower = threading.Thread(target=follow, args=(second, 1), daemon=True)
    for thread in (leader, follower):
        thread.start()
    remote, stopped = RemoteReplica(1, local, 2), threading.Event()
    for _ in range(2):
        assert ask(remote) == expected
        assert remote.load == first.load == (0, 0)
    with pytest.raises(UserError, match="the prompt has the token id 999, and the vocabulary has ids from 0 to 249"):
        remote.submit(Request((999,)))
    stopped.set()
    remote.wake()
    remote.run(stopped)
    for thread in (leader, follower):
        thread.join(120)
        assert not thread.is_alive()
    assert second.load == (0, 0) and not [key for key in service.values if "plan" not in key]


def test_process_has_full_replicas_or_part_of_one() -> None:
    assert [replica.processes for replica in replicas_on(parse_mesh("1x1"), 1)] == [[0]]
    with pytest.raises(UserError, match="mesh 3x2 gives each of 2 processes 3 devices"):
        replicas_on(parse_mesh("3x2"), 2)
