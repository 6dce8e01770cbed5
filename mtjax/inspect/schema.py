"""A report as JSON: schema `mtjax.inspect/1`, described in docs/inspect.md.

Fields are only ever added to a version; a change of meaning makes a new one. Bytes, seconds and FLOPs are plain
numbers; null means unknown.
"""

from dataclasses import asdict
from typing import Any

from mtjax.analysis.memory import Memory
from mtjax.inspect.check import ContractLine, Verdict
from mtjax.inspect.collectives import Collective
from mtjax.inspect.kernels.show import kernels_json
from mtjax.inspect.measured import Measured
from mtjax.inspect.memory import MemoryReport
from mtjax.inspect.predict import TimeReport
from mtjax.inspect.report import Report
from mtjax.inspect.stages import StagesReport
from mtjax.inspect.targets import Target

SCHEMA = "mtjax.inspect/1"


def to_json(report: Report, measured: Measured | None = None) -> dict[str, Any]:
    """Returns the report as nested dicts of JSON values, with the measured times of a trace, if any."""
    step = report.step
    return {
        "schema": SCHEMA,
        "run": {
            "mesh": dict(step.mesh_axes),
            "layout": step.program.layout.name,
            "compute_dtype": step.config.training.compute_dtype,
            "gradient_wire_dtype": step.config.parallel.grad_reduce_dtype,  # the key of schema 1
            "grad_reduce_dtype": step.config.parallel.grad_reduce_dtype,
            "recompute": step.config.training.recompute,
            "sizes": dict(report.symbols),
            "xla_options": dict(step.program.xla.options),
        },
        "target": target_json(report.target),
        "seconds": {"trace": step.trace_seconds, "compile": step.compile_seconds, "analysis": report.analysis_seconds},
        "collectives": [collective_json(c) for c in report.collectives],
        "contract": {"name": report.contract.name, **verdict_json(report.verdict)},
        "memory": _memory(report.memory),
        "flops": {"counted": report.flops.counted, "formula": report.flops.formula},
        "time": _time(report.time) if report.time else None,
        "stages": _stages(report.stages) if report.stages else None,
        "measured": _measured(measured) if measured else None,
    }


def _measured(measured: Measured) -> dict[str, Any]:
    names = ("phase", "kind", "axes")
    return {
        "trace": str(measured.trace),
        "steps": measured.steps,
        "devices": measured.devices,
        "seconds": measured.seconds,
        "phases": {phase: asdict(spent) for phase, spent in measured.phases.items()},
        "causes": {cause: asdict(each) for cause, each in measured.causes.items()},
        "collectives": [
            dict(zip(names, key, strict=True)) | asdict(sent) for key, sent in measured.collectives.items()
        ],
        "kernels": [kernel.to_json() for kernel in measured.kernels],
    }


def target_json(target: Target) -> dict[str, Any]:
    """Returns the target as JSON values."""
    server = target.server
    facts = None
    if server:
        facts = {
            "name": server.name,
            "gpu": server.gpu.name,
            "gpus": server.gpus,
            "link_bytes_per_second": server.link,
            "network_bytes_per_second": server.network,
        }
    return {"name": target.name, "is_gpu": target.is_gpu, "server": facts}


def collective_json(c: Collective) -> dict[str, Any]:
    """Returns a collective as JSON values."""
    return {
        "name": c.name,
        "kind": c.kind,
        "axes": None if c.axes is None else list(c.axes),
        "group_size": c.group_size,
        "servers": c.servers,
        "phase": c.phase,
        "count": c.count,
        "arrays": [{"dtype": a.dtype, "dims": list(a.dims)} for a in c.arrays],
        "payload_bytes": c.payload_bytes,
        "wire_bytes": c.wire_bytes,
        "is_async": c.is_async,
        "hidden_behind": list(c.hidden_behind),
        "op_name": c.op_name,
        "has_own_name": c.has_own_name,
        "is_known": c.is_known,
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Returns the result of a check as JSON values, line by line."""
    return {
        "holds": verdict.holds,
        "lines": [_line(line) for line in verdict.lines],
        "violations": list(verdict.violations),
        "also_sent": list(verdict.tolerated),
    }


def _line(line: ContractLine) -> dict[str, Any]:
    asked = line.required.line
    return {
        "phase": asked.phase,
        "kind": asked.kind,
        "axis": asked.axis,
        "dtype": line.required.dtype,
        "count": line.required.count,
        "count_formula": asked.count,
        "elements": line.required.elements,
        "elements_formula": asked.elements,
        "pooled": asked.pooled,
        "found": line.found,
        "found_elements": line.found_elements,
        "status": line.status,
        "notes": list(line.notes),
    }


def _memory(memory: MemoryReport) -> dict[str, Any]:
    # All fields by their names: a field of `MemoryReport` is one of the schema, which docs/inspect.md lists.
    plain = {k: v for k, v in vars(memory).items() if k != "formula"}
    return {**plain, "usable": memory.usable, "fits": memory.fits, "formula": _formula(memory.formula)}


def _formula(memory: Memory) -> dict[str, Any]:
    return {
        "parameters": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.kept + memory.working,
        "logits": memory.logits,
        "teacher": memory.teacher,
        "total": memory.total,
    }


def _stages(stages: StagesReport) -> dict[str, Any]:
    table = stages.table
    return {
        "schedule": stages.schedule,
        "microbatches": table.microbatches,
        "chunks": table.chunks,
        "forward_halves": table.forward_ticks,
        "backward_halves": table.backward_ticks,
        "bubble": table.bubble,
        "bubble_formula": stages.bubble_formula,
        "permutes": [
            {
                "carries": permutes.carries,
                "arrays": [{"dtype": a.dtype, "dims": list(a.dims)} for a in permutes.arrays],
                "count": permutes.count,
                "payload_bytes": permutes.payload_bytes,
                "hidden": permutes.hidden,
                "behind": dict(permutes.behind),
            }
            for permutes in stages.permutes
        ],
        "stages": [
            {"layers": stage.layers, "in_flight": stage.in_flight, "memory": _formula(stage.memory)}
            for stage in stages.stages
        ],
    }


def _time(time: TimeReport) -> dict[str, Any]:
    return {
        "server": time.server.name,
        "seconds": time.seconds,
        "products": time.products,
        "memory_bound": time.memory_bound,
        "exposed": time.exposed,
        "hidden": time.hidden,
        "contention": time.contention,
        "between": list(time.between),
        "by_plan": time.by_plan,
        "copies_by_plan": time.copies_by_plan,
        "exposed_by_axes": dict(time.exposed_by_axes),
        "hidden_by_axes": dict(time.hidden_by_axes),
        "phases": {phase: asdict(spent) for phase, spent in time.phases.items()},
        "kinds_of_layers": {name: {**kind._asdict(), "each": kind.each} for name, kind in time.kinds.items()},
        "kernels": kernels_json(time.kernels) if time.kernels else None,
        "memory_bound_by_cause": {phase: dict(causes) for phase, causes in time.causes.items()},
        "model_tflops_per_gpu": time.tflops,
        "program_tflops_per_gpu": time.hardware_tflops,
        "mfu": time.mfu,
        "hfu": time.hfu,
    }
