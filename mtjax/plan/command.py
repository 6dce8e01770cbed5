"""What `mtjax plan` does once its options have been read: report on a plan, or search for one."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mtjax import config
from mtjax.config import sizes
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.plan.hints import hints
from mtjax.plan.options import Options
from mtjax.plan.report import make_console, print_report
from mtjax.plan.search import best_plan, describe, gpus_within, nearest_feasible, search
from mtjax.plan.search_report import print_search
from mtjax.plan.side_reports import print_inference, print_published
from mtjax.theory import target
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.divisibility import check, check_config
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.hardware import Server
from mtjax.theory.memory import peak_stage_memory
from mtjax.theory.mesh import MeshShape, parse_mesh
from mtjax.theory.plan import Plan

SEARCHING = "Comparing plans ..."
"""What a terminal shows meanwhile: of long samples and many GPUs there are thousands."""
Verify = Callable[[Console, config.Config, str], None]
"""Compiles a config for a target and prints the error of each formula."""
Taught = Callable[[config.Config], tuple[config.Config, config.Model | None]]
"""A config with what the weights of its teacher say of themselves, and the teacher's model; None without one."""


def run(asked: config.Config, options: Options, source: str, verify: Verify, taught: Taught) -> None:
    """Prints what the options ask for.

    Args:
      asked: the config as it was given.
      options: the planner's own.
      source: the config's name or path as typed, for the command that a search prints.
      verify: called with --verify.
      taught: asked for the teacher.
    """
    console = make_console()
    if options.published:
        print_published(console)
        return
    run_config, teacher = taught(with_vocabulary(asked, console.print))
    server = target.parse(options.target)
    anatomy = anatomy_of(run_config.model)
    _check_imbalance(anatomy, options)
    if options.gpus is not None or options.days is not None:
        plan = _search(console, anatomy, run_config, teacher, server, options, asked, source)
    else:
        plan = _report(console, anatomy, run_config, _planned(run_config, teacher), server, options)
    if options.inference:
        print_inference(console, anatomy, server, plan.tensor_degree, options.context or anatomy.model.sequence_length)
    if options.plot is not None:
        _plot(console, options.plot, anatomy, plan, server, options)
    if options.verify:
        verify(console, run_config, options.target)


def _check_imbalance(anatomy: Anatomy, options: Options) -> None:
    """Checks that there are experts of which some may have more to do, and that a rank's share is possible.

    Raises:
      UserError: it is not.
    """
    asked, count = options.expert_imbalance, anatomy.model.num_experts
    if asked != 1 and not count:
        raise UserError(f"--expert-imbalance {asked:g} is for models with experts, and num_experts is 0: leave it out")
    if count and asked > count:
        raise UserError(f"--expert-imbalance {asked:g} is more than all tokens on one of {count} experts: take less")


def _imbalance(anatomy: Anatomy, options: Options) -> float:
    """The load of the rank that has most, beside the mean: no expert takes more than its capacity."""
    return min(options.expert_imbalance, max(anatomy.model.capacity_factor or math.inf, 1.0))


def _report(
    console: Console, anatomy: Anatomy, run_config: config.Config, planned: Plan, server: Server, options: Options
) -> Plan:
    """Reports on the config's mesh; one that does not fit is reported with the nearest that does."""
    plan = replace(planned, expert_imbalance=_imbalance(anatomy, options))
    server.each_of(plan.mesh.size)  # refuses what would leave a server half empty
    print_report(console, anatomy, plan, server, options)
    for hint in hints(anatomy, plan, server, run_config):
        console.print(f"\nHint:  {hint}", soft_wrap=True)
    limit = options.usable * server.gpu.memory
    if peak_stage_memory(anatomy, plan).total > limit:
        with console.status(SEARCHING):
            found = search(anatomy, plan, plan.mesh.size, server)
            near = found.best if found.fitting else nearest_feasible(anatomy, plan, plan.mesh.size, server)
        hint = (
            f"the nearest plan that does is {describe(near.plan)} ({near.plan.mesh.size} GPUs)"
            if near
            else ("no number of these GPUs does")
        )
        console.print(f"\n[bold]This plan does not fit {options.target}[/]: {hint}.", soft_wrap=True)
    return plan


def _planned(run_config: config.Config, teacher: config.Model | None) -> Plan:
    """The config's plan, with its teacher.

    Raises:
      UserError: it does not divide, or asks for a recompute that times and traffic have no formula for.
    """
    mesh = parse_mesh(run_config.parallel.mesh)
    check_config(run_config, mesh)
    plan = Plan.of(run_config, mesh, teacher=teacher)
    check(run_config.model, plan)
    asked = sizes.describe_recompute(run_config.training)
    if asked not in ("no recompute", "selective recompute", "full recompute"):
        raise UserError(
            "the planner's formulas know none, selective, and full of every layer on its own, and the config "
            f"asks for {asked}; mtjax inspect compiles it"
        )
    return plan


def _search(
    console: Console,
    anatomy: Anatomy,
    run_config: config.Config,
    teacher: config.Model | None,
    server: Server,
    options: Options,
    asked: config.Config,
    source: str,
) -> Plan:
    """Searches for a number of GPUs or for a number of days; returns the winner."""
    settings = {
        "pipeline_schedule": "1f1b",
        "chunks": 1,
        "layers_per_stage": None,
        "expert_imbalance": _imbalance(anatomy, options),
        "teacher": teacher,
    }
    base = Plan.of(run_config, MeshShape(), **settings)
    gpus = options.gpus
    if gpus is None:
        assert options.days is not None and options.tokens is not None
        with console.status(SEARCHING):
            gpus = gpus_within(anatomy, base, options.tokens, options.days, server).plan.mesh.size
        console.print(f"[bold]{gpus} GPUs[/] read {options.tokens:.3g} tokens within {options.days:g} days.\n")
    with console.status(SEARCHING):
        found = best_plan(anatomy, base, gpus, server)
    print_search(console, anatomy, found, server, options, asked, source)
    return found.best.plan


def _plot(console: Console, path: Path, anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> None:
    from mtjax.plan.plots import draw  # matplotlib takes a second to import

    draw(path, anatomy, plan, server, options)
    console.print(f"\nDrawn: {path}")
