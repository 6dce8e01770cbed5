"""`mtjax inspect --generate`: compiles the decode step for a target and checks its communication contract."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.contract import Contract, Symbols, requirements
from mtjax.analysis.decoding import decoding_contract, decoding_symbols
from mtjax.config import Config, Parallel
from mtjax.config.sizes import longest_text
from mtjax.config.storage import PLAIN, Storage
from mtjax.config.vocabulary import with_vocabulary
from mtjax.convert.saved_model import without_training
from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms
from mtjax.inspect import hlo
from mtjax.inspect.check import Landmarks, Verdict, check
from mtjax.inspect.collectives import Collective, find_collectives
from mtjax.inspect.command import console_for
from mtjax.inspect.compiled import MemoryStats, compile_for, memory_of
from mtjax.inspect.options import Options
from mtjax.inspect.report import CollectiveRow, table
from mtjax.inspect.schema import SCHEMA, collective_json, target_json, verdict_json
from mtjax.inspect.targets import Target, find_target
from mtjax.inspect.text import collectives_table, contract_notes, contract_table, show_note, size
from mtjax.inspect.write_files import write
from mtjax.layout.generation_mesh import check_generation_mesh
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.models.sharded_model import ShardedModel


@dataclass(frozen=True)
class DecodingReport:
    """Collectives and memory of a compiled decode step."""

    config: Config
    mesh: MeshShape
    target: Target
    sequences: int
    length: int
    """Length of the KV cache: tokens of each sequence."""
    symbols: Symbols
    contract: Contract
    collectives: tuple[Collective, ...]
    verdict: Verdict
    memory: MemoryStats
    text: str
    """The optimized program as HLO text."""
    compile_seconds: float
    note: str | None = None
    """How it was compiled, if differently from how it runs."""

    @property
    def rows(self) -> list[CollectiveRow]:
        """The collectives, identical ones grouped."""
        return table(self.collectives)


def run(config: Config, options: Options) -> int:
    """Compiles the decode step and prints the report; returns exit code 1 if the program violates its contract."""
    # With the JSON on standard output, the report goes nowhere and notes to standard error.
    quiet = options.json == Path("-")
    console = console_for(sys.stderr if quiet else sys.stdout)
    config = with_vocabulary(config, lambda text: console.print(text, highlight=False))
    length = options.context or longest_text(config.model)
    report = inspect_decoding(config, find_target(options.target), options.sequences, length, options.storage)
    if not quiet:
        show(report, console)
    if options.json is not None:
        content = json.dumps(to_json(report), indent=1) + "\n"
        sys.stdout.write(content) if quiet else write(options.json, content)
    if options.dump is not None:
        write(options.dump / f"decode-{report.mesh}-{Path(report.target.name).stem}.hlo.txt", report.text)
    return 0 if report.verdict.holds else 1


def inspect_decoding(
    config: Config, target: Target, sequences: int, length: int, storage: Storage = PLAIN
) -> DecodingReport:
    """Compiles the decode step, without weights and without devices to run it.

    Args:
      config: the run's config, with its mesh.
      target: the devices to compile for.
      sequences: batch size of the decode step.
      length: tokens of each sequence that the KV cache holds.
      storage: how matrices are quantized.

    Raises:
      UserError: config, mesh and target are not compatible, or the model family can't generate text.
    """
    mesh_shape = parse_mesh(config.parallel.mesh)
    check_generation_mesh(mesh_shape)
    # The config must be valid for this mesh although nothing is trained: one sample per device.
    batch = {
        "global_batch_size": mesh_shape.size,
        "microbatch_size": None,
        "compute_dtype": config.training.compute_dtype,
    }
    config = without_training(config, Parallel(mesh=str(mesh_shape)), **batch)
    # Same programs as a run's, with shapes in place of weights.
    decoder = GenerationPrograms.abstract(ShardedModel(config, target.mesh(mesh_shape)), storage)
    if length > decoder.max_sequence_length:
        raise UserError(
            f"--context is {length}, and the model's context length is {decoder.max_sequence_length}: use at most that"
        )
    start = time.perf_counter()
    compiled, note = compile_for(target, decoder.lower_decode(sequences, length))
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    assert text is not None
    per_server = target.server.gpus if target.server else target.devices_per_server
    collectives = find_collectives(hlo.parse(text), dict(decoder.sharded_model.mesh.shape), per_server)
    anatomy = anatomy_of(config.model)
    symbols, contract = decoding_symbols(anatomy, sequences, mesh_shape), decoding_contract(anatomy)
    required = requirements(contract, symbols, mesh_shape, config.training.compute_dtype)
    verdict = check(collectives, required, _landmarks(decoder, sequences), is_gpu=target.is_gpu)
    sizes = (sequences, length, symbols)
    sent = (contract, tuple(collectives), verdict)
    return DecodingReport(config, mesh_shape, target, *sizes, *sent, memory_of(compiled), text, seconds, note)


def _landmarks(decoder: GenerationPrograms, sequences: int) -> Landmarks:
    shapes = {record.name: record.shape for record in jax.tree.leaves(decoder.sharded_model.records)}
    # An array with as many elements as all logits would be a gather over the vocabulary.
    return Landmarks(shapes, logits=sequences * decoder.padded_vocab_size)


def show(report: DecodingReport, console: Console) -> None:
    """Prints a report."""
    model, memory = report.config.model, report.memory
    console.print(
        f"decode step: {model.family}, {model.num_layers} layers x {model.hidden_size}, "
        f"{report.config.training.compute_dtype}; {report.sequences} sequences, "
        f"KV cache for {report.length} tokens of each\n"
        f"mesh {report.mesh.description}; target {report.target.name}; compiled in {report.compile_seconds:.1f} s",
        highlight=False,
    )
    show_note(report.note, console)
    console.print(collectives_table(report.rows))
    console.print(contract_table(report))
    for note in contract_notes(report):
        console.print(note, highlight=False, soft_wrap=True)
    if report.verdict.holds:
        console.print("logits stay sharded over the vocabulary: none are gathered")
    console.print(
        f"[bold]Memory of a device[/]\n  weights and KV cache {size(memory.arguments)}, {size(memory.aliased)} of it "
        f"updated in place; temporaries {size(memory.temporaries)}; peak {size(memory.peak)}",
        highlight=False,
    )


def to_json(report: DecodingReport) -> dict[str, Any]:
    """Converts the report to JSON values, with the same keys as the report of a train step."""
    memory = report.memory
    return {
        "schema": SCHEMA,
        "program": "decoding",
        "run": {
            "mesh": asdict(report.mesh),
            "compute_dtype": report.config.training.compute_dtype,
            "sequences": report.sequences,
            "context": report.length,
            "sizes": dict(report.symbols),
        },
        "target": target_json(report.target),
        "collectives": [collective_json(c) for c in report.collectives],
        "contract": {"name": report.contract.name, **verdict_json(report.verdict)},
        "memory": {
            "arguments": memory.arguments,
            "outputs": memory.outputs,
            "aliased": memory.aliased,
            "temporaries": memory.temporaries,
            "peak": memory.peak,
        },
    }
