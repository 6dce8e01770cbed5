"""Summary of the HTML page for the decision to rent GPUs: duration and cost of the run, and a faster plan."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.metadata import version
from io import BytesIO

import tomli_w

from mtjax import config as configs
from mtjax.analysis.accuracy import accuracy_on
from mtjax.analysis.flops import SECONDS_PER_DAY, cost
from mtjax.analysis.hardware import Server
from mtjax.analysis.timing import step_time
from mtjax.config import Config
from mtjax.inspect.report import Report
from mtjax.plan.search import Candidate, describe, search
from mtjax.plan.search_report import train_command
from mtjax.plan.units import days, percent, seconds

PACKAGES = ("mtjax", "jax", "jaxlib", "flax")
POOR_MFU = 0.3
"""MFU below which it is shown in red: published runs of the last years have 35 to 55%."""
POOR_WAIT = 0.25
"""Exposed share of a step's communication above which it is shown in red."""
WORTH = 0.97
"""Relative step time below which another plan counts as faster."""


@dataclass(frozen=True)
class Decision:
    """Contents of the summary."""

    report: Report
    price: float | None
    """Of one GPU for one hour."""
    faster: Candidate | None
    """The planner's fastest plan for as many GPUs, if it is faster than the compiled one by the same formulas."""
    command: str | None
    """Command that trains the faster plan; None without one."""

    @classmethod
    def on(cls, report: Report, given: Config, source: str, price: float | None = None) -> "Decision":
        """Searches for a faster plan, by formula, where the hardware is known; takes seconds.

        Args:
          report: of the compiled plan.
          given: the config as given by the user.
          source: the config's name or path as typed.
          price: of one GPU for one hour.
        """
        server = report.time.server if report.time else None
        faster = faster_plan(report, server) if server else None
        return cls(report, price, faster, train_command(faster.plan, given, source) if faster else None)


def faster_plan(report: Report, server: Server) -> Candidate | None:
    """Returns the fastest plan that fits, if it takes less than `WORTH` of the compiled one's time by formula."""
    anatomy, plan = report.step.anatomy, report.step.plan
    # Both times by formula: a compiled time beside an estimated one would decide by the formula's error.
    found = search(anatomy, plan, plan.mesh.size, server)
    now = step_time(anatomy, plan, server).total
    return found.best if found.fitting and found.best.time.total < WORTH * now else None


def sections(decision: Decision) -> str:
    """Returns the summary as HTML: the run, its duration and cost, a faster plan, and the config."""
    rows = [f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in (*_run(decision), *_about())]
    settings = BytesIO()
    tomli_w.dump(configs.to_dict(decision.report.config), settings)
    return (
        f'<h2>The run</h2><div class="wide"><table>{"".join(rows)}</table></div>'
        f"<details><summary>all settings</summary><pre>{escape(settings.getvalue().decode())}</pre></details>"
    )


def _run(decision: Decision) -> Sequence[tuple[str, str]]:
    """Returns rows on duration, cost and a faster plan; none where the hardware is not known."""
    report, time = decision.report, decision.report.time
    if time is None:
        return ()
    config, accuracy = report.config, accuracy_on(time.server)
    steps, gpus = config.training.steps, report.step.mesh.size
    tokens = steps * config.training.global_batch_size * config.model.sequence_length
    length = steps * time.seconds / SECONDS_PER_DAY
    between = " to ".join(days(end) for end in accuracy.around(length))
    rows = [(f"{steps:,} steps, {tokens / 1e9:,.1f} billion tokens", f"{days(length)} on {gpus} GPUs ({between})")]
    if decision.price is not None:
        money = cost(gpus, length, decision.price)
        between = " to ".join(f"{end:,.0f}" for end in accuracy.around(money))
        rows.append((f"cost at {decision.price:g} per GPU and hour", f"{money:,.0f} ({between})"))
    rows.append(("range", escape(accuracy.in_words)))
    rows.append(("faster plan", _faster(decision, time.by_plan)))
    if decision.command is not None:
        rows.append(("command of the faster plan", f"<code>{escape(decision.command)}</code>"))
    return rows


def _faster(decision: Decision, now: float) -> str:
    best = decision.faster
    if best is None:
        return '<span class="good">the planner finds none for this number of GPUs</span>'
    gain = 1 - best.time.total / now
    text = f"{describe(best.plan)}: {seconds(best.time.total)} estimated, {percent(gain)} less than this plan"
    return escape(text)


def _typed() -> list[str]:
    """Returns the command line of this process; `sys.argv` has "inspect" unless run as `python -m mtjax.inspect`."""
    arguments = sys.argv[1:]
    return ["mtjax", "inspect", *(arguments[1:] if arguments[:1] == ["inspect"] else arguments)]


def _about() -> Sequence[tuple[str, str]]:
    command = shlex.join(_typed())
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return ("command", f"<code>{escape(command)}</code>"), ("versions", packages), ("date", date.today().isoformat())
