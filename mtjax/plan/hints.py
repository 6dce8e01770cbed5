"""Hints on settings that make a plan slower or larger than necessary."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtjax import config
from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.counts import peak_stage_counts
from mtjax.analysis.hardware import Server
from mtjax.analysis.memory import peak_stage_memory
from mtjax.analysis.timing import step_time
from mtjax.config import Config
from mtjax.layout.attention_kernel import choose_kernel
from mtjax.layout.plan import Plan
from mtjax.plan.units import gib, percent, seconds

WORTH_SAYING = 0.02
"""Share of the step's time, or of a GPU's parameters, above which a hint is printed."""


def hints(anatomy: Anatomy, plan: Plan, server: Server, run: Config, limit: float) -> Iterator[str]:
    """Yields hints on the plan of a config; `limit` is a GPU's usable memory in bytes."""
    found = (flash_hint(anatomy, plan, server, run), recompute_hint(anatomy, plan, server, run, limit))
    yield from filter(None, (*found, zero_hint(anatomy, plan), unrolled_hint(anatomy, plan, server, limit)))


def recompute_hint(anatomy: Anatomy, plan: Plan, server: Server, run: Config, limit: float) -> str | None:
    """Returns a hint if the plan recomputes activations that fit the memory."""
    if plan.recompute == "none":
        return None
    kept = _changed(plan, run, recompute="none")
    memory = peak_stage_memory(anatomy, kept).total
    now, then = (step_time(anatomy, each, server).total for each in (plan, kept))
    if memory > limit or now - then < WORTH_SAYING * now:
        return None
    return (
        f"recompute {plan.recompute} is not needed: with --recompute none a step takes {seconds(then)} instead of "
        f"{seconds(now)}, and {gib(memory)} per GPU, which fit"
    )


def flash_hint(anatomy: Anatomy, plan: Plan, server: Server, run: Config) -> str | None:
    """Returns a hint if one setting alone prevents flash attention: dropout of attention's probabilities, or with
    separate documents that it must be asked for."""
    dropout = run.model.attention_dropout
    # What the kernel would be without dropout, if it is asked for and if it is not.
    asked, without = (config.replace(run, attention_dropout=0.0, attention=kernel) for kernel in ("cudnn", "auto"))
    # Flash attention is in use, or another kernel was chosen by name.
    if (plan.flash_attention and not plan.pallas_attention) or run.model.attention not in ("auto", "cudnn"):
        return None
    if _kernel(without, plan, server) == "cudnn":
        why = f"attention_dropout {dropout:g} rules out cuDNN's flash attention, which has no dropout on probabilities"
        options = "--attention-dropout 0"
    elif run.data.reset_attention_mask and _kernel(asked, plan, server) == "cudnn":
        why = "reset_attention_mask rules out flash attention here unless it is asked for"
        options = "--attention cudnn --attention-dropout 0" if dropout else "--attention cudnn"
    else:
        return None
    now = step_time(anatomy, plan, server).total
    # Selective recompute saves memory for scores, of which flash attention stores none.
    recompute = "none" if plan.recompute == "selective" else plan.recompute
    fused = _changed(
        plan, run, flash_attention=True, pallas_attention=False, attention_dropout=False, recompute=recompute
    )
    then = step_time(anatomy, fused, server).total
    if now - then < WORTH_SAYING * now:
        return None
    hint = f"{why}: with {options} a step takes {seconds(then)} instead of {seconds(now)}"
    asks_for_own = config.replace(run, attention="pallas")
    if not dropout or plan.pallas_attention or _kernel(asks_for_own, plan, server) != "pallas":
        return hint
    with_pallas = _changed(plan, run, flash_attention=True, pallas_attention=True, recompute=recompute)
    step = step_time(anatomy, with_pallas, server).total
    return f"{hint}; with --attention pallas, which has this dropout, {seconds(step)}"


def unrolled_hint(anatomy: Anatomy, plan: Plan, server: Server, limit: float) -> str | None:
    """Returns a hint if the same plan without a loop over layers fits the memory and is faster."""
    unrolled = replace(plan, unrolled=True)
    if plan.unrolled or not plan.gains_by_unrolling(anatomy.model):
        return None
    now, then = (step_time(anatomy, each, server).total for each in (plan, unrolled))
    memory = peak_stage_memory(anatomy, unrolled).total
    if now - then < WORTH_SAYING * now or memory > limit:
        return None
    return (
        f"the loop over layers copies what it saves: with --unroll-layers a step takes {seconds(then)} instead of "
        f"{seconds(now)}, in {gib(memory)}, and compiling takes minutes"
    )


def _changed(plan: Plan, run: Config, **changes: Any) -> Plan:
    """Returns the plan with changes, and with layers in a loop or unrolled as the run would have them then."""
    changed = replace(plan, **changes)
    return replace(changed, unrolled=changed.unrolls(run))


def _kernel(run: Config, plan: Plan, server: Server) -> str:
    return choose_kernel(run, "gpu", server.gpu.compute_capability, plan.mesh)[0]


def zero_hint(anatomy: Anatomy, plan: Plan) -> str | None:
    """Returns a hint if ZeRO leaves parameters replicated because none of their dimensions is divisible."""
    if not plan.zero or plan.zero_degree == 1:
        return None
    held = peak_stage_counts(anatomy, plan)
    if held.replicated < WORTH_SAYING * held.all:
        return None
    states = held.replicated * (plan.precision.weights + plan.precision.gradients + plan.precision.optimizer)
    return (
        f"ZeRO-{plan.zero} shards none of {percent(held.replicated / held.all)} of a GPU's parameters, which have no "
        f"dimension divisible by the {plan.zero_degree} ranks: every GPU holds their full weights, gradients and "
        f"optimizer state, {gib(states)}; use a data parallel degree that divides hidden_size "
        f"{anatomy.model.hidden_size}"
    )
