"""What `mtjax plan` does when its options have been read: report on a plan, or search one."""

from pathlib import Path

from rich.console import Console

from mtjax import config
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.plan import target
from mtjax.plan.formulas import Shape
from mtjax.plan.hardware import Server
from mtjax.plan.memory import fullest_stage
from mtjax.plan.options import Options
from mtjax.plan.plans import Plan, Ways, check, parse_ways
from mtjax.plan.report import make_console, print_report
from mtjax.plan.search import best_plan, describe, gpus_within, nearest_feasible, search, trains_today
from mtjax.plan.search_report import print_search
from mtjax.plan.side_reports import print_inference, print_published


def run(asked: config.Config, options: Options, source: str) -> None:
    """Prints what the options ask for.

    Args:
      asked: the config as it was given.
      options: the planner's own.
      source: the config's name or path as typed, for the command that a search prints.
    """
    console = make_console()
    if options.published:
        print_published(console)
        return
    run_config = with_vocabulary(asked, console.print)
    if run_config.model.family == "t5":
        raise UserError(
            "the planner's memory and time are formulas of a single stack of layers, and a T5 has two; "
            "mtjax inspect compiles its step and tells both"
        )
    server = target.parse(options.target)
    shape = Shape.of(run_config.model)
    if options.gpus is not None or options.days is not None:
        plan = _search(console, shape, run_config, server, options, asked, source)
    else:
        plan = _report(console, shape, run_config, server, options)
    if options.inference:
        print_inference(console, shape, server, plan.ways.model, options.context or shape.sequence_length)
    if options.plot is not None:
        _plot(console, options.plot, shape, plan, server, options)
    if options.verify:
        _verify(console, run_config, plan, options)


def _report(console: Console, shape: Shape, run_config: config.Config, server: Server, options: Options) -> Plan:
    """Reports on the config's mesh; one that does not fit is reported with the nearest that does."""
    plan = _planned(run_config, options)
    check(shape, plan)
    server.each_of(plan.ways.gpus)  # refuses what would leave a server half empty
    print_report(console, shape, plan, server, options)
    limit = options.usable * server.gpu.memory
    if fullest_stage(shape, plan).total > limit:
        found = search(shape, plan, plan.ways.gpus, server)
        near = found.best if found.fitting else nearest_feasible(shape, plan, plan.ways.gpus, server)
        hint = (
            f"the nearest plan that does is {describe(near.plan)} ({near.plan.ways.gpus} GPUs)"
            if near
            else ("no number of these GPUs does")
        )
        console.print(f"\n[bold]This plan does not fit {options.target}[/]: {hint}.", soft_wrap=True)
    return plan


def _planned(run_config: config.Config, options: Options) -> Plan:
    """The config's plan with the planner's own settings over it.

    Raises:
      UserError: the config asks for a recompute that times and traffic have no formula for.
    """
    asked = config.describe_recompute(run_config.training)
    if asked not in ("no recompute", "selective recompute", "full recompute"):
        raise UserError(
            "the planner's formulas know none, selective, and full of every layer on its own, and the config "
            f"asks for {asked}; mtjax inspect compiles it"
        )
    ways = parse_ways(run_config.parallel.mesh)
    return Plan.of(run_config, ways, schedule=options.schedule, chunks=options.chunks)


def _search(
    console: Console,
    shape: Shape,
    run_config: config.Config,
    server: Server,
    options: Options,
    asked: config.Config,
    source: str,
) -> Plan:
    """Searches for a number of GPUs or for a number of days; returns the winner."""
    base = Plan.of(run_config, Ways())
    gpus = options.gpus
    if gpus is None:
        assert options.days is not None and options.tokens is not None
        gpus = gpus_within(shape, base, options.tokens, options.days, server).plan.ways.gpus
        console.print(f"[bold]{gpus} GPUs[/] read {options.tokens:.3g} tokens within {options.days:g} days.\n")
    found = best_plan(shape, base, gpus, server)
    print_search(console, shape, found, server, options, asked, source)
    return found.best.plan


def _plot(console: Console, path: Path, shape: Shape, plan: Plan, server: Server, options: Options) -> None:
    from mtjax.plan.plots import draw  # matplotlib takes a second to import

    draw(path, shape, plan, server, options)
    console.print(f"\nDrawn: {path}")


def _verify(console: Console, run_config: config.Config, plan: Plan, options: Options) -> None:
    if not trains_today(plan):
        raise UserError(f"--verify compiles what `mtjax train` has, which is no stages, and mesh {plan.ways} has some")
    from mtjax.plan.verify import print_verification  # compiles: the only part that needs jax

    print_verification(console, run_config, options.target)
