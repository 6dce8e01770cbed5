"""What `mtjax serve` does: loads the weights, and serves them."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mtjax.data.progress import say
from mtjax.errors import UserError
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.weights import config_in_words, load_model
from mtjax.serve.host import Host
from mtjax.serve.options import KEYS, Options
from mtjax.serve.server import Server, address_of, listen
from mtjax.serve.service import Keys, Limits, Service
from mtjax.serve.tokens import Tokens
from mtjax.train.compile_cache import CompileCache


def run(options: Options) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
      UserError: weights, keys or the address are wrong.
    """
    keys = read_keys(options.keys, os.environ)
    bound = listen(options.host, options.port)
    with bound, CompileCache(options.compile_cache):
        model = load_model(options.source, options.mesh, options.dtype, options.tokenizer)
        say(f"model   {config_in_words(model.placed.config, model.parameters)}")
        engine = Engine(Decoder(model.placed, model.parameters), options.batch)
        model = replace(model, parameters=None)  # their memory is free again
        host = Host(engine, options.batch, options.most_waiting)
        limits = Limits(options.most_body, options.most_tokens or engine.max_context, options.most_seconds)
        tokens = Tokens(model.tokenizer, model.folder)
        name = options.name or Path(options.source.rpartition(":")[2]).resolve().name
        service = Service(name, tokens, model.stop_ids, host, limits, Keys(keys))
        address = address_of(bound)

        def ready() -> None:
            whom = f"{len(keys)} API key{'s' * (len(keys) > 1)}" if keys else "no API key is asked for"
            say(f"ready   {service.name!r} at {address} ({whom})")

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
