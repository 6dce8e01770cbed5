"""Tables of --inference and --published: text generation, and published runs against the scaling model."""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.analysis.hardware import Server
from mtjax.config.ssm import has_state_space
from mtjax.config.storage import PLAIN, SNAPSHOTS_PER_SEQUENCE, Storage, is_supported
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.plan import inference, published
from mtjax.plan.published import Point
from mtjax.plan.report import show, table
from mtjax.plan.search import describe
from mtjax.plan.units import gib, seconds, si

BATCHES = (1, 8, 64)
SMALLER = {
    "with int8 weights": Storage("int8"),
    "int4, int8 cache": Storage("int4", cache_dtype="int8"),
    "with int4 weights": Storage("int4"),
}
"""Weights and caches that take less memory: those of the columns, and what is in place of the second without it."""


def print_inference(
    console: Console,
    anatomy: Anatomy,
    server: Server,
    tensor_degree: int,
    context: int,
    state_snapshots: int | None = None,
) -> None:
    """Prints the tables of weights, and of KV cache, memory and speed.

    Args:
      console: for the tables.
      anatomy: of the model.
      server: the GPUs.
      tensor_degree: tensor parallel degree.
      context: in tokens.
      state_snapshots: maximum number of snapshots of recurrent states; None for the default.
    """
    # Generation does not run the layers of multi-token prediction.
    anatomy = anatomy_of(replace(anatomy.model, mtp_num_layers=0)) if anatomy.predictors else anatomy
    show(console, weights_table(anatomy, server), cache_table(anatomy, server, tensor_degree, context, state_snapshots))


def weights_table(anatomy: Anatomy, server: Server) -> Table:
    """Builds the table of weights by precision."""
    result = table("Inference: weights", "precision", "size", f"{server.gpu.name} GPUs needed")
    for precision in inference.WEIGHT_BYTES:
        if precision in ("int8", "int4") and not is_supported(anatomy.model, Storage(precision)):
            continue
        size = inference.weight_bytes(anatomy, precision)
        result.add_row(precision, gib(size), f"{-(-size // server.gpu.memory):.0f}")
    flops = inference.flops_per_token(anatomy)
    result.caption = f"{si(flops, 'FLOP')} per token: 2 per matmul parameter (of {parameters(anatomy):,} in all)"
    return result


def cache_table(
    anatomy: Anatomy, server: Server, tensor_degree: int, context: int, state_snapshots: int | None = None
) -> Table:
    """Builds the table of KV cache, memory and speed by batch and context length; see `print_inference`."""
    title = f"Inference: bfloat16 on {tensor_degree} x {server.gpu.description}"
    note = (
        "times are predictions, not measurements: compute and memory bounds, without communication between GPUs; "
        "memory per GPU: weights, KV cache and sampling of mtjax generate while it decodes"
    )
    has_states = has_state_space(anatomy.model)
    if has_states:
        each = f"{SNAPSHOTS_PER_SEQUENCE} snapshots of recurrent states for each sequence"
        given = f"at most {state_snapshots} snapshots of recurrent states"
        note += f"; and {each if state_snapshots is None else given} (--state-snapshots of mtjax serve)"
    smaller = {name: storage for name, storage in SMALLER.items() if is_supported(anatomy.model, storage)}
    # Two columns are enough: int4 alone stands in where the model's cache can't be quantized.
    if len(smaller) == len(SMALLER):
        del smaller["with int4 weights"]
    fastest = list(smaller)[-1:]
    heads = (
        "batch x context",
        "KV cache",
        *(("state snapshots per GPU",) if has_states else ()),
        "memory per GPU",
        *smaller,
        "prefill",
        "per token",
        *(f"per token, {name.removeprefix('with ')}" for name in fastest),
        "tokens/s (predicted)",
    )
    result = table(title, *heads, note=note)
    lengths = sorted({context // 4 or 1, context})
    for batch in BATCHES:
        snapshots = (SNAPSHOTS_PER_SEQUENCE * batch if state_snapshots is None else state_snapshots) * has_states
        for tokens in lengths:
            cache = inference.cache_bytes(anatomy, batch, tokens)
            memories = [
                inference.decoding_memory(anatomy, tensor_degree, batch, tokens, storage=storage, snapshots=snapshots)
                for storage in (PLAIN, *smaller.values())
            ]
            plain, *others = (
                inference.generation(anatomy, server, tensor_degree, batch, tokens, storage)
                for storage in (PLAIN, *(smaller[name] for name in fastest))
            )
            result.add_row(
                f"{batch} x {tokens}",
                gib(cache),
                *((gib(memories[0].snapshots),) if has_states else ()),
                *(with_capacity(memory.total, server) for memory in memories),
                seconds(plain.prefill_seconds),
                seconds(plain.token_seconds),
                *(seconds(other.token_seconds) for other in others),
                f"{batch * plain.tokens_per_second:,.0f}",
            )
    return result


def with_capacity(needed: float, server: Server) -> str:
    """Returns a size, with a note where it does not fit what may be used of a GPU's memory."""
    return gib(needed) + ("" if needed <= USABLE_MEMORY * server.gpu.memory else " - does not fit")


def print_published(console: Console) -> None:
    """Prints published speeds, their predictions and the gaps."""
    base = published.figure_5_base()
    tables = [
        relative_table("Figure 5 of arXiv 1909.08053, V100: speed per GPU relative to one", published.figure_5()),
        speed_table("One V100, 1.2B: TFLOP/s; the second is held out", [base, published.megatron_v1()]),
        speedup_table(),
        speed_table("Megatron-Core, H100: model TFLOP/s per GPU", published.h100_weak_scaling()),
        speed_table("MosaicML's MPT, H100, FSDP: model TFLOP/s per GPU (held out)", published.composer_h100()),
        speed_table(
            "Table 1 of arXiv 2104.04473, A100: TFLOP/s per GPU (one constant is fitted to these)",
            published.a100_weak_scaling(),
        ),
    ]
    show(console, *tables)


def relative_table(title: str, points: list[Point]) -> Table:
    """Builds a table of speeds relative to the first point's, with gaps in percentage points."""
    result = table(title, "", "published", "predicted", "gap")
    for p in points:
        gap = f"{100 * p.gap:+.1f} points"
        result.add_row(f"{p.name} ({p.plan.mesh})", f"{p.published:.0%}", f"{p.predicted:.1%}", gap)
    return result


def speedup_table() -> Table:
    """Builds the table of speedups over one GPU with a fixed batch, with gaps in percent."""
    result = table("Appendix D: 1.2B, 8 samples on several GPUs", "", "published", "predicted", "gap")
    for p in published.figure_5_fixed_batch():
        result.add_row(p.name, f"{p.published:.2f}", f"{p.predicted:.2f}", f"{p.predicted / p.published - 1:+.1%}")
    return result


def speed_table(title: str, points: list[Point]) -> Table:
    """Builds a table of speeds, with gaps in percent."""
    result = table(title, "", "published", "predicted", "gap", "assumed")
    for p in points:
        gap = f"{p.predicted / p.published - 1:+.1%}"
        result.add_row(p.name, f"{p.published:.0f}", f"{p.predicted:.0f}", gap, describe(p.plan))
    return result
