"""What `mtjax serve` does: loads the weights, and serves them."""

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
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.weights import LoadedModel, describe_config, load_model
from mtjax.serve.host import Host
from mtjax.serve.options import KEYS, Options
from mtjax.serve.replicas import Replica, ReplicaEngine, replica_engines, replicas_on, run_worker
from mtjax.serve.server import Server, address_of, listen
from mtjax.serve.service import Keys, Limits, Service
from mtjax.serve.tokens import Tokens
from mtjax.theory.mesh import check_no_context_parallel, parse_mesh
from mtjax.train.compile_cache import CompileCache
from mtjax.train.processes.coordination import this_process
from mtjax.train.processes.peers import Peers


def run(options: Options) -> None:
    """Serves until SIGTERM or Ctrl-C. Of several processes the first one does, and the others work for it.

    Raises:
      UserError: weights, keys or the address are wrong.
    """
    keys = read_keys(options.keys, os.environ)
    given = {name: getattr(options, name) for name in ("mesh", "coordinator", "num_processes", "process_id")}
    parallel = Parallel(**given, peer_timeout=options.peer_timeout)
    with CompileCache(options.compile_cache), Peers(parallel) as peers:
        peers.advice = "start the server again"
        if this_process():
            for number in (signal.SIGTERM, signal.SIGINT):  # process 0 says when it is over
                signal.signal(number, signal.SIG_IGN)
            served = load(options, peers.count)
            return run_worker(served.local, served.engines, this_process())
        with listen(options.host, options.port) as bound:
            served = load(options, peers.count)
            serve(options, keys, replica_engines(served.replicas, served.engines, options.batch), served.model, bound)
    return None


@dataclass(frozen=True)
class Loaded:
    """What a process serves with."""

    replicas: list[Replica]
    """All of them."""
    local: list[Replica]
    """Those that this process works on."""
    engines: list[Engine]
    """Of each of these."""
    model: LoadedModel
    """Without its weights."""


def load(options: Options, processes: int) -> Loaded:
    """An engine for each replica that this process works on.

    Raises:
      UserError: the weights are wrong, or the mesh does not divide over the processes.
    """
    shape = parse_mesh(options.mesh)
    check_no_context_parallel(shape)
    replicas = replicas_on(shape, processes)
    own = [replica for replica in replicas if this_process() in replica.processes]
    given = (str(shape.replica_shape), options.dtype, options.tokenizer)
    model = load_model(options.source, *given, devices=own[0].mesh)
    if this_process() == 0:
        count = f" ({len(replicas)} replicas)" if len(replicas) > 1 else ""
        say(f"model   {describe_config(model.placed.config, model.parameters)}{count}")
    engines = []
    for replica in own:
        placed = model if replica is own[0] else model.on(replica.mesh)
        decoder = Decoder(placed.placed, placed.parameters, placed.start_id, int8=options.weights_dtype == "int8")
        engines.append(Engine(decoder, options.batch))
    return Loaded(replicas, own, engines, replace(model, parameters=None))  # their memory is free again


def serve(
    options: Options,
    keys: Sequence[str],
    engines: Sequence[ReplicaEngine],
    model: LoadedModel,
    bound: socket.socket,
) -> None:
    """Serves at an address.

    Raises:
      UserError: the model's chat template can't be read.
    """
    host = Host(engines, options.batch, options.most_waiting)
    limits = Limits(options.most_body, options.most_tokens or host.max_context, options.most_seconds)
    name = options.name or Path(options.source.rpartition(":")[2]).resolve().name
    tokens = Tokens(model.tokenizer, model.folder, model.first_ids, model.prompt_ids)
    service = Service(name, tokens, model.stop_ids, host, limits, Keys(keys))

    def ready() -> None:
        whom = f"{len(keys)} API key{'s' * (len(keys) > 1)}" if keys else "no API key is asked for"
        say(f"ready   {service.name!r} at {address_of(bound)} ({whom})")

    Server(service, options.drain_seconds, ready).run([bound])
    if host.failure is not None:
        raise host.failure
    say("stopped")


def read_keys(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """API keys of a file and of the environment.

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
            raise UserError(f"--keys {file} has no key: write one a line, or leave the option out")
        keys += lines
    return [key for key in keys if key]
