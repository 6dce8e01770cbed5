"""Scans over layers, and decides what they save for their backward pass and what is recomputed (`recompute` settings).

`none` and `selective` save the arrays with one of the names below, once and in the compute type: products of
activations with weights, dropout masks, the output of attention. Norms, activation functions and casts of weights are
cheap and always recomputed. Nothing that was gathered along the sequence is saved: its sharded source is, and the
all-gather is repeated.

Saved per layer, in elements, in units of s b h (sequence, batch, hidden) at an MLP width of 4h and a tensor parallel
degree of t: the layer's input 1, query, key and value 3/t, attention's output 1/t, its projection 1, MLP 4/t, and two
dropout masks of a byte per element; with sequence parallelism all of it is divided by t. That is less than the
`10 + 24/t` bytes of arXiv 2205.05198, whose kernels save the results of norms and GELU.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.config import Training
from mtjax.layout.stacks import FEWEST_PREFETCHED
from mtjax.sharding.axes import non_manual_axes
from mtjax.sharding.gradients import accumulate_grads_into, seed_cotangents, split_accumulators, zeros_like_shards
from mtjax.sharding.param_comm import LayerInputs, communicated, differentiable_shards, index_layer, is_wrapped
from mtjax.sharding.zero import gather_upfront

SAVED = "saved"
"""What layers save unless recompute is full: products with weights; also what is as cheap to keep, such as
rotated queries and keys, and RMSNorm's factors."""
DROPOUT_MASK = "dropout mask"
ATTENTION_OUTPUT = "attention output"
ATTENTION_CORE = "attention core"
"""Probabilities and their dropout mask: `5 a s^2 b / t` bytes, which selective recompute does not save."""
ATTENTION_STATISTICS = "attention statistics"
"""Log-sum-exp of flash attention's softmax: a float32 per query and head."""

Layers = Any
"""A tree of arrays whose first dimension is the layer."""
States = Any
"""Arrays that layers read and return besides hidden states, such as a KV cache, stacked like `Layers`; or None."""
RunLayer = Callable[[Array, LayerInputs], tuple[Array, Any]]
"""(hidden states, inputs of one layer) -> (hidden states, the layer's state)."""
LoopOverLayers = Callable[[Array], tuple[Array, States]]
"""(input of the first layer, [batch, act_seq, embed]) -> (output of the last, the layers' new states, stacked)."""
SavePolicy = Callable[[Any], Any]
"""Wraps a layer function so that it saves less for the backward pass."""


traced_layer: ContextVar[Literal["in a loop", "unrolled", "unrolled, in parts"]] = ContextVar(
    "layer", default="in a loop"
)
"""How the layer that is traced runs; in parts, where the matrices of a fused product are gathered one by one."""


def is_unrolled() -> bool:
    """Returns whether the traced layer is in no loop over layers."""
    # XLA: what a loop's body slices and concatenates is written out at the loop's boundaries; without a loop it is read
    # in place.
    return traced_layer.get() != "in a loop"


class Loop(NamedTuple):
    """A loop over some consecutive layers of a stack."""

    saving: SavePolicy
    times: int
    """Number of iterations."""
    variant: Callable[[Any], Any]
    """Wraps a layer function so that it is traced in another way; most return it."""

    def wrap(self, run: Any) -> Any:
        """Returns a layer function as this loop runs it."""
        return self.saving(self.variant(run))


@dataclass(frozen=True)
class LayerLoopSettings:
    """How a stack's layers run one after the other, and what they save; the first three settings are Megatron's
    `--recompute-granularity`, `--recompute-method` and `--recompute-num-layers`."""

    kind: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    offload: bool = False
    """Whether layer inputs are offloaded to the host's memory."""
    unrolls: bool = False
    """Whether layers of training steps are unrolled instead of scanned."""
    unquantized: tuple[int, int] = (0, 0)
    """Numbers of first and last layers whose products are not in 8 bits, where others' are: each has a loop."""
    in_turn: bool = False
    """Whether unrolled layers compute all gradients of one before those of the next."""

    @property
    def group(self) -> int:
        """Layers that are recomputed from one input."""
        return self.num_layers if self.kind == "full" and self.method == "uniform" else 1

    @property
    def has_one_loop(self) -> bool:
        """Whether all layers save the same, each in its turn."""
        is_plain = self.kind != "full" or (self.method == "uniform" and self.group == 1 and not self.offload)
        return is_plain and not any(self.unquantized)

    @classmethod
    def of(cls, training: Training) -> "LayerLoopSettings":
        """Reads the config's settings."""
        method, number = training.recompute_method, training.recompute_num_layers
        return cls(training.recompute, method, number, training.recompute_offload, bool(training.unroll_layers))


def loop_over_layers(
    run: RunLayer, inputs: LayerInputs, loop_settings: LayerLoopSettings, offset: Array | None = None
) -> LoopOverLayers:
    """Chooses the loop that suits the parameters of the layers, [layers, ...], and the recompute policy.

    `offset` is the index of the first layer to run, where the stack of parameters holds more; None where it holds just
    these.
    """
    layers, numbers, states = inputs
    # Unstacked parameters: no loop, a Python `for`.
    if loop_settings.unrolls:
        from mtjax.models.unrolled import run_unrolled
        from mtjax.sharding.unstack import unstacked_layers

        if (unstacked := unstacked_layers(layers)) is not None:
            return partial(run_unrolled, run, loop_settings, inputs._replace(parameters=unstacked))
    loops = loops_of(len(numbers), loop_settings)
    layers, sums = split_accumulators(layers)
    # Communication that can be overlapped with computation: a loop with prefetch, which runs a stack from its first to
    # its last layer, without states, and saves inputs on the device.
    prevents_prefetch = offset is not None or states is not None or loop_settings.offload
    has_one_policy = len(loops) == 1 or any(loop_settings.unquantized)
    if has_one_policy and loop_settings.group == 1 and not prevents_prefetch and can_prefetch(layers):
        from mtjax.sharding.prefetch.scan import scan_with_prefetch

        variants = [(loop.variant, loop.times) for loop in loops]
        return partial(scan_with_prefetch, run, loops[0].saving, variants, inputs._replace(parameters=layers), sums)
    # What a loop with prefetch gathers a layer ahead is gathered before this one.
    stack = inputs._replace(parameters=gather_upfront(layers))
    if loop_settings.group > 1:
        from mtjax.models.recompute_methods import scan_groups

        return partial(scan_groups, run, loop_settings.group, stack, loops, sums, offset)
    # Several policies (`block` recompute), gradient accumulators, or a stack that holds more than the layers to run.
    if len(loops) > 1 or sums is not None or offset is not None:
        return partial(scan_accumulating, run, stack, loops, sums, offset)
    return partial(lax.scan, loops[0].wrap(run), xs=stack)


def can_prefetch(layers: Layers, fewest: int = FEWEST_PREFETCHED) -> bool:
    """Returns whether a stack has communication to overlap, and enough layers for a loop."""
    found = [leaf for leaf in map(communicated, jax.tree.leaves(layers, is_leaf=is_wrapped)) if leaf is not None]
    # XLA: outside the manual region its partitioner inserts the collectives, and nothing is differentiated.
    is_manual = bool(found) and not non_manual_axes().issuperset(found[0].reduction.axes)
    return is_manual and len(jax.tree.leaves(found[0])[0]) >= fewest


def as_it_is(run: Any) -> Any:
    """Returns a layer function unchanged, for loops without a variant or a policy."""
    return run


def loops_of(count: int, loop_settings: LayerLoopSettings) -> list[Loop]:
    """Returns the loops over layers; a group is one iteration.

    Raises:
      UserError: the layers are not a multiple of the group.
    """
    if loop_settings.has_one_loop:
        saving = save_input if loop_settings.kind == "full" else partial(save_products, kind=loop_settings.kind)
        return [Loop(saving, count, as_it_is)]
    from mtjax.models.recompute_methods import loops_by_method

    return loops_by_method(count, loop_settings)


def scan_accumulating(
    run: RunLayer, stack: LayerInputs, loops: list[Loop], sums: list[Array] | None, offset: Array | None, x: Array
) -> tuple[Array, States]:
    """Runs several loops over one stack; each backward iteration adds its layer's gradients to accumulators in place.

    Args:
      stack: parameters [layers of the stack, ...], and numbers and states of the layers to run, [layers, ...].
      sums: accumulators, float32 [layers of the stack, ...]; zeros when None.
      offset: index in the stack of the first layer to run; 0 when None.

    Returns:
      The output of the last layer, and the layers' states, stacked.
    """
    # Autodiff of `lax.scan` would stack the gradients of each loop, and the compiler concatenate these stacks and add
    # them to `sums`: two or three times the memory. Instead, loops carry the stack, unchanged, for the sake of its
    # cotangent, which begins as `sums` and is updated in place. An iteration reads its layer from a copy without
    # gradient.
    layers, *scanned = stack
    # Gradients go through `carried` alone: the cotangent of an indexed stack would be as large as the stack.
    fixed = jax.tree.map(lax.stop_gradient, layers)

    def iteration(
        carry: tuple[Array, list[Array]], scanned: tuple[Array, Array, Any]
    ) -> tuple[tuple[Array, list[Array]], Any]:
        """Runs the layer at `index`; `carried` is the stack, whose cotangents are the accumulators."""
        (x, carried), (index, *of_layer) = carry, scanned
        layer, carried = accumulate_grads_into(index_layer(fixed, index), carried, index)
        x, state = run(x, LayerInputs(layer, *of_layer))
        return (x, carried), state

    # The loops run over consecutive layers [first, first + count) of the stack.
    carried, first = jax.tree.leaves(differentiable_shards(layers)), 0
    sums = zeros_like_shards(carried) if sums is None else sums
    states: list[States] = []
    for loop in loops:
        wrapped, count = loop.wrap(iteration), loop.times
        indices = jnp.arange(first, first + count) + (0 if offset is None else offset)
        inputs = (indices, *jax.tree.map(lambda a, s=slice(first, first + count): a[s], scanned))
        (x, carried), state = lax.scan(wrapped, (x, carried), inputs)
        states.append(state)
        first += count
    return seed_cotangents(sums, x, carried), jax.tree.map(lambda *of_loops: jnp.concatenate(of_loops), *states)


def save_products(run: Any, kind: Literal["none", "selective"]) -> Any:
    """Wraps `run` to save its products with weights, and the attention core unless `kind` is selective."""
    # `jax.checkpoint` saves the arrays with these names and recomputes all other arrays in the backward pass.
    always = (SAVED, DROPOUT_MASK, ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    names = [*always, *([ATTENTION_CORE] if kind == "none" else [])]
    # Norms, activations and casts have no name: they are cheaper to repeat than to store.
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(run, policy=policy)


def save_input(run: Any) -> Any:
    """Wraps `run` to save only its input."""
    return jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
