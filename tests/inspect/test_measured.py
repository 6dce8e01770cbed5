"""Measured time beside the program: traces made by hand, and one of a real run."""

import gzip
import json
import os
from collections import Counter
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData
from rich.console import Console

from mtjax import config
from mtjax.commands.inspect import main
from mtjax.errors import UserError
from mtjax.inspect.hlo_walk import walk
from mtjax.inspect.measured import (
    ATTENTION,
    COLLECTIVES,
    HOLDS_OTHERS,
    MEMORY,
    NOTHING,
    PRODUCTS,
    by_cause,
    find_trace,
    gaps,
    measure,
    outermost,
    work_of,
)
from mtjax.inspect.measured_kernels import short
from mtjax.inspect.measured_text import show_measured
from mtjax.inspect.report import Report
from tests.end_to_end.runs import Launcher
from tests.inspect.steps import tiny

ROUNDING = 2e-3
"""Microseconds that begin and length of an event are rounded to, twice."""
GPU = "/device:GPU:0"
MICROSECOND = 1_000_000
"""In the picoseconds of a trace."""


def write_trace(path: Path, plane: str, line: str, events: list[tuple[str, int, int]], module: str) -> Path:
    """A trace of events (operation, device, microseconds), one after the other."""
    names = sorted({name for name, _, _ in events})
    texts = [f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for i, name in enumerate(STATS, 1)]
    texts.append('event_metadata { key: 1 value { id: 1 name: "kernel" } }')
    texts += [f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for i, name in enumerate(names, 100)]
    number = {name: i for i, name in enumerate(names, 100)}
    at, lines = 0, []
    for name, device, length in events:
        stats = f'stats {{ metadata_id: 1 ref_value: {number[name]} }} stats {{ metadata_id: 2 str_value: "{module}" }}'
        stats += f" stats {{ metadata_id: 3 int64_value: {device} }}"
        span = f"offset_ps: {at} duration_ps: {length * MICROSECOND}"
        lines.append(f"events {{ metadata_id: 1 {span} {stats} }}")
        at += length * MICROSECOND
    body = f'lines {{ id: 1 name: "{line}" timestamp_ns: 1000 {" ".join(lines)} }}'
    again = f'lines {{ id: 2 name: "XLA Ops" timestamp_ns: 1000 {" ".join(lines)} }}' if "device:" in plane else ""
    text = f'planes {{ id: 1 name: "{plane}" {" ".join(texts)} {body} {again} }}'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


STATS = ("hlo_op", "hlo_module", "device_ordinal")


def steps_of(report: Report, steps: int, devices: int) -> list[tuple[str, int, int]]:
    """A microsecond for each operation that a step runs, as often as it does; three for a collective."""
    sent = {c.name for c in report.collectives}
    fused = {i.name for c in report.step.module.computations.values() for i in c.instructions if "fused" in c.name}
    sites = [s for s in walk(report.step.module) if s.instruction.name not in fused and s.is_exact]
    events = []
    for device in range(devices):
        for _ in range(steps):
            for site in sites:
                length = 3 if site.instruction.name in sent else 1
                events += [(site.instruction.name, device, length)] * site.count
    return events


@pytest.mark.parametrize(("plane", "line"), [("/host:CPU", "tf_XLAEigen/1"), (GPU, "Stream #7(Compute)")])
def test_every_operation_counts_once_in_its_phase(cpu_report: Report, tmp_path: Path, plane: str, line: str) -> None:
    events = steps_of(cpu_report, steps=2, devices=2)
    trace = write_trace(tmp_path / "a.xplane.pb", plane, line, events, cpu_report.step.module.name)
    measured = measure(cpu_report, tmp_path)
    assert (measured.trace, measured.steps, measured.devices) == (trace, 2, 2)
    assert sum(sent.count for sent in measured.collectives.values()) == sum(c.count for c in cpu_report.collectives)
    for (phase, kind, axes), sent in measured.collectives.items():
        alike = [c for c in cpu_report.collectives if (c.phase, c.kind, c.axes) == (phase, kind, axes)]
        assert sent.measured == pytest.approx(3e-6 * sum(c.count for c in alike))
        assert sent.predicted is None  # of CPUs nothing is
    opcodes = {i.name: i.opcode for c in cpu_report.step.module.computations.values() for i in c.instructions}
    sent_names = {c.name for c in cpu_report.collectives}
    each = [(n, length) for n, d, length in events if opcodes[n] not in HOLDS_OTHERS or n in sent_names]
    whole = sum(spent.computing + spent.sending for spent in measured.phases.values())
    assert whole == pytest.approx(1e-6 * sum(length for _, length in each) / 4)
    assert {"layer forward", "layer backward", "optimizer"} <= measured.phases.keys()
    causes = dict(measured.causes)
    holding = sum(length for n, _, length in events) - sum(length for _, length in each)
    assert causes.pop(NOTHING).measured == pytest.approx(1e-6 * holding / 4)  # in which nothing else ran
    assert sum(cause.measured for cause in causes.values()) == pytest.approx(whole)
    sent = sum(each.measured for each in measured.collectives.values())
    assert causes[COLLECTIVES].measured == pytest.approx(sent)
    assert 0 < causes[PRODUCTS].measured < whole and causes[PRODUCTS].predicted is None


def test_paths_of_kernels_name_what_the_model_computes() -> None:
    path = "jit(_step)/transpose(jvp(layers))/layers_3/checkpoint/remat2/eval_jaxpr/mlp/ac,ad->cd/dot_general"
    assert short(path) == "mlp/ac,ad->cd/dot_general"
    assert short("jit(_step)/jvp(layers)/eval_jaxpr/eval_jaxpr/layers_3/lt") == "layers_N/lt"


def test_what_runs_inside_a_fusion_counts_as_the_fusion(cpu_report: Report, tmp_path: Path) -> None:
    """Traces of GPUs name the matmul in a fusion that slices its operand."""
    module = cpu_report.step.module
    fusions = {i for c in module.computations.values() if "fused" not in c.name for i in c.instructions}
    fusion = next(i for i in fusions if i.opcode == "fusion")
    (callee,) = module.callees(fusion)
    events = steps_of(cpu_report, steps=2, devices=2)
    inside = [(callee.root.name if name == fusion.name else name, device, long) for name, device, long in events]
    assert inside != events
    path, found = tmp_path / "a.xplane.pb", []
    for each in (events, inside):
        measured = measure(cpu_report, write_trace(path, GPU, "Stream #7", each, module.name))
        found.append((measured.phases, measured.causes, measured.kernels))
    assert found[0] == found[1]


@pytest.mark.aot
def test_predicted_causes_add_up_to_the_predicted_step(gpu_report: Report) -> None:
    causes, time = by_cause(gpu_report, work_of(gpu_report), [], steps=1, devices=1), gpu_report.time
    assert time is not None
    assert sum(causes[name].predicted or 0.0 for name in (PRODUCTS, ATTENTION)) == pytest.approx(time.products)
    assert causes[MEMORY].predicted == pytest.approx(time.memory_bound)
    assert causes[COLLECTIVES].predicted == pytest.approx(time.exposed + time.hidden)


@pytest.mark.aot
def test_a_trace_is_compared_with_the_streams_of_the_program(two_servers_report: Report) -> None:
    """Between servers gradients pass activations inside: a second roofline without this would take longer."""
    time = two_servers_report.time
    assert time is not None and time.roofline.side_by_side
    assert time.roofline.run().seconds == pytest.approx(time.seconds)


@pytest.mark.aot
def test_the_kernel_that_is_farthest_from_its_prediction_is_shown_first(gpu_report: Report, tmp_path: Path) -> None:
    assert gpu_report.time is not None
    events, works = steps_of(gpu_report, steps=2, devices=1), work_of(gpu_report)
    runs = Counter(name for name, _, _ in events)
    late = next(name for name, count in runs.items() if works.get(name) and works[name].predicted and count > 2)
    events = [(name, device, 5000 if name == late else length) for name, device, length in events]
    module = gpu_report.step.module.name
    measured = measure(gpu_report, write_trace(tmp_path / "a.xplane.pb", GPU, "Stream #7", events, module))
    first, *others = measured.kernels
    assert first.launches >= runs[late] / 2 and first.measured >= 5e-3 * runs[late] / 2
    assert works[late].predicted is not None and first.difference > max(abs(k.difference) for k in others)
    outer = outermost(gpu_report.step.module)
    work = [(works.get(outer.get(name, name)), length) for name, _, length in events]
    running = [length for each, length in work if each is not None and each.cause != NOTHING]
    assert sum(k.measured for k in measured.kernels) == pytest.approx(sum(running) * 1e-6 / measured.steps)
    predicted = gpu_report.time.products + gpu_report.time.memory_bound
    assert sum(k.predicted or 0.0 for k in measured.kernels) == pytest.approx(predicted)
    with (console := Console(width=200)).capture() as printed:
        show_measured(measured, console)
    table = printed.get().partition("farthest from their prediction")[2].splitlines()
    assert first.kind.source in table[4] and f"{first.launches:,.0f}" in table[4]


def test_what_runs_on_several_streams_leaves_gaps_where_none_does() -> None:
    assert gaps([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == 2.0
    assert gaps([(0.0, 9.0), (1.0, 2.0), (10.0, 11.0)]) == 1.0


def test_a_trace_of_something_else_is_an_error_with_its_reason(cpu_report: Report, tmp_path: Path) -> None:
    name = cpu_report.step.module.name
    with pytest.raises(UserError, match=r"has no trace of jax's profiler .*: mtjax train --profile 10:13 writes one"):
        measure(cpu_report, tmp_path)
    (tmp_path / "a.xplane.pb").write_bytes(b"no trace" * 99)
    with pytest.raises(UserError, match="can't be read as a trace of jax's profiler"):
        measure(cpu_report, tmp_path)
    write_trace(tmp_path / "a.xplane.pb", "/host:CPU", "1", [("fusion.1", 0, 5)], "jit_other")
    with pytest.raises(UserError, match=f"has no operation of {name}: it is not a trace of training steps"):
        measure(cpu_report, tmp_path)
    write_trace(tmp_path / "a.xplane.pb", "/host:CPU", "1", [("fusion.of.theirs", 0, 5)], name)
    with pytest.raises(UserError, match=r"is of another program: fusion\.of\.theirs and 0 more operations are not in"):
        measure(cpu_report, tmp_path)


def test_operations_in_cuda_graphs_and_in_asynchronous_fusions(cpu_report: Report, tmp_path: Path) -> None:
    """The former have no times of their own; the latter are found by the kernel that they share."""
    name, entry = cpu_report.step.module.name, cpu_report.step.module.entry
    write_trace(tmp_path / "a.xplane.pb", "/device:GPU:0", "Stream #7", [("command_buffer_1", 0, 5)], name)
    with pytest.raises(UserError, match=r"as CUDA graphs \(1, such as command_buffer_1\); trace with mtjax train"):
        measure(cpu_report, tmp_path)
    started = replace(entry.instructions[-2], attributes='metadata={deduplicated_name="loop_copy_fusion.7"}')
    changed = replace(entry, instructions=(*entry.instructions[:-2], started, entry.instructions[-1]))
    computations = {**cpu_report.step.module.computations, entry.name: changed}
    module = replace(cpu_report.step.module, computations=computations)
    report = replace(cpu_report, step=replace(cpu_report.step, module=module))
    events = [("loop_copy_fusion.12", 0, 5), (started.name, 0, 1)]
    write_trace(tmp_path / "a.xplane.pb", "/device:GPU:0", "Stream #7", events, name)
    phases = measure(report, tmp_path).phases
    assert sum(spent.computing + spent.sending for spent in phases.values()) == pytest.approx(6e-6)


def test_a_trace_of_a_run_with_other_settings_names_them(cpu_report: Report, tmp_path: Path) -> None:
    events = steps_of(cpu_report, steps=1, devices=1)
    folder = tmp_path / "profile" / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    write_trace(folder / "a.xplane.pb", "/host:CPU", "1", events, cpu_report.step.module.name)
    config.save(tiny(hidden_size=128, global_batch_size=16), tmp_path / "config.toml")
    with pytest.raises(
        UserError, match="hidden_size is 128 there and 64 here; .*global_batch_size is 16 there and 8 here"
    ):
        measure(cpu_report, tmp_path)
    config.save(tiny(attention_dropout=0.25, loss_chunk=7), tmp_path / "config.toml")
    with pytest.raises(UserError, match=r"loss_chunk is 7 there and .* here; attention_dropout is 0.25 there and"):
        measure(cpu_report, tmp_path)
    config.save(tiny(layers_per_stage=(1, 3)), tmp_path / "config.toml")
    with pytest.raises(UserError, match=r"layers_per_stage is \(1, 3\) there and None here"):
        measure(cpu_report, tmp_path)
    config.save(tiny(attention="auto"), tmp_path / "config.toml")
    assert measure(cpu_report, folder / "a.trace.json.gz").steps == 1


def test_the_newest_trace_counts(tmp_path: Path) -> None:
    for name, time in (("a", 1000), ("b", 3000), ("c", 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vm.xplane.pb").write_text("")
        os.utime(tmp_path / name / "vm.xplane.pb", (time, time))
    assert find_trace(tmp_path) == tmp_path / "b" / "vm.xplane.pb"
    assert find_trace(tmp_path / "a") == tmp_path / "a" / "vm.xplane.pb"


@pytest.mark.long
@pytest.mark.usefixtures("bare_end")
def test_a_run_that_was_traced_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher.prepare(tmp_path)
    run = launcher.train_here("traced", "--profile", "3:5")
    assert "profile steps 3 to 5 are traced in traced/profile" in run.stdout
    with chdir(tmp_path):
        words = ["--config", "traced/config.toml", "--measured", "traced", "--json"]
        assert main([*words, "report.json"]) == 0
    shown = capsys.readouterr().out
    assert "3 steps on 8 devices" in shown
    measured = json.loads((tmp_path / "report.json").read_text())["measured"]
    assert (measured["steps"], measured["devices"]) == (3, 8)
    assert all(sent["measured"] > 0 for sent in measured["collectives"])
    together = sum(phase["computing"] + phase["sending"] for phase in measured["phases"].values())
    assert 0.2 * measured["seconds"] < together < 1.1 * measured["seconds"]
    (events,) = (tmp_path / "traced").glob("profile/**/*.trace.json.gz")
    check_for_perfetto(json.loads(gzip.decompress(events.read_bytes())))
    again = launcher.train_here("traced", "--resume", "--steps", "7", "--profile", "3:5")
    assert "note    nothing is traced: this start did none of steps 3 to 5" in again.stdout


def check_for_perfetto(trace: dict[str, Any]) -> None:
    """Holds a trace to the Trace Event Format, and to what Perfetto asks of it: that a thread's events nest."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    kinds = {"M": {"name", "pid", "args"}, "X": {"name", "pid", "tid", "ts", "dur"}}
    for event in filter(None, trace["traceEvents"]):  # the last is empty, which the format allows
        assert kinds[event["ph"]] <= event.keys()
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(len(spans) for spans in threads.values()) > 100
    for spans in threads.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin + ROUNDING:
                around.pop()
            assert not around or end <= around[-1] + ROUNDING, "Perfetto leaves out events that overlap"
            around.append(end)
