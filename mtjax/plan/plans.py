"""A plan: ways of each mesh axis, microbatch, and what is recomputed, sharded and kept."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from mtjax import config
from mtjax.errors import UserError, nearest
from mtjax.plan.formulas import Recompute, Shape
from mtjax.plan.schedules import Schedule

Residuals = Literal["jax", "megatron"]


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of the model's states."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    """Moments, and master weights where the weights are 16-bit."""
    reduced: int
    """Bytes per element of gradients on the wire."""
    gathered: int
    """Bytes per element of updated parameters on the wire."""


MTJAX = Precision("mtjax", weights=4, gradients=4, optimizer=8, reduced=4, gathered=4)
"""float32 parameters are their own master; products cast them."""
MEGATRON_BF16 = Precision("Megatron bf16", weights=2, gradients=4, optimizer=12, reduced=4, gathered=2)
MEGATRON_FP16 = Precision("Megatron fp16", weights=2, gradients=2, optimizer=16, reduced=2, gathered=2)
"""The float32 copy of the gradients counts with the optimizer."""
FP32 = Precision("fp32", weights=4, gradients=4, optimizer=8, reduced=4, gathered=4)


@dataclass(frozen=True)
class Ways:
    """Ways of the mesh axes, outermost first; model ways vary fastest, so that they sit inside one server."""

    data: int = 1
    stage: int = 1
    model: int = 1

    @property
    def gpus(self) -> int:
        """Devices of the mesh."""
        return self.data * self.stage * self.model

    def __str__(self) -> str:
        names = [f.name for f in fields(self)]
        if self.stage == 1:
            return f"{self.data}x{self.model}"
        return ",".join(f"{name}={getattr(self, name)}" for name in names)


def parse_ways(text: str) -> Ways:
    """Reads "64x8" (DATAxMODEL) or any of the axes by name: "data=8,stage=4,model=8".

    Raises:
      UserError: neither form, an unknown axis, or a way below 1.
    """
    names = [f.name for f in fields(Ways)]
    parts = text.strip().split("x")
    if len(parts) == 2 and all(p.strip().isdigit() for p in parts):
        ways = {names[0]: int(parts[0]), names[-1]: int(parts[1])}
    else:
        ways = {}
        for part in text.split(","):
            name, equals, number = (word.strip() for word in part.partition("="))
            if not equals or not number.isdigit():
                raise UserError(
                    f"mesh {text!r} is neither DATAxMODEL, such as 64x8, nor named, such as {Ways(8, 4, 8)}"
                )
            if name not in names:
                raise UserError(f"mesh {text!r}: no axis is called {name!r}{nearest(name, names)}")
            if name in ways:
                raise UserError(f"mesh {text!r} gives {name} twice")
            ways[name] = int(number)
    if any(n < 1 for n in ways.values()):
        raise UserError(f"mesh {text!r}: every axis needs at least 1 way")
    return Ways(**ways)


@dataclass(frozen=True)
class Plan:
    """How a model is spread and trained, as far as time and memory are concerned."""

    ways: Ways
    global_batch_size: int
    microbatch_size: int
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    """ZeRO stage over the data ways: 1 shards the optimizer, 2 also gradients, 3 also parameters."""
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Chunks of layers per stage of the interleaved schedule."""
    flash_attention: bool = False
    dropout: bool = True
    loss_chunk: int | None = None
    """Tokens whose logits are alive at a time; the microbatch's when None."""
    precision: Precision = MTJAX
    element_bytes: int = 2
    """Bytes of an activation."""
    recompute_group: int = 1
    """Layers of full recompute that share one kept input; times and FLOPs know neither this nor the next two."""
    recompute_first: int | None = None
    """Full recompute of so many layers and none of the others; of all when None."""
    recompute_offload: bool = False
    """Layer inputs wait in the host's memory."""
    residuals: Residuals = "jax"
    """What waits for the backward pass: what JAX's autodiff keeps of mtjax's model, or what Megatron's kernels keep."""

    @property
    def microbatches(self) -> int:
        """Microbatches that a data rank accumulates in a step."""
        return self.global_batch_size // (self.ways.data * self.microbatch_size)

    @property
    def reduces_at_once(self) -> bool:
        """Whether the backward pass sums gradients over data ranks: with ZeRO none then keeps the others' part."""
        return self.zero >= 2 or (self.residuals == "jax" and self.microbatches == 1)

    @classmethod
    def of(cls, run: config.Config, ways: Ways, **settings: object) -> "Plan":
        """The plan of a config on this mesh; `settings` are fields that a config does not have yet."""
        training, model = run.training, run.model
        micro = training.microbatch_size or max(training.global_batch_size // ways.data, 1)
        flash_fits = model.attention_dropout == 0 and training.compute_dtype != "float32"
        plan = cls(
            ways,
            training.global_batch_size,
            micro,
            recompute=training.recompute,
            sequence_parallel=run.parallel.sequence_parallel,
            zero=run.parallel.zero,
            recompute_group=training.recompute_num_layers if training.recompute_method == "uniform" else 1,
            recompute_first=training.recompute_num_layers if training.recompute_method == "block" else None,
            recompute_offload=training.recompute_offload,
            flash_attention=model.attention != "xla" and flash_fits,
            dropout=model.hidden_dropout > 0,
            loss_chunk=training.loss_chunk,
            element_bytes=4 if training.compute_dtype == "float32" else 2,
        )
        return replace(plan, **settings)  # pyright: ignore[reportArgumentType]


def check(shape: Shape, plan: Plan) -> None:
    """Checks that everything divides.

    Raises:
      UserError: the first division that leaves a rest, with both numbers and the nearest that fit.
    """
    ways = plan.ways
    for name, size in (
        ("num_heads", shape.num_heads),
        ("mlp_size", shape.mlp_size),
        ("the padded vocabulary", shape.padded_vocab_size),
    ):
        _divides(name, size, ways.model, "model ways")
    if not shape.kv_heads_fit(ways.model):
        raise UserError(
            f"num_kv_heads {shape.num_kv_heads} is neither a multiple nor a divisor of {ways.model} model ways; take "
            f"model ways among the divisors or multiples of {shape.num_kv_heads}"
        )
    if plan.sequence_parallel:
        _divides("sequence_length", shape.sequence_length, ways.model, "model ways with sequence parallelism")
    _divides("num_layers", shape.num_layers, ways.stage * plan.chunks, "stages x chunks")
    each = ways.data * plan.microbatch_size
    if plan.global_batch_size % each:
        below = plan.global_batch_size // each * each
        near = " and ".join(str(n) for n in (below, below + each) if n)
        raise UserError(
            f"global_batch_size {plan.global_batch_size} is no multiple of {ways.data} data ways x microbatch_size "
            f"{plan.microbatch_size} = {each}; the nearest that are: {near}"
        )
    if plan.zero not in range(4):
        raise UserError(f"ZeRO has stages 0 to 3, not {plan.zero}")
    if plan.schedule == "interleaved" and ways.stage > 1 and plan.microbatches % ways.stage:
        raise UserError(
            f"the interleaved schedule needs a multiple of {ways.stage} stages as microbatches, not {plan.microbatches}"
        )
    if plan.chunks > 1 and (plan.schedule != "interleaved" or ways.stage == 1):
        raise UserError(f"{plan.chunks} chunks per stage need --schedule interleaved and more than one stage")


def _divides(name: str, size: int, ways: int, what: str) -> None:
    if size % ways:
        fits = config.nearest_divisors(size, ways)
        raise UserError(f"{name} {size} does not divide over {ways} {what}; the nearest ways that fit are {fits}")
