"""The command `mtjax serve`: loads the weights and serves them."""

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtjax.config import Parallel
from mtjax.data.json_lines import read_lines
from mtjax.data.progress import say
from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.weights import LoadedModel, describe_config, load_model
from mtjax.layout.generation_mesh import check_generation_mesh
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.compile_cache import CompileCache
from mtjax.runtime.processes.coordination import this_process
from mtjax.runtime.processes.peers import Peers
from mtjax.serve.host import Host
from mtjax.serve.options import KEYS, Options
from mtjax.serve.replicas import Replica, ReplicaEngine, replica_engines, replicas_on, run_worker
from mtjax.serve.server import HTTPServer, address_of, listen
from mtjax.serve.service import Keys, Limits, Service
from mtjax.serve.tokens import Tokens


def run(options: Options) -> None:
    """Serves until SIGTERM or Ctrl-C; with multiple processes, process 0 serves and the others are its workers.

    Raises:
      UserError: weights, API keys or the address are invalid.
    """
    keys = read_keys(options.keys, os.environ)
    given = {name: getattr(options, name) for name in ("mesh", "coordinator", "num_processes", "process_id")}
    parallel = Parallel(**given, peer_timeout=options.peer_timeout)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        peers.advice = "start the server again"
        if this_process():
            for number in (signal.SIGTERM, signal.SIGINT):  # only process 0 decides when to stop
                signal.signal(number, signal.SIG_IGN)
            loaded = load(options, peers.count)
            return run_worker(loaded.local, loaded.engines, this_process())
        # Bound before the weights are loaded, so that an unavailable address fails at once.
        with listen(options.host, options.port) as bound:
            loaded = load(options, peers.count)
            serve(options, keys, replica_engines(loaded.replicas, loaded.engines, options.batch), loaded.model, bound)
    return None


@dataclass(frozen=True)
class Loaded:
    """Replicas, engines and model of a process."""

    replicas: list[Replica]
    """All replicas."""
    local: list[Replica]
    """Those with devices of this process."""
    engines: list[Engine]
    """An engine for each of the local replicas."""
    model: LoadedModel
    """The model without its weights."""


def load(options: Options, processes: int) -> Loaded:
    """Loads the weights and builds an engine for each replica with devices of this process.

    Raises:
      UserError: the weights are invalid, or the mesh can't be divided among the processes.
    """
    mesh_shape = parse_mesh(options.mesh)
    check_generation_mesh(mesh_shape)
    replicas = replicas_on(mesh_shape, processes)
    local = [replica for replica in replicas if this_process() in replica.processes]
    given = (str(mesh_shape.replica_shape), options.dtype, options.tokenizer)
    model = load_model(
        options.source,
        *given,
        # Only this replica's devices: `model.on` copies the weights to the others from memory.
        devices=local[0].mesh,
        storage=options.storage,
        state_snapshots=options.state_snapshots,
    )
    if this_process() == 0:
        count = f" ({len(replicas)} replicas)" if len(replicas) > 1 else ""
        say(f"model   {describe_config(model.sharded_model.config, model.parameters)}{count}")
    engines = []
    for replica in local:
        loaded = model if replica is local[0] else model.on(replica.mesh)
        decoder = GenerationPrograms(
            loaded.sharded_model,
            loaded.parameters,
            loaded.start_id,
            storage=options.storage,
            grids=loaded.grids,
        )
        engines.append(Engine(decoder, options.batch, state_snapshots=options.state_snapshots))
    return Loaded(
        replicas, local, engines, replace(model, parameters=None, grids=())
    )  # frees their memory: the decoders have converted them


def serve(
    options: Options,
    keys: Sequence[str],
    engines: Sequence[ReplicaEngine],
    model: LoadedModel,
    bound: socket.socket,
) -> None:
    """Serves the model on a bound socket.

    Raises:
      UserError: the model's chat template is invalid.
    """
    host = Host(engines, options.batch, options.most_waiting)
    limits = Limits(options.most_body, options.most_tokens or host.max_context, options.most_seconds)
    # The folder behind `hf:` and the like; resolved, as a path may end in "..".
    name = options.name or Path(options.source.rpartition(":")[2]).resolve().name
    tokens = Tokens(model.tokenizer, model.folder, model.first_ids, model.prompt_ids)
    service = Service(name, tokens, model.stop_ids, host, limits, Keys(keys))

    def ready() -> None:
        access = f"{len(keys)} API key{'s' * (len(keys) > 1)}" if keys else "no API key is required"
        say(f"ready   {service.name!r} at {address_of(bound)} ({access})")

    HTTPServer(service, options.drain_seconds, ready).run([bound])
    if host.failure is not None:
        raise host.failure
    say("stopped")


def read_keys(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Reads API keys from a file and from the environment.

    Raises:
      UserError: the file can't be read, or has no key.
    """
    keys = [key.strip() for key in environment.get(KEYS, "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in read_lines(file)]
        except UserError as e:
            raise UserError(f"--keys {e}") from e
        if not any(lines):
            raise UserError(f"--keys {file} has no key: write one key a line, or remove the option")
        keys += lines
    return [key for key in keys if key]
