"""Tables about a search: the best plans, those that do not fit, rejected meshes; and the winner's train command."""

import shlex

from rich.console import Console
from rich.table import Table

from mtjax import config
from mtjax.analysis import flops
from mtjax.analysis.accuracy import accuracy_on
from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.flops import SECONDS_PER_DAY
from mtjax.analysis.hardware import Server
from mtjax.analysis.machine import Machine
from mtjax.layout.plan import Plan
from mtjax.plan.hints import hints
from mtjax.plan.options import Options
from mtjax.plan.report import MATMULS, show, table, time_parts
from mtjax.plan.search import Candidate, Found, describe, fastest_kinds, rejections
from mtjax.plan.units import days, gib, percent, seconds, si

SHOWN = 10
"""Plans in a table, each of another kind: ten that differ in the microbatch size would show little."""


def print_search(
    console: Console, anatomy: Anatomy, found: Found, server: Server, options: Options, run: config.Config, source: str
) -> None:
    """Prints the best ten plans, faster ones that do not fit, rejected meshes, and the winner's command."""
    tables = [best_table(anatomy, found, server, options), failed_table(found)]
    tables.append(rejected_table(anatomy, found.best, server))
    show(console, *(t for t in tables if t.row_count))
    console.print()
    limit = options.usable * server.gpu.memory
    for hint in hints(anatomy, found.best.plan, server, run, limit):
        console.print(f"Hint:  {hint}", soft_wrap=True)
    console.print(f"Train it:  {train_command(found.best.plan, run, source)}", soft_wrap=True)


def best_table(anatomy: Anatomy, found: Found, server: Server, options: Options) -> Table:
    """Builds the table of the ten fastest kinds of plans that fit."""
    title = f"Fastest of {len(found.fitting):,} plans that fit {found.best.plan.mesh.size} x {server.gpu.description}"
    lengths = ["days"] if options.tokens else []
    price, tokens = options.price, options.tokens or 1e9
    costs = [f"cost of {si(tokens, '')}tokens"] if price is not None else []
    note = f"by formula; the fastest plan of each mesh and recompute; {accuracy_on(server).in_words}"
    result = table(title, "plan", "step", "MFU", "memory", *lengths, *costs, "largest overheads", note=note)
    for candidate in fastest_kinds(found.fitting, SHOWN):
        row = [describe(candidate.plan), seconds(candidate.time.total), percent(mfu(anatomy, candidate, server))]
        row.append(gib(candidate.memory.total))
        if options.tokens:
            row.append(days(length(anatomy, candidate, options.tokens)))
        if price is not None:
            money = flops.cost(candidate.plan.mesh.size, length(anatomy, candidate, tokens), price)
            row.append(f"{money:,.0f}")
        result.add_row(*row, reasons(candidate))
    return result


def mfu(anatomy: Anatomy, candidate: Candidate, server: Server) -> float:
    """Returns the MFU, with full attention."""
    plan = candidate.plan
    peak = Machine(server, plan.element_bytes).peak
    useful = flops.model_flops(anatomy) * plan.global_batch_size
    return flops.utilization(useful, candidate.time.total, plan.mesh.size, peak)


def length(anatomy: Anatomy, candidate: Candidate, tokens: float) -> float:
    """Returns the days of training on `tokens`."""
    steps = flops.steps_for_tokens(tokens, candidate.plan.global_batch_size, anatomy.model.sequence_length)
    return steps * candidate.time.total / SECONDS_PER_DAY


def reasons(candidate: Candidate) -> str:
    """Returns the three largest causes of the plan's time other than matmuls with weights."""
    time = candidate.time
    overheads = {k: v for k, v in time_parts(time).items() if k != MATMULS}
    return ", ".join(f"{k} {percent(v / time.total)}" for k, v in list(overheads.items())[:3])


def failed_table(found: Found) -> Table:
    """Builds the table of plans that are as fast as those of `best_table` and need too much memory."""
    result = table("As fast, but out of memory", "plan", "step", "memory", "over the limit by")
    *_, slowest = fastest_kinds(found.fitting, SHOWN)
    for candidate in fastest_kinds(found.excessive, SHOWN // 2, slowest.time.total):
        size = candidate.memory.total
        row = describe(candidate.plan), seconds(candidate.time.total), gib(size), gib(size - found.limit)
        result.add_row(*row)
    return result


def rejected_table(anatomy: Anatomy, best: Candidate, server: Server) -> Table:
    """Builds the table of meshes without pipeline parallelism that were rejected."""
    result = table("Rejected meshes", "mesh", "reason")
    plan = best.plan
    for mesh, reason in rejections(anatomy, plan, plan.mesh.size, server):
        result.add_row(str(mesh), reason)
    return result


def train_command(plan: Plan, run: config.Config, source: str) -> str:
    """Returns the command that trains a plan.

    Args:
      plan: the winner.
      run: the config with the changes of the command line.
      source: the config's name or path, as typed.
    """
    is_finetuned = run.finetuning.task != "none" or run.finetuning.teacher is not None
    words = ["mtjax finetune" if is_finetuned else "mtjax train", f"--config {shlex.quote(source)}"]
    chosen = {"mesh": str(plan.mesh), "microbatch_size": plan.microbatch_size, "zero": plan.zero}
    chosen |= {"recompute": plan.recompute}
    # Typed even where they have their defaults: they are what the search was about.
    always = set(chosen) | ({"sequence_parallel"} if plan.tensor_degree > 1 else set())
    chosen |= {"sequence_parallel": plan.sequence_parallel, "expert_dispatch": plan.expert_dispatch}
    chosen |= {
        "pipeline_schedule": plan.pipeline_schedule,
        "chunks": plan.chunks,
        "layers_per_stage": plan.layers_per_stage,
    }
    is_default = run.training.unroll_layers is None and plan.unrolled == plan.unrolls(run)
    chosen |= {"unroll_layers": None if is_default else plan.unrolled}
    # recompute_offload is an error with any other recompute, and the search may have chosen another.
    chosen |= {"recompute_offload": run.training.recompute_offload and plan.recompute == "full"}
    planned = config.to_dict(config.replace(run, **chosen))
    # Only what differs from the file is typed, so that the command stays readable.
    shipped = config.to_dict(config.load(source))
    for group, fields in planned.items():
        for name, value in fields.items():
            if name in always or value != shipped[group].get(name):
                words.append(_option(name, value))
        # A setting that the file has and the plan has not: None is typed to take it away.
        words += [_option(name, None) for name in shipped[group] if name not in fields]
    if not is_finetuned:  # placeholders for the user's files
        words += [] if run.data.data else ["--data CORPUS.jsonl"]
        words += [] if run.data.tokenizer else ["--tokenizer TOKENIZER"]
    return " ".join(words)


def _option(name: str, value: object) -> str:
    """Returns a setting as an option of the command line: "--num-layers 12", "--no-scaled-init"."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    words = value if isinstance(value, list | tuple) else [value]
    if name == "layers_per_stage" and value is not None:
        words = [",".join(map(str, words))]
    return " ".join([f"--{flag}", *(shlex.quote(str(word)) for word in words)])
