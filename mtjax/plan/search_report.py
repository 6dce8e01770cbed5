"""Results of the search: the best plans and why, those that fail and why, and the command that trains the winner."""

import shlex

from rich.console import Console
from rich.table import Table

from mtjax import config
from mtjax.plan.hints import hints
from mtjax.plan.options import Options
from mtjax.plan.report import show, table, time_parts
from mtjax.plan.search import Candidate, Found, describe, rejections
from mtjax.plan.units import days, gib, percent, seconds, si
from mtjax.theory import flops
from mtjax.theory.accuracy import accuracy_on
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.flops import SECONDS_PER_DAY
from mtjax.theory.hardware import Server
from mtjax.theory.machine import Machine
from mtjax.theory.plan import Plan

SHOWN = 10


def print_search(
    console: Console, anatomy: Anatomy, found: Found, server: Server, options: Options, run: config.Config, source: str
) -> None:
    """The best ten, the next that fail, and the winner's command."""
    tables = [best_table(anatomy, found, server, options), failed_table(found)]
    tables.append(rejected_table(anatomy, found.best, server))
    show(console, *(t for t in tables if t.row_count))
    console.print()
    for hint in hints(anatomy, found.best.plan, server, run):
        console.print(f"Hint:  {hint}", soft_wrap=True)
    console.print(f"Train it:  {train_command(found.best.plan, run, source)}", soft_wrap=True)


def of_different_kinds(fitting: list[Candidate]) -> list[Candidate]:
    """The fastest plan of each mesh and recompute, fastest first: ten that differ in a microbatch would say little."""
    kinds: dict[tuple[str, str], Candidate] = {}
    for candidate in fitting:
        kinds.setdefault((str(candidate.plan.mesh), candidate.plan.recompute), candidate)
    return list(kinds.values())[:SHOWN]


def best_table(anatomy: Anatomy, found: Found, server: Server, options: Options) -> Table:
    """The ten fastest kinds of plans that fit."""
    first, *_ = found.fitting
    title = f"Fastest of {len(found.fitting):,} plans that fit {first.plan.mesh.size} x {server.gpu.description}"
    lengths = ["days"] if options.tokens else []
    price, tokens = options.price, options.tokens or 1e9
    costs = [f"cost of {si(tokens, '')}tokens"] if price is not None else []
    note = f"by formula, the fastest of each mesh and recompute; {accuracy_on(server).in_words}"
    result = table(title, "plan", "step", "MFU", "memory", *lengths, *costs, "what takes most", note=note)
    for candidate in of_different_kinds(found.fitting):
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
    """Model FLOPs over the peak, attention in full."""
    plan = candidate.plan
    peak = Machine(server, plan.element_bytes).peak
    useful = flops.model_flops(anatomy) * plan.global_batch_size
    return flops.utilisation(useful, candidate.time.total, plan.mesh.size, peak)


def length(anatomy: Anatomy, candidate: Candidate, tokens: float) -> float:
    """Days for `tokens`."""
    steps = flops.steps_for_tokens(tokens, candidate.plan.global_batch_size, anatomy.model.sequence_length)
    return steps * candidate.time.total / SECONDS_PER_DAY


def reasons(candidate: Candidate) -> str:
    """The largest parts of the plan's time other than matmuls with weights."""
    time = candidate.time
    losses = {k: v for k, v in time_parts(time).items() if k != "products"}
    return ", ".join(f"{k} {percent(v / time.total)}" for k, v in list(losses.items())[:3])


def failed_table(found: Found) -> Table:
    """Plans that would be faster than the tenth best, and what keeps them from running."""
    result = table("Would be as fast, but don't fit", "plan", "step", "memory", "too much by")
    slowest = of_different_kinds(found.fitting)[-1].time.total
    for candidate in of_different_kinds([c for c in found.too_large if c.time.total <= slowest])[:5]:
        size = candidate.memory.total
        row = describe(candidate.plan), seconds(candidate.time.total), gib(size), gib(size - found.limit)
        result.add_row(*row)
    return result


def rejected_table(anatomy: Anatomy, best: Candidate, server: Server) -> Table:
    """Meshes without stages that were not tried, and why."""
    result = table("Not possible", "mesh", "because")
    plan = best.plan
    for mesh, reason in rejections(anatomy, plan, plan.mesh.size, server):
        result.add_row(str(mesh), reason)
    return result


def train_command(plan: Plan, run: config.Config, source: str) -> str:
    """The command that trains a plan.

    Args:
      plan: the winner.
      run: the config with the changes of the command line.
      source: the config's name or path, as typed.
    """
    is_finetuned = run.finetuning.task != "none" or run.finetuning.teacher is not None
    words = ["mtjax finetune" if is_finetuned else "mtjax train", f"--config {shlex.quote(source)}"]
    chosen = {"mesh": str(plan.mesh), "microbatch_size": plan.microbatch_size, "zero": plan.zero}
    chosen |= {"recompute": plan.recompute}
    always = set(chosen) | ({"sequence_parallel"} if plan.tensor_degree > 1 else set())
    chosen |= {"sequence_parallel": plan.sequence_parallel, "expert_dispatch": plan.expert_dispatch}
    chosen |= {
        "pipeline_schedule": plan.pipeline_schedule,
        "chunks": plan.chunks,
        "layers_per_stage": plan.layers_per_stage,
    }
    # Refused with any other recompute, which the plan may have.
    chosen |= {"recompute_offload": run.training.recompute_offload and plan.recompute == "full"}
    asked = config.to_dict(config.replace(run, **chosen))
    shipped = config.to_dict(config.load(source))
    for group, fields in asked.items():
        for name, value in fields.items():
            if name in always or value != shipped[group].get(name):
                words.append(_option(name, value))
        words += [_option(name, None) for name in shipped[group] if name not in fields]
    if not is_finetuned:  # placeholders for the reader's own files
        words += [] if run.data.data else ["--data CORPUS.jsonl"]
        words += [] if run.data.tokenizer else ["--tokenizer TOKENIZER"]
    return " ".join(words)


def _option(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    words = value if isinstance(value, list | tuple) else [value]
    if name == "layers_per_stage" and value is not None:
        words = [",".join(map(str, words))]
    return " ".join([f"--{flag}", *(shlex.quote(str(word)) for word in words)])
