"""The command `mtjax plan` after its options are parsed: reports on a plan, or searches for one."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mtjax import config
from mtjax.analysis import target
from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.analysis.hardware import Server
from mtjax.analysis.memory import peak_stage_memory
from mtjax.config import sizes
from mtjax.config.storage import check_snapshots
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.layout.attention_kernel import Capability
from mtjax.layout.divisibility import check, check_config
from mtjax.layout.float8 import check_float8_gpu, float8_note
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.plan.hints import hints
from mtjax.plan.options import Options
from mtjax.plan.report import make_console, print_report
from mtjax.plan.search import Space, describe, fitting_plans, gpus_within, nearest_feasible, search
from mtjax.plan.search_report import print_search
from mtjax.plan.side_reports import print_inference, print_published
from mtjax.plan.units import si
from mtjax.waiting import waiting

SEARCHING = "comparing plans"
"""What is said during a search, which may compare thousands of plans."""
Verify = Callable[[Console, config.Config, str], None]
"""Compiles a config for a target and prints the error of each formula."""
WithTeacher = Callable[[config.Config], tuple[config.Config, config.Model | None]]
"""Returns a config with the teacher's width, and the teacher's model; None without one."""


def run(given: config.Config, options: Options, source: str, verify: Verify, with_teacher: WithTeacher) -> None:
    """Prints the reports that the options request.

    Args:
      given: the config as given by the user.
      options: the planner's.
      source: the config's name or path as typed, for the command that a search prints.
      verify: called with --verify.
      with_teacher: reads the teacher's model.
    """
    console = make_console()
    if options.published:
        print_published(console)
        return
    run_config, teacher = with_teacher(with_vocabulary(given, console.print))
    server = target.parse(options.target)
    anatomy = anatomy_of(run_config.model)
    model = anatomy.model
    console.print(
        f"Model {source}: {model.family}, {si(parameters(anatomy), '')}parameters, {model.num_layers} layers, hidden "
        f"{model.hidden_size}",
        highlight=False,
        soft_wrap=True,
    )
    _check_imbalance(anatomy, options)
    # Before the search, which would take seconds and then propose what the GPU can't run.
    if (fp8 := run_config.training.fp8) != "none":
        check_float8_gpu(fp8, server.gpu.description, server.gpu.compute_capability)
    check_snapshots(anatomy.model, options.state_snapshots)
    if options.gpus is not None or options.days is not None:
        plan = _search(console, anatomy, run_config, teacher, server, options, given, source)
    else:
        plan = _report(
            console, anatomy, run_config, _planned(run_config, teacher, server.gpu.compute_capability), server, options
        )
    if options.inference:
        context = options.context or anatomy.model.sequence_length
        print_inference(console, anatomy, server, plan.tensor_degree, context, options.state_snapshots)
    if options.plot is not None:
        _plot(console, options.plot, anatomy, plan, server, options)
    if options.verify:
        verify(console, run_config, options.target)


def _check_imbalance(anatomy: Anatomy, options: Options) -> None:
    """Checks --expert-imbalance against the number of experts.

    Raises:
      UserError: there are no experts, or fewer than the imbalance.
    """
    imbalance, count = options.expert_imbalance, anatomy.model.num_experts
    if imbalance != 1 and not count:
        raise UserError(f"--expert-imbalance {imbalance:g} needs a model with experts, and num_experts is 0: remove it")
    if count and imbalance > count:
        raise UserError(
            f"--expert-imbalance {imbalance:g} is above num_experts {count}, the imbalance with all tokens on one "
            "expert: use a smaller number"
        )


def _imbalance(anatomy: Anatomy, options: Options) -> float:
    """Returns the load of the busiest rank over the mean, limited by the experts' capacity."""
    # An expert drops tokens beyond its capacity, so that no rank has more than that.
    return min(options.expert_imbalance, max(anatomy.model.capacity_factor or math.inf, 1.0))


def _report(
    console: Console, anatomy: Anatomy, run_config: config.Config, planned: Plan, server: Server, options: Options
) -> Plan:
    """Prints the report on the config's mesh; if it does not fit the memory, with the nearest plan that does."""
    plan = replace(planned, expert_imbalance=_imbalance(anatomy, options))
    server.each_of(plan.mesh.size)  # raises where servers would not be full
    print_report(console, anatomy, plan, server, options)
    if note := float8_note(anatomy.model, plan):
        console.print(f"\nNote:  {note}", soft_wrap=True)
    limit = options.usable * server.gpu.memory
    for hint in hints(anatomy, plan, server, run_config, limit):
        console.print(f"\nHint:  {hint}", soft_wrap=True)
    if peak_stage_memory(anatomy, plan).total > limit:
        with waiting(SEARCHING):
            space = Space(usable=options.usable)
            found = search(anatomy, plan, plan.mesh.size, server, space)
            near = found.best if found.fitting else nearest_feasible(anatomy, plan, plan.mesh.size, server, space)
        hint = (
            f"the nearest plan that does is {describe(near.plan)} ({near.plan.mesh.size} GPUs)"
            if near
            else ("no number of these GPUs is enough")
        )
        console.print(f"\n[bold]This plan does not fit {options.target}[/]: {hint}.", soft_wrap=True)
    return plan


def _planned(run_config: config.Config, teacher: config.Model | None, capability: Capability) -> Plan:
    """Returns the config's plan on GPUs of this compute capability, with its teacher.

    Raises:
      UserError: model or batch do not fit the mesh, or there is no formula for the recompute.
    """
    mesh = parse_mesh(run_config.parallel.mesh)
    check_config(run_config, mesh)
    plan = Plan.of(run_config, mesh, capability, teacher=teacher)
    check(run_config.model, plan)
    # An estimate for other groups of layers would be that of single layers, and look as certain.
    recompute = sizes.describe_recompute(run_config.training)
    if recompute not in ("no recompute", "selective recompute", "full recompute"):
        raise UserError(
            f"the planner has formulas for recompute none, selective, and full of single layers, and the config has "
            f"{recompute}: use mtjax inspect, which compiles it"
        )
    return plan


def _search(
    console: Console,
    anatomy: Anatomy,
    run_config: config.Config,
    teacher: config.Model | None,
    server: Server,
    options: Options,
    given: config.Config,
    source: str,
) -> Plan:
    """Prints the best plans for a number of GPUs, or of days; returns the best."""
    # What the config says about stages is for its own mesh; the search sets these for each mesh that it tries.
    settings = {
        "pipeline_schedule": "1f1b",
        "chunks": 1,
        "layers_per_stage": None,
        "expert_imbalance": _imbalance(anatomy, options),
        "teacher": teacher,
    }
    base = Plan.of(run_config, MeshShape(), server.gpu.compute_capability, **settings)
    asked = run_config.training.unroll_layers
    space = Space(usable=options.usable, unrolled=(False, True) if asked is None else (asked,))
    gpus = options.gpus
    if gpus is None:
        assert options.days is not None and options.tokens is not None
        with waiting(SEARCHING):
            gpus = gpus_within(anatomy, base, options.tokens, options.days, server, space).plan.mesh.size
        console.print(f"[bold]{gpus} GPUs[/] train on {options.tokens:.3g} tokens within {options.days:g} days.\n")
    with waiting(SEARCHING):
        found = fitting_plans(anatomy, base, gpus, server, space)
    print_search(console, anatomy, found, server, options, given, source)
    return found.best.plan


def _plot(console: Console, path: Path, anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> None:
    from mtjax.plan.plots import draw  # matplotlib takes a second to import

    draw(path, anatomy, plan, server, options)
    console.print(f"\nPlotted: {path}")
