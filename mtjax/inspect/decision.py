"""For whoever decides whether to rent the GPUs: how long the run takes, what it costs, and which plan is faster."""

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
from mtjax.config import Config
from mtjax.inspect.report import Report
from mtjax.plan.search import Candidate, describe, search
from mtjax.plan.search_report import train_command
from mtjax.plan.units import days, percent, seconds
from mtjax.theory.accuracy import accuracy_on
from mtjax.theory.flops import SECONDS_PER_DAY, cost
from mtjax.theory.hardware import Server
from mtjax.theory.timing import step_time

PACKAGES = ("mtjax", "jax", "jaxlib", "flax")
POOR_MFU = 0.3
"""Below it a figure is shown in red: published runs of the last years have 35 to 55%."""
POOR_WAIT = 0.25
"""Share of a step waiting for collectives above which it is shown in red."""
WORTH = 0.97
"""Share of the time below which another plan counts as faster."""


@dataclass(frozen=True)
class Decision:
    """What the page says before any detail."""

    report: Report
    price: float | None
    """Of one GPU for one hour."""
    faster: Candidate | None
    """The planner's fastest plan for as many GPUs, where it beats the one compiled by the same formulas."""
    command: str | None
    """Trains the faster plan; None without one."""

    @classmethod
    def on(cls, report: Report, asked: Config, source: str, price: float | None = None) -> "Decision":
        """Searches for a faster plan, by formula, where the hardware is known: seconds.

        Args:
          report: of the compiled plan.
          asked: the config as it was given.
          source: the config's name or path as typed.
          price: of one GPU for one hour.
        """
        server = report.time.server if report.time else None
        faster = faster_plan(report, server) if server else None
        return cls(report, price, faster, train_command(faster.plan, asked, source) if faster else None)


def faster_plan(report: Report, server: Server) -> Candidate | None:
    """The fastest plan that fits, if it takes less than `WORTH` of the compiled one's time by formula."""
    anatomy, plan = report.step.anatomy, report.step.plan
    found = search(anatomy, plan, plan.mesh.size, server)
    now = step_time(anatomy, plan, server).total
    return found.best if found.fitting and found.best.time.total < WORTH * now else None


def sections(decision: Decision) -> str:
    """The page's part, as HTML: the run, its length and cost, the faster plan, and the config that it is of."""
    rows = [f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in (*_run(decision), *_about())]
    settings = BytesIO()
    tomli_w.dump(configs.to_dict(decision.report.config), settings)
    return (
        f'<h2>The run</h2><div class="wide"><table>{"".join(rows)}</table></div>'
        f"<details><summary>all settings</summary><pre>{escape(settings.getvalue().decode())}</pre></details>"
    )


def _run(decision: Decision) -> Sequence[tuple[str, str]]:
    """Rows on length, cost and the faster plan; none where the hardware is not known."""
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
    rows.append(("a faster plan", _faster(decision, time.by_plan)))
    if decision.command is not None:
        rows.append(("its command", f"<code>{escape(decision.command)}</code>"))
    return rows


def _faster(decision: Decision, now: float) -> str:
    best = decision.faster
    if best is None:
        return '<span class="good">the planner finds none for this number of GPUs</span>'
    gain = 1 - best.time.total / now
    text = f"{describe(best.plan)}: {seconds(best.time.total)} estimated, {percent(gain)} less than this plan"
    return escape(text)


def _typed() -> list[str]:
    """The command line of this process; `mtjax inspect` passes its own name on, `python -m mtjax.inspect` does not."""
    arguments = sys.argv[1:]
    return ["mtjax", "inspect", *(arguments[1:] if arguments[:1] == ["inspect"] else arguments)]


def _about() -> Sequence[tuple[str, str]]:
    command = shlex.join(_typed())
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return ("command", f"<code>{escape(command)}</code>"), ("versions", packages), ("date", date.today().isoformat())
