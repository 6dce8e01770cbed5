"""`mtjax data preprocess --ray ADDRESS`: the parts of a corpus on the machines of a Ray cluster, then merged."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtjax.data.commands import merge
from mtjax.data.commands.inputs import input_files
from mtjax.data.commands.parts import summary
from mtjax.data.commands.preprocess import Options, absolute_tokenizer, job_of, made_already, run_job
from mtjax.data.corpus.indexed import bin_path, idx_path
from mtjax.data.corpus.meta import meta_path
from mtjax.data.corpus.parts import MOST, CorpusPart, part_datasets, stored_sizes
from mtjax.data.corpus.resume_record import refuse_existing
from mtjax.data.progress import say
from mtjax.errors import UserError, first_line, install_extra, require

BYTES_PER_PART = 1 << 30
RETRIES = 3
"""Times that a part is run again after its process or machine was lost."""
SECONDS_BETWEEN_LINES = 10.0
CONNECT_SECONDS = 10.0


def run_on_ray(options: Options) -> None:
    """Preprocesses as the options say, each part as a task of one core, and merges the parts.

    The folders of input and output must be the same on all machines, and mtjax installed there.

    Raises:
      UserError: Ray is not installed or not there, a part can't be made, or the output exists.
    """
    ray = require("ray", "ray")
    if not hasattr(ray, "init"):  # a folder of that name where the command runs, such as Ray's own in /tmp
        raise UserError(f"this needs the library ray: {install_extra('ray')}")
    if options.part is not None:
        raise UserError("--part and --ray exclude each other: --ray runs all parts")
    paths = input_files(options.input)
    # The number depends on the text alone, so the same command continues with the complete parts on any cluster.
    of = options.parts or _default_parts(paths)
    options = replace(
        options,
        input=tuple(map(_absolute, paths)),
        output=options.output.expanduser().absolute(),
        tokenizer=absolute_tokenizer(options.tokenizer),
    )
    outputs = list(job_of(options).outputs.values())  # all that can be wrong in the options is said here, once
    if not options.overwrite and options.merge:
        refuse_existing(outputs)
    _connect(ray, str(options.ray))
    try:
        _run_all(ray, options, of)
    finally:
        ray.shutdown()
    if options.merge:
        merge.run(merge.Options(parts=options.output, overwrite=options.overwrite))
        for parts in part_datasets(options.output).values():
            for prefix in parts.values():
                for path in (idx_path(prefix), bin_path(prefix), meta_path(prefix)):
                    path.unlink(missing_ok=True)


def _default_parts(paths: Sequence[str]) -> int:
    """Returns a part per GiB of text as it is stored."""
    return min(max(-(-sum(size or 0 for size in stored_sizes(paths)) // BYTES_PER_PART), 1), MOST)


def _absolute(name: str) -> str:
    return name if "://" in name else str(Path(name).expanduser().absolute())


def _connect(ray: Any, address: str) -> None:
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as e:  # Ray has several, and those of the network
        raise UserError(
            f"--ray {address}: there is no Ray cluster ({first_line(e)}); start one with ray start --head, or say "
            "--ray local for this machine alone"
        ) from e


def _run_all(ray: Any, options: Options, of: int) -> None:
    """Runs all parts, and reports how far they are.

    Raises:
      UserError: a part can't be made, also not when it is repeated.
    """
    task = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=[OSError])(_run_part)
    shared = ray.put(replace(options, ray=None, workers=0))
    waiting = {task.remote(shared, number, of): CorpusPart(number, of) for number in range(1, of + 1)}
    last_line = time.monotonic()
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=SECONDS_BETWEEN_LINES)
        for reference in done:
            part = waiting.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayTaskError as e:
                raise UserError(f"{part}: {first_line(e.cause)}") from e
            except ray.exceptions.RayError as e:
                raise UserError(f"{part} failed on Ray {RETRIES + 1} times: {first_line(e)}") from e
        if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            say(summary(options.output, of))
    say(summary(options.output, of))


def _run_part(options: Options, number: int, of: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    job = job_of(replace(options, part=f"{number}/{of}"))
    if options.overwrite or not made_already(job):
        run_job(options, job)
