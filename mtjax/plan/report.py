"""What one plan costs: parameters, FLOPs, memory, traffic, time, as tables. All figures are by formula."""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from mtjax.config.sizes import divisors
from mtjax.plan.options import Options
from mtjax.plan.search import describe, expert_dispatches
from mtjax.plan.units import days, gib, percent, seconds, si
from mtjax.theory import counts, flops, traffic
from mtjax.theory.accuracy import accuracy_on
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.contract import JOINED
from mtjax.theory.flops import SECONDS_PER_DAY
from mtjax.theory.hardware import Server
from mtjax.theory.link_time import members_inside, transfer_time
from mtjax.theory.machine import Machine
from mtjax.theory.memory import peak_stage_memory, stage_memory
from mtjax.theory.plan import Plan
from mtjax.theory.schedules import bubble, slots
from mtjax.theory.software import MTJAX
from mtjax.theory.teacher_cost import teacher_flops, teacher_of
from mtjax.theory.timetable import ScheduleName, num_ticks
from mtjax.theory.timing import StepTime, step_time


def make_console() -> Console:
    """A console that does not wrap tables when its output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def table(title: str, *columns: str, note: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers; `note` becomes its caption."""
    result = Table(title=title, title_justify="left", title_style="bold", caption=note, box=None, pad_edge=False)
    for i, name in enumerate(columns):
        result.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    return result


def show(console: Console, *tables: Table) -> None:
    """Prints tables; their captions go below, not wrapped to the table's width."""
    for result in tables:
        note, result.caption = result.caption, None
        console.print()
        console.print(result)
        if note:
            console.print(note, style="dim", soft_wrap=True)


def print_report(console: Console, anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> None:
    """Everything about one plan."""
    console.print(f"[bold]{describe(plan)}[/], global batch {plan.global_batch_size}, on {plan.mesh.size} x ", end="")
    console.print(f"{server.gpu.description} ({server.name}, {server.gpus} in a server)")
    console.print("All figures are by formula: docs/plan.md", style="dim")
    parts = [
        parameter_table(anatomy, plan),
        flop_table(anatomy, plan),
        memory_table(anatomy, plan, server, options.usable),
        choice_table(anatomy, plan, server, options.usable),
        traffic_table(anatomy, plan, server),
        demand_table(anatomy, plan, server, options.exposed_share),
        time_table(anatomy, plan, server),
    ]
    if len(expert_dispatches(anatomy, plan)) > 1:
        parts.append(experts_table(anatomy, plan, server))
    if plan.stages > 1:
        parts.append(pipeline_table(anatomy, plan))
    parts.append(summary_table(anatomy, plan, server, options))
    show(console, *parts)


def parameter_table(anatomy: Anatomy, plan: Plan) -> Table:
    """Exact count, Megatron's formula, and what a GPU holds."""
    result = table("Parameters", "", "count")
    result.add_row("whole model", f"{counts.parameters(anatomy):,}")
    if chosen := anatomy.model.num_experts:
        name = f"met by a token: {anatomy.model.experts_top_k} of {chosen} experts"
        result.add_row(name, f"{counts.active_parameters(anatomy):,}")
    result.add_row("as Megatron-LM's memory formula counts", f"{counts.megatron_parameters(anatomy):,}")
    held = counts.peak_stage_counts(anatomy, plan).all
    result.add_row("held by a GPU (before ZeRO)", f"{held:,.0f}")
    if teacher := teacher_of(plan):
        result.add_row("the teacher's, which learns nothing", f"{counts.parameters(teacher.anatomy):,}")
    return result


def flop_table(anatomy: Anatomy, plan: Plan) -> Table:
    """FLOPs per token and step, by convention."""
    result = table("FLOPs of training", "", "per token", "per step")

    def row(name: str, per_sample: float) -> None:
        per_token = per_sample / anatomy.model.sequence_length
        result.add_row(name, si(per_token, "FLOP"), si(per_sample * plan.global_batch_size, "FLOP"))

    row("model, attention in full (MFU)", flops.model_flops(anatomy))
    row("model, causal half of attention", flops.model_flops(anatomy, causal=True))
    row(f"hardware, recompute {plan.recompute}, full (HFU)", flops.hardware_flops(anatomy, plan.recompute))
    row("hardware, as XLA compiles it, full", flops.compiled_flops(anatomy, plan))
    if plan.teacher:
        row("the teacher's forward pass, beside the step", teacher_flops(plan))
    return result


def memory_table(anatomy: Anatomy, plan: Plan, server: Server, usable: float) -> Table:
    """Memory of a GPU by component; stages run one program, and each needs the same."""
    name = "per GPU, on every stage" if plan.stages > 1 else "per GPU"
    result = table("Memory", "", name)
    memory, p = stage_memory(anatomy, plan), plan.precision
    parts = {
        f"weights ({p.weights} bytes)": memory.weights,
        f"gradients ({p.gradients} bytes)": memory.gradients,
        f"optimizer ({p.optimizer} bytes)": memory.optimizer,
        **{f"kept: {kind}": size for kind, size in memory.activations.items()},
        "layer at work": memory.working,
        "logits": memory.logits,
        **({"teacher: weights, and what it says of the batch": memory.teacher} if memory.teacher else {}),
        **({"teacher: its forward pass, before the step": memory.teaching} if memory.teaching else {}),
        **({"gradients, reduced or stacked": memory.finishing} if memory.finishing else {}),
        "total": memory.total,
    }
    for part, size in parts.items():
        result.add_row(part, gib(size))
    limit = usable * server.gpu.memory
    fits = "fits" if memory.total <= limit else "does NOT fit"
    result.caption = f"{fits} {gib(limit)} = {percent(usable)} of {gib(server.gpu.memory)}; {p.name} precision"
    return result


def choice_table(anatomy: Anatomy, plan: Plan, server: Server, usable: float) -> Table:
    """Total memory under every ZeRO stage, recompute and sequence split, the rest as planned."""
    result = table("Memory if ...", "", *(f"ZeRO-{z}" for z in range(4)))
    limit, excessive = usable * server.gpu.memory, False
    for recompute in ("none", "selective", "full"):
        for split in (False, True) if plan.tensor_degree > 1 else (False,):
            unrolled = plan.unrolled and recompute == "none"
            option = replace(plan, recompute=recompute, sequence_parallel=split)
            row = [replace(option, zero=zero, unrolled=unrolled and zero < 3) for zero in range(4)]
            sizes = [peak_stage_memory(anatomy, option) for option in row]
            excessive |= any(size.total > limit for size in sizes)
            name = f"recompute {recompute}" + (", sequence parallel" if split else "")
            result.add_row(name, *(gib(s.total) + ("*" if s.total > limit else " ") for s in sizes))
    result.caption = f"* does not fit {percent(usable)} of the GPU's memory" if excessive else None
    return result


def traffic_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """Collectives of a GPU and step."""
    result = table(
        "Traffic per GPU and step",
        *("axis", "operation", "what", "count", "array", "sent", "alone"),
        note="sent: with the ring factor, 2(n-1)/n of all-reduce, (n-1)/n of others; alone: time if nothing hides it",
    )
    machine = Machine(server, plan.element_bytes)
    for c in [*traffic.transfers(anatomy, plan), *traffic.teacher_transfers(plan)]:
        alone = transfer_time(c, anatomy, plan, machine)
        axis = f"{traffic.axis_name(c.axis)} ({c.ways})"
        count, array = f"{c.count:,.0f}", si(c.size, "B")
        result.add_row(axis, c.operation, c.purpose, count, array, si(c.sent, "B"), seconds(alone))
    if not result.row_count:
        result.add_row("none", *[""] * 6)
    return result


def experts_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """The ways in which tokens may come to other ranks' experts, as planned but for this."""
    note = (
        "--expert-dispatch; sent over the expert ways, by a rank with the mean load; the step with all else as planned"
    )
    result = table("Tokens to experts", "", "sent", "exposed", "step", note=note)
    for method in expert_dispatches(anatomy, plan):
        option = replace(plan, expert_dispatch=method)
        time, sent = step_time(anatomy, option, server), traffic.sent_to_experts(anatomy, option)
        row = si(sent, "B"), seconds(time.expert_axis), seconds(time.total)
        result.add_row(method + (" (planned)" if method == plan.expert_dispatch else ""), *row)
    return result


def demand_table(anatomy: Anatomy, plan: Plan, server: Server, share: float) -> Table:
    """Bandwidth that each axis needs for its communication to stay under a share of the compute time."""
    result = table(f"Bandwidth demand for {percent(share)} exposed", "axis", "needs", "has")
    compute = step_time(anatomy, plan, server).compute
    for axis, sent in traffic.sent_by_axis(traffic.transfers(anatomy, plan)).items():
        inside = members_inside(plan, axis, server)
        ways = plan.mesh.degree(tuple(axis.split(JOINED)))
        has = server.link if ways <= inside else min(server.link, inside * server.network)
        where = "inside a server" if ways <= inside else f"between servers, {inside} of {ways} inside"
        needs = traffic.bandwidth_demand(sent, compute, share)
        result.add_row(f"{traffic.axis_name(axis)} ({where})", si(needs, "B/s"), si(has, "B/s"))
    return result


def time_table(anatomy: Anatomy, plan: Plan, server: Server) -> Table:
    """Where a step's time goes."""
    note = f"{accuracy_on(server).in_words} (mtjax plan --published)"
    if anatomy.model.num_experts:
        load = f"{plan.expert_imbalance:g} times the mean load on the rank that has most, for which the others wait"
        note += "\nexperts: " + (load if plan.expert_imbalance > 1 else "equal loads (--expert-imbalance)")
    result = table("Time of a step", "", "seconds", "share", note=note)
    time = step_time(anatomy, plan, server)
    for name, value in time_parts(time).items():
        result.add_row(name, seconds(value), percent(value / time.total))
    result.add_row("step", seconds(time.total), "")
    return result


def time_parts(time: StepTime) -> dict[str, float]:
    """A step's seconds by cause, largest first."""
    parts = {
        "products": time.products,
        "attention": time.attention,
        "element-wise": time.element_wise,
        "logits and loss": time.logits,
        "copies of loops over layers": time.copies,
        "model ways, exposed": time.model_axis,
        "stages, exposed": time.stage_axis,
        "context ways, exposed": time.context_axis,
        "expert ways, exposed": time.expert_axis,
        "pipeline bubble": time.bubble,
        "data ways, exposed": time.data_axis,
        "slower beside collectives": time.contention,
        "optimizer": time.optimizer,
        "the teacher's forward pass": time.teacher,
    }
    return dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda kv: -kv[1]))


def pipeline_table(anatomy: Anatomy, plan: Plan) -> Table:
    """Bubbles and memory of the schedules, including the plan's own."""
    p, m, sections = plan.stages, plan.microbatches, len(anatomy.sections)
    note = "kept: inputs of chunks, or what autodiff keeps of them, on every stage at a time; mtjax.theory.timetable"
    result = table(
        f"Schedules of {p} stages, {m} microbatches",
        "",
        "ticks",
        "bubble",
        "kept",
        "a chunk's layers",
        note=note,
    )
    layers = min(plan.layers_per_stage or (anatomy.model.num_layers // p,))
    several = {v for v in (*divisors(layers)[1:4], plan.chunks) if v > 1}
    schedules: dict[tuple[ScheduleName, int], None] = {("gpipe", 1): None, ("1f1b", 1): None}
    schedules |= {("interleaved", v): None for v in sorted(several)}
    for schedule, v in schedules:
        counts = (p, m, v * sections)
        row = f"{num_ticks(*counts)}", percent(bubble(*counts)), f"{slots(schedule, *counts)}", f"{layers // v}"
        name = schedule + (f", {v} chunks" if v > 1 else "")
        result.add_row(name + (" (planned)" if (schedule, v) == (plan.pipeline_schedule, plan.chunks) else ""), *row)
    return result


def summary_table(anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> Table:
    """Speed, utilisation, days and cost."""
    result = table("Summary", "", "")
    accuracy = accuracy_on(server)
    time, gpus = step_time(anatomy, plan, server, MTJAX), plan.mesh.size
    peak = Machine(server, plan.element_bytes).peak
    tokens = plan.global_batch_size * anatomy.model.sequence_length
    samples = plan.global_batch_size
    useful, causal = (samples * flops.model_flops(anatomy, causal=half) for half in (False, True))
    done = samples * flops.hardware_flops(anatomy, plan.recompute)

    def share(work: float) -> str:
        return percent(flops.utilisation(work, time.total, gpus, peak))

    rate = useful / time.total / gpus
    least, most = accuracy.around(time.total)
    result.add_row("step", f"{seconds(time.total)} ({seconds(least)} to {seconds(most)})")
    result.add_row("tokens/s", f"{tokens / time.total:,.0f} ({tokens / time.total / gpus:,.0f} per GPU)")
    result.add_row("model FLOP/s per GPU, attention in full", si(rate, "FLOP/s") + f" of {si(peak, 'FLOP/s')}")
    result.add_row("MFU, attention in full / causal half", f"{share(useful)} / {share(causal)}")
    result.add_row("HFU, attention in full", share(done))
    bound = flops.amdahl_speedup(options.serial_share, plan.data_degree)
    efficiency = percent(bound / plan.data_degree)
    serial = f"{100 * options.serial_share:g}% serial"
    result.add_row(f"Amdahl's bound of {plan.data_degree} data ways, {serial}", f"{bound:.1f}x = {efficiency}")
    if options.tokens:
        took = flops.steps_for_tokens(options.tokens, plan.global_batch_size, anatomy.model.sequence_length)
        length = took * time.total / SECONDS_PER_DAY
        between = " to ".join(days(end) for end in accuracy.around(length))
        result.add_row(f"{si(options.tokens, 'tokens')} = {took:,} steps", f"{days(length)} ({between})")
        rule = flops.training_days(counts.active_parameters(anatomy), options.tokens, gpus, rate)
        result.add_row("rule of thumb, 6 FLOPs per parameter and token at this speed", days(rule))
        if options.price is not None:
            money = flops.cost(gpus, length, options.price)
            between = " to ".join(f"{end:,.0f}" for end in accuracy.around(money))
            result.add_row(f"cost at {options.price:g} per GPU and hour", f"{money:,.0f} ({between})")
    return result
