"""What to change where a compiled step does not fit the memory."""

import shlex
from dataclasses import replace

from mtjax.inspect.report import Report
from mtjax.layout.divisibility import problems
from mtjax.layout.plan import Plan


def memory_advice(report: Report, source: str, target: str) -> str | None:
    """Returns a line on what would make a step smaller; None if it fits, or the memory is not known.

    Args:
      report: of the step.
      source: the config's name or path, as typed.
      target: the GPUs whose memory was compared, as typed.
    """
    if report.memory.fits is not False:
        return None
    plan, model = report.step.plan, report.config.model
    changes: dict[str, tuple[bool, Plan]] = {
        "--zero 3": (plan.zero < 3 and plan.zero_degree > 1, replace(plan, zero=3)),
        "--sequence-parallel": (plan.tensor_degree > 1, replace(plan, sequence_parallel=True)),
        "--recompute full": (report.config.training.recompute != "full", replace(plan, recompute="full")),
        "--microbatch-size 1": (True, replace(plan, microbatch_size=1)),
    }
    possible = [
        option
        for option, (helps, changed) in changes.items()
        if helps and changed != plan and not any(problems(model, changed))
    ]
    options = ", ".join([*possible, "more GPUs"])
    plan_it = f"mtjax plan --config {shlex.quote(source)} --gpus {plan.mesh.size} --target {shlex.quote(target)}"
    return f"does not fit: try {options}; `{plan_it}` searches for a plan that fits"
