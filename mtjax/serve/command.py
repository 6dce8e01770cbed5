"""What `mtjax serve` does: loads the weights, and serves them."""

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mtjax.config import Parallel
from mtjax.data.progress import say
from mtjax.errors import UserError
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.weights import LoadedModel, config_in_words, load_model
from mtjax.serve.host import Host
from mtjax.serve.options import KEYS, Options
from mtjax.serve.server import Server, address_of, listen
from mtjax.serve.service import Keys, Limits, Service
from mtjax.serve.together import Leader, follow
from mtjax.serve.tokens import Tokens
from mtjax.sharding.mesh import attach_devices, replicas_of
from mtjax.theory.mesh import parse_mesh
from mtjax.train.compile_cache import CompileCache
from mtjax.train.processes.exchange import this_process
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
            (engine,), _ = load(options, peers.count)
            return follow(engine)
        with listen(options.host, options.port) as bound:
            engines, model = load(options, peers.count)
            serve(options, keys, [Leader(engines[0])] if peers.count > 1 else engines, model, bound)
    return None


def load(options: Options, processes: int) -> tuple[list[Engine], LoadedModel]:
    """An engine for each data way - of several processes one, for all of them -, and the model without its weights.

    Raises:
      UserError: the weights are wrong.
    """
    shape = parse_mesh(options.mesh)
    rows = [None] if processes > 1 or shape == shape.of_replica else replicas_of(attach_devices(shape))
    one = options.mesh if len(rows) == 1 else str(shape.of_replica)
    model = load_model(options.source, one, options.dtype, options.tokenizer, processes)
    if this_process() == 0:
        replicas = f" ({len(rows)} replicas)" if len(rows) > 1 else ""
        say(f"model   {config_in_words(model.placed.config, model.parameters)}{replicas}")
    engines = []
    for row in rows:
        own = model if row is None else model.on(row)
        decoder = Decoder(own.placed, own.parameters, own.start_id, int8=options.weights_dtype == "int8")
        engines.append(Engine(decoder, options.batch))
    return engines, replace(model, parameters=None)  # their memory is free again


def serve(
    options: Options,
    keys: Sequence[str],
    engines: Sequence[Engine | Leader],
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
    tokens = Tokens(model.tokenizer, model.folder, model.prompt_ids)
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
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"--keys {file} can't be read: {getattr(e, 'strerror', None) or 'it is not text'}") from e
        if not any(lines):
            raise UserError(f"--keys {file} has no key: write one a line, or leave the option out")
        keys += lines
    return [key for key in keys if key]
