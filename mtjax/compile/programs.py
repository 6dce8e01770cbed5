"""Compiles the programs of a run into jax's persistent cache, with the keys that the run will look up."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mtjax.config import Config
from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.generate.training_sample import lower_continuation
from mtjax.plan.auto import fastest_mesh
from mtjax.runtime.checkpoints.checkpoint import lower_fingerprints
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.runtime.compile_cache import OFF, CompileCache
from mtjax.runtime.processes.peers import Peers
from mtjax.train.changes import with_horizon
from mtjax.train.folder.tokenizer import find_tokenizer
from mtjax.train.objective import PRETRAINING, continues_text, resolve
from mtjax.train.same_run import check_same_settings
from mtjax.train.setup import find_devices, find_past, with_mesh
from mtjax.train.step import TrainStep, make_train_step
from mtjax.waiting import waiting

Lower = Callable[[], list[jax.stages.Lowered]]
"""Lowers programs, which are then compiled."""


def compile_run(config: Config, folder: str | None) -> None:
    """Compiles the programs of a run into the cache, and prints each with the time that it took.

    Args:
      config: the run.
      folder: of the compile cache; the default one when None.

    Raises:
      UserError: the config or the devices don't allow the run, or compiled programs can't be cached.
    """
    if folder == OFF:
        raise UserError(
            "--compile-cache off has no effect here, as compiled programs would be lost: name a folder, or remove it"
        )
    with CompileCache(folder) as cache, Peers(config.parallel) as peers:
        check_same_settings(config)
        if cache.note or cache.folder is None:
            raise UserError(f"{cache.note}: name a folder with --compile-cache")
        # The same steps as in a run, in the same order: a cache key has everything that changes the program, also the
        # tokenizer's vocabulary and the horizon of the learning rate.
        config = with_mesh(config, fastest_mesh)
        mesh_shape, mesh, batch_schedule = find_devices(config, peers)
        say = print if jax.process_index() == 0 else lambda *_, **__: None
        weights = find_weights(config.training.init_from) if config.training.init_from else None
        out = config.output.out
        tokenizer = find_tokenizer(config, out, weights).tokenizer
        past = find_past(config.output, out) if out else None
        resolved = resolve(config, tokenizer, Path(), past)
        program = make_train_step(with_horizon(resolved, PRETRAINING.horizon(resolved, past)), mesh)
        for name, lower in programs(program, tokenizer, batch_schedule.batch_sizes()):
            start = time.perf_counter()
            with waiting(f"compiling {name}"):
                known = [_compile(part, cache) for part in lower()]
            cached = ", from the cache" if all(known) else ""
            say(f"{name:28} {time.perf_counter() - start:7.1f} s{cached}", flush=True)
        if cache.failures:
            raise UserError(cache.failures)
        kind, processes = mesh.devices.flat[0].device_kind, f"{peers.count} process{'es' if peers.count > 1 else ''}"
        say(f"cached in {cache.folder} for jax {jax.__version__}, {mesh_shape.size} x {kind} in {processes}")


def _compile(program: jax.stages.Lowered, cache: CompileCache) -> bool:
    """Compiles a program; returns whether it was in the cache."""
    found = cache.found
    program.compile()
    return cache.found > found


def programs(program: TrainStep, tokenizer: Tokenizer, batch_sizes: tuple[int, ...]) -> Iterator[tuple[str, Lower]]:
    """Yields the names of a run's programs, in the order of use, and a function that lowers them."""
    config = program.config
    given = program.restore_target if config.training.init_from else None
    yield "initial state", lambda: [program.lower_initialize(config.training.seed, given)]
    # With a batch size rampup, each size is a program of its own.
    for size in batch_sizes:
        yield f"step of {size} samples", lambda size=size: [program.lower_step(size)]
    if config.output.valid_every:
        yield "validation", lambda: [program.evaluation.lower()]
    orders = program.layer_orders
    yield "fingerprints", lambda: [lower_fingerprints(program.abstract_state, program.mesh, orders)]
    if continues_text(config):
        yield "sample", lambda: lower_continuation(program, tokenizer, config.output.prompt)
