"""Tables about one plan: parameters, FLOPs, memory, traffic, time, cost. All figures are by formula."""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from mtjax.analysis import counts, flops, traffic
from mtjax.analysis.accuracy import accuracy_on
from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.contract import JOINED
from mtjax.analysis.flops import SECONDS_PER_DAY
from mtjax.analysis.hardware import Server
from mtjax.analysis.link_time import members_inside, transfer_time
from mtjax.analysis.machine import Machine
from mtjax.analysis.memory import peak_stage_memory, stage_memory
from mtjax.analysis.optimizer import host_bytes
from mtjax.analysis.schedules import bubble, slots
from mtjax.analysis.software import MTJAX
from mtjax.analysis.teacher_cost import teacher_flops, teacher_of
from mtjax.analysis.timing import StepTime, step_time
from mtjax.config.sizes import divisors
from mtjax.layout.plan import Plan
from mtjax.layout.timetable import ScheduleName, num_ticks
from mtjax.plan.options import Options
from mtjax.plan.search import describe, expert_dispatches
from mtjax.plan.units import days, gib, percent, seconds, si

MATMULS = "matmuls"
"""Name of the time of matmuls with weights."""


def make_console() -> Console:
    """Builds a console that does not wrap tables when its output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def table(title: str, *columns: str, note: str | None = None) -> Table:
    """Builds a table whose first column is text and whose others are numbers; `note` becomes its caption."""
    result = Table(title=title, title_justify="left", title_style="bold", caption=note, box=None, pad_edge=False)
    for i, name in enumerate(columns):
        result.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    return result


def show(console: Console, *tables: Table) -> None:
    """Prints tables, and below each its caption, not wrapped to the table's width."""
    for result in tables:
        # rich wraps a caption to the width of its table, in which a sentence becomes a column.
        note, result.caption = result.caption, None
        console.print()
        console.print(result)
        if note:
            console.print(note, style="dim", soft_wrap=True)


def print_report(console: Console, anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> None:
    """Prints all tables about one plan."""
    console.print(f"[bold]{describe(plan)}[/], global batch {plan.global_batch_size}, on {plan.mesh.size} x ", end="")
    console.print(f"{server.gpu.description} ({server.name}, {server.gpus} in a server)")
    console.print("All figures are by formula: docs/plan.md", style="dim")
    tables = [
        parameter_table(anatomy, plan),
        flop_table(anatomy, plan),
        memory_table(anatomy, plan, server, options.usable),
        choice_table(anatomy, plan, server, options.usable),
        traffic_table(anatomy, plan, server),
        demand_table(anatomy, plan, server, options.exposed_share),
        time_table(anatomy, plan, server),
    ]
    if len(expert_dispatches(anatomy, plan)) > 1:
        tables.append(experts_table(anatomy, plan, server))
    if plan.stages > 1:
        tables.append(pipeline_table(anatomy, plan))
    tables.append(summary_table(anatomy, plan, server, options))
    show(console, *tables)


def parameter_table(anatomy: Anatomy, plan: Plan) -> Table:
    """Builds the table of parameters: all, active, by Megatron's formula, and per GPU."""
    result = table("Parameters", "", "count")
    result.add_row("total", f"{counts.parameters(anatomy):,}")
    if num_experts := anatomy.model.num_experts:
        name = f"active per token: {anatomy.model.experts_top_k} of {num_experts} experts"
        result.add_row(name, f"{counts.active_parameters(anatomy):,}")
    result.add_row("parameters by Megatron-LM's formula", f"{counts.megatron_parameters(anatomy):,}")
    held = counts.peak_stage_counts(anatomy, plan).all
    result.add_row("per GPU (before ZeRO)", f"{held:,.0f}")
    if teacher := teacher_of(plan):
        result.add_row("teacher (frozen)", f"{counts.parameters(teacher.anatomy):,}")
    return result


def flop_table(anatomy: Anatomy, plan: Plan) -> Table:
    """Builds the table of FLOPs per token and step, by convention."""
    result = table("FLOPs of training", "", "per token", "per step")

    def row(name: str, per_sample: float) -> None:
        per_token = per_sample / anatomy.model.sequence_length
        result.add_row(name, si(per_token, "FLOP"), si(per_sample * plan.global_batch_size, "FLOP"))

    row("model, full attention (MFU)", flops.model_flops(anatomy))
    row("model, causal attention", flops.model_flops(anatomy, causal=True))
    row(f"hardware, recompute {plan.recompute}, full attention (HFU)", flops.hardware_flops(anatomy, plan.recompute))
    row("hardware, as compiled by XLA, full attention", flops.compiled_flops(anatomy, plan))
    if plan.teacher:
        row("teacher's forward pass, in addition", teacher_flops(plan))
    return result


def memory_table(anatomy: Anatomy, plan: Plan, server: Server, usable: float) -> Table:
    """Builds the table of a GPU's memory by component; all pipeline stages run one program and need the same."""
    name = "per GPU, on every stage" if plan.stages > 1 else "per GPU"
    result = table("Memory", "", name)
    memory, p = stage_memory(anatomy, plan), plan.precision
    hosted = host_bytes(anatomy, plan)
    kind = plan.optimizer.name if plan.residuals == "jax" and plan.optimizer.name != "adamw" else f"{p.optimizer} bytes"
    stored = f"{p.matrices if p.are_masters else p.weights} bytes"
    components = {
        f"weights ({'in the host' if plan.offloads_parameters else stored})": memory.weights,
        f"gradients ({p.gradients} bytes)": memory.gradients,
        f"optimizer ({'in the host' if hosted else kind})": memory.optimizer,
        **{f"saved: {kind}": size for kind, size in memory.activations.items()},
        "workspace of one layer": memory.working,
        "logits": memory.logits,
        **({"teacher: weights, and outputs for the batch": memory.teacher} if memory.teacher else {}),
        **({"teacher: forward pass, before the step": memory.teaching} if memory.teaching else {}),
        **({"after the last microbatch": memory.finishing} if memory.finishing else {}),
        "peak": memory.total,
    }
    for component, size in components.items():
        result.add_row(component, gib(size))
    limit = usable * server.gpu.memory
    fits = "fits" if memory.total <= limit else "does NOT fit"
    result.caption = f"{fits} {gib(limit)} = {percent(usable)} of {gib(server.gpu.memory)}; {p.name} precision"
    if hosted:
        result.caption += f"; {gib(hosted)} in the host's memory for each GPU"
    return result


def choice_table(anatomy: Anatomy, plan: Plan, server: Server, usable: float) -> Table:
    """Builds the table of peak memory by ZeRO stage, recompute and sequence parallelism, all else as planned."""
    result = table("Peak memory by settings", "", *(f"ZeRO-{z}" for z in range(4)))
    limit, excessive = usable * server.gpu.memory, False
    for recompute in ("none", "selective", "full"):
        for sequence_parallel in (False, True) if plan.tensor_degree > 1 else (False,):
            option = replace(plan, recompute=recompute, sequence_parallel=sequence_parallel)
            # Some settings of a row can't be unrolled: they are shown with a loop, rather than not at all.
            option = replace(option, unrolled=plan.unrolled and not any(option.unrolling_problems(anatomy.model)))
            row = [replace(option, zero=zero) for zero in range(4)]
            sizes = [peak_stage_memory(anatomy, option) for option in row]
            excessive |= any(size.total > limit for size in sizes)
            name = f"recompute {recompute}" + (", sequence parallel" if sequence_parallel else "")
            result.add_row(name, *(gib(s.total) + ("*" if s.total > limit else " ") for s in sizes))
    result.caption = f"* does not fit {percent(usable)} of the GPU's memory" if excessive else None
    return result


def traffic_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """Builds the table of a GPU's collectives in a step."""
    result = table(
        "Traffic per GPU and step",
        *("parallelism", "operation", "purpose", "count", "bytes each", "sent", "not overlapped"),
        note="sent: count x bytes x ring factor, 2(n-1)/n of an all-reduce and (n-1)/n of others over n ranks; "
        "not overlapped: time if no computation overlaps with it",
    )
    machine = Machine(server, plan.element_bytes)
    for c in [*traffic.transfers(anatomy, plan), *traffic.teacher_transfers(plan)]:
        not_overlapped = transfer_time(c, anatomy, plan, machine)
        axis = f"{traffic.axis_name(c.axis)} ({c.group_size})"
        count, array = f"{c.count:,.0f}", si(c.size, "B")
        result.add_row(axis, c.operation, c.purpose, count, array, si(c.sent, "B"), seconds(not_overlapped))
    if not result.row_count:
        result.add_row("none", *[""] * 6)
    return result


def experts_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """Builds the table that compares the values of --expert-dispatch, all else as planned."""
    note = "sent: by a rank with the mean load, over the expert parallel ranks; step: with all else as planned"
    result = table("Expert dispatch (--expert-dispatch)", "", "sent", "exposed", "step", note=note)
    for method in expert_dispatches(anatomy, plan):
        option = replace(plan, expert_dispatch=method)
        time, sent = step_time(anatomy, option, server), traffic.sent_to_experts(anatomy, option)
        row = si(sent, "B"), seconds(time.expert_axis), seconds(time.total)
        result.add_row(method + (" (planned)" if method == plan.expert_dispatch else ""), *row)
    return result


def demand_table(anatomy: Anatomy, plan: Plan, server: Server, share: float) -> Table:
    """Builds the table of bandwidths that would keep communication under a share of the compute time."""
    title = f"Bandwidth for exposed communication of {percent(share)} of the compute time"
    result = table(title, "parallelism", "needed", "available")
    compute = step_time(anatomy, plan, server).compute
    for axis, sent in traffic.sent_by_axis(traffic.transfers(anatomy, plan)).items():
        inside = members_inside(plan, axis, server)
        degree = plan.mesh.degree(tuple(axis.split(JOINED)))
        # Between servers all GPUs of one send at a time, each over a network adapter of its own, and the ranks of a
        # ring inside a server share what leaves it.
        available = server.link if degree <= inside else min(server.link, inside * server.network)
        where = "inside a server" if degree <= inside else f"between servers, {inside} of {degree} ranks inside one"
        needed = traffic.bandwidth_demand(sent, compute, share)
        result.add_row(f"{traffic.axis_name(axis)} ({where})", si(needed, "B/s"), si(available, "B/s"))
    return result


def time_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """Builds the table of a step's time by cause."""
    note = f"{accuracy_on(server).in_words} (mtjax plan --published)"
    if anatomy.model.num_experts:
        load = f"{plan.expert_imbalance:g} times the mean load on the busiest rank, for which all ranks wait"
        note += "\nexperts: " + (load if plan.expert_imbalance > 1 else "equal loads (--expert-imbalance)")
    result = table("Time of a step", "", "seconds", "share", note=note)
    time = step_time(anatomy, plan, server)
    for name, value in time_parts(time).items():
        result.add_row(name, seconds(value), percent(value / time.total))
    result.add_row("step", seconds(time.total), "")
    return result


def time_parts(time: StepTime) -> dict[str, float]:
    """Returns a step's seconds by cause, largest first."""
    causes = {
        MATMULS: time.products,
        "attention": time.attention,
        "element-wise": time.element_wise,
        "logits and loss": time.logits,
        "copies in layer loops": time.copies,
        "tensor parallel, exposed": time.model_axis,
        "pipeline parallel, exposed": time.stage_axis,
        "context parallel, exposed": time.context_axis,
        "expert parallel, exposed": time.expert_axis,
        "pipeline bubble": time.bubble,
        "data parallel, exposed": time.data_axis,
        "slowdown by overlapped collectives": time.contention,
        "optimizer": time.optimizer,
        "teacher's forward pass": time.teacher,
    }
    return dict(sorted(((k, v) for k, v in causes.items() if v), key=lambda kv: -kv[1]))


def pipeline_table(anatomy: Anatomy, plan: Plan) -> Table:
    """Builds the table of pipeline schedules with their bubbles and microbatches in flight."""
    p, m, sections = plan.stages, plan.microbatches, len(anatomy.sections)
    note = "in flight: chunks of microbatches whose activations a stage holds at the same time; mtjax.layout.timetable"
    result = table(
        f"Pipeline schedules, {p} stages, {m} microbatches",
        "",
        "ticks",
        "bubble",
        "in flight",
        "layers per chunk",
        note=note,
    )
    # Layers of the smallest stage: chunks must divide those of all stages.
    layers = min(plan.layers_per_stage or (anatomy.model.num_layers // p,))
    chunk_counts = {v for v in (*divisors(layers)[1:4], plan.chunks) if v > 1}
    schedules: dict[tuple[ScheduleName, int], None] = {("gpipe", 1): None, ("1f1b", 1): None}
    schedules |= {("interleaved", v): None for v in sorted(chunk_counts)}
    for schedule, v in schedules:
        counts = (p, m, v * sections)
        row = f"{num_ticks(*counts)}", percent(bubble(*counts)), f"{slots(schedule, *counts)}", f"{layers // v}"
        name = schedule + (f", {v} chunks" if v > 1 else "")
        result.add_row(name + (" (planned)" if (schedule, v) == (plan.pipeline_schedule, plan.chunks) else ""), *row)
    return result


def summary_table(anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> Table:
    """Builds the table of speed, utilization, days and cost."""
    result = table("Summary", "", "")
    accuracy = accuracy_on(server)
    time, gpus = step_time(anatomy, plan, server, MTJAX), plan.mesh.size
    peak = Machine(server, plan.element_bytes).peak
    tokens = plan.global_batch_size * anatomy.model.sequence_length
    samples = plan.global_batch_size
    useful, causal = (samples * flops.model_flops(anatomy, causal=is_causal) for is_causal in (False, True))
    executed = samples * flops.hardware_flops(anatomy, plan.recompute)

    def share(work: float) -> str:
        return percent(flops.utilization(work, time.total, gpus, peak))

    rate = useful / time.total / gpus
    least, most = accuracy.around(time.total)
    result.add_row("step", f"{seconds(time.total)} ({seconds(least)} to {seconds(most)})")
    result.add_row("tokens/s", f"{tokens / time.total:,.0f} ({tokens / time.total / gpus:,.0f} per GPU)")
    result.add_row("model FLOP/s per GPU, full attention", si(rate, "FLOP/s") + f" of {si(peak, 'FLOP/s')}")
    result.add_row("MFU, full / causal attention", f"{share(useful)} / {share(causal)}")
    result.add_row("HFU, full attention", share(executed))
    bound = flops.amdahl_speedup(options.serial_share, plan.data_degree)
    efficiency = percent(bound / plan.data_degree)
    serial = f"{100 * options.serial_share:g}% serial"
    result.add_row(f"Amdahl's bound, data parallel degree {plan.data_degree}, {serial}", f"{bound:.1f}x = {efficiency}")
    if options.tokens:
        steps = flops.steps_for_tokens(options.tokens, plan.global_batch_size, anatomy.model.sequence_length)
        length = steps * time.total / SECONDS_PER_DAY
        between = " to ".join(days(end) for end in accuracy.around(length))
        result.add_row(f"{si(options.tokens, 'tokens')} = {steps:,} steps", f"{days(length)} ({between})")
        rule = flops.training_days(counts.active_parameters(anatomy), options.tokens, gpus, rate)
        result.add_row("rule of thumb, 6 FLOPs per parameter and token at this speed", days(rule))
        if options.price is not None:
            money = flops.cost(gpus, length, options.price)
            between = " to ".join(f"{end:,.0f}" for end in accuracy.around(money))
            result.add_row(f"cost at {options.price:g} per GPU and hour", f"{money:,.0f} ({between})")
    return result
