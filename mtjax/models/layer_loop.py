"""Scans over layers, and decides what they save for their backward pass and what is recomputed (`recompute` settings).

`none` and `selective` save the arrays with one of the names below, once and in the compute type: products of
activations with weights, dropout masks, the output of attention. Norms, activation functions and casts of weights are
cheap and always recomputed. Nothing that was gathered along the sequence is saved: its sharded source is, and the
all-gather is repeated.

Saved per layer, in elements, in units of s b h (sequence, batch, hidden) at an MLP width of 4h and a tensor parallel
degree of t: the layer's input 1, query, key and value 3/t, attention's output 1/t, its projection 1, MLP 4/t, and two
dropout masks of a byte per element; with sequence parallelism all of it is divided by t. In 16 bits that is
`6 + 16/t` bytes, less than the `10 + 24/t` of arXiv 2205.05198, whose kernels save the results of norms and GELU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.config import Training
from mtjax.layout.stacks import FEWEST_PREFETCHED
from mtjax.models.saved_names import ATTENTION_CORE, ATTENTION_OUTPUT, ATTENTION_STATISTICS, DROPOUT_MASK, SAVED
from mtjax.sharding.axes import non_manual_axes
from mtjax.sharding.gradients import accumulate_grads_into, seed_cotangents, split_accumulators, zeros_like_shards
from mtjax.sharding.param_comm import LayerInputs, communicating_param, differentiable_shards, index_layer, is_wrapped
from mtjax.sharding.zero import gather_upfront

Layers = Any
"""A tree of arrays whose first dimension is the layer."""
MixerStates = Any
"""Arrays that layers read and return besides hidden states, such as a KV cache, stacked like `Layers`; or None."""
RunLayer = Callable[[Array, LayerInputs], tuple[Array, Any]]
"""(hidden states, inputs of one layer) -> (hidden states, the layer's state)."""
RunStack = Callable[[Array], tuple[Array, MixerStates]]
"""(input of the first layer, [batch, act_seq, embed]) -> (output of the last, the layers' new states, stacked)."""
SavePolicy = Callable[[Any], Any]
"""Wraps a layer function so that it saves less for the backward pass."""


class Loop(NamedTuple):
    """A loop over some consecutive layers of a stack."""

    saving: SavePolicy
    times: int
    """Number of iterations."""
    variant: Callable[[Any], Any]
    """Wraps a layer function, for example so that its products are not in 8 bits; `as_it_is` for others."""

    def wrap(self, run: Any) -> Any:
        """Returns a layer function as this loop runs it."""
        return self.saving(self.variant(run))


@dataclass(frozen=True)
class LayerLoopSettings:
    """How a stack's layers run one after the other, and what they save; the first three settings are Megatron's
    `--recompute-granularity`, `--recompute-method` and `--recompute-num-layers`."""

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1
    recompute_offload: bool = False
    """Whether layer inputs are offloaded to the host's memory."""
    unroll_layers: bool = False
    """Whether layers of training steps are unrolled instead of scanned."""
    unquantized: tuple[int, int] = (0, 0)
    """Numbers of first and last layers whose products are not in 8 bits, where others' are: each has a loop."""
    gradients_in_turn: bool = False
    """Whether, in the backward pass, all gradients of an unrolled layer are computed before those of the layer
    below."""

    @property
    def layers_per_group(self) -> int:
        """Layers that are recomputed from one input."""
        return self.recompute_num_layers if self.recompute == "full" and self.recompute_method == "uniform" else 1

    @property
    def has_one_loop(self) -> bool:
        """Whether one `lax.scan` runs all layers: they save the same, layer by layer, and multiply in the same type."""
        is_by_layer = self.recompute_method == "uniform" and self.layers_per_group == 1 and not self.recompute_offload
        return (self.recompute != "full" or is_by_layer) and not any(self.unquantized)

    @classmethod
    def of(cls, training: Training) -> "LayerLoopSettings":
        """Reads the config's settings."""
        return cls(
            training.recompute,
            training.recompute_method,
            training.recompute_num_layers,
            training.recompute_offload,
            bool(training.unroll_layers),
        )


def choose_loop(
    run: RunLayer, inputs: LayerInputs, loop_settings: LayerLoopSettings, offset: Array | None = None
) -> RunStack:
    """Chooses the loop over layers by their parameters and by what they save.

    Args:
      run: one layer.
      inputs: of all layers, [layers, ...].
      loop_settings: what the layers save.
      offset: index of the first layer to run, where the stack of parameters holds more; None where it holds just these.
    """
    layers, numbers, states = inputs
    # Unstacked parameters: no loop, a Python `for`.
    if loop_settings.unroll_layers:
        from mtjax.models.unrolled import run_unrolled
        from mtjax.sharding.unstack import unstacked_layers

        if (unstacked := unstacked_layers(layers)) is not None:
            return partial(run_unrolled, run, loop_settings, inputs._replace(parameters=unstacked))
    loops = loops_of(len(numbers), loop_settings)
    layers, accumulators = split_accumulators(layers)
    # Communication that can be overlapped with computation: a loop with prefetch, which runs a stack from its first to
    # its last layer, without states, and saves inputs on the device.
    prevents_prefetch = offset is not None or states is not None or loop_settings.recompute_offload
    # Loops before and after the 8-bit layers differ in how they multiply, not in what they save: one policy.
    has_one_policy = len(loops) == 1 or any(loop_settings.unquantized)
    is_by_layer = has_one_policy and loop_settings.layers_per_group == 1
    if is_by_layer and not prevents_prefetch and len(numbers) >= FEWEST_PREFETCHED and communicates(layers):
        from mtjax.sharding.prefetch.scan import scan_with_prefetch

        variants = [(loop.variant, loop.times) for loop in loops]
        return partial(
            scan_with_prefetch, run, loops[0].saving, variants, inputs._replace(parameters=layers), accumulators
        )
    # What a loop with prefetch gathers a layer ahead is gathered before this one.
    stack = inputs._replace(parameters=gather_upfront(layers))
    if loop_settings.layers_per_group > 1:
        from mtjax.models.recompute_methods import scan_groups

        return partial(scan_groups, run, loop_settings.layers_per_group, stack, loops, accumulators, offset)
    # Several policies (`block` recompute), gradient accumulators, or a stack that holds more than the layers to run.
    if len(loops) > 1 or accumulators is not None or offset is not None:
        return partial(scan_accumulating, run, stack, loops, accumulators, offset)
    return partial(lax.scan, loops[0].wrap(run), xs=stack)


def communicates(layers: Layers) -> bool:
    """Returns whether a stack has communication that a loop can overlap with computation."""
    found = [leaf for leaf in map(communicating_param, jax.tree.leaves(layers, is_leaf=is_wrapped)) if leaf is not None]
    # XLA: outside the manual region its partitioner inserts the collectives, and nothing is differentiated.
    return bool(found) and not non_manual_axes().issuperset(found[0].reduction.axes)


def as_it_is(run: Any) -> Any:
    """Returns a layer function unchanged, for loops without a variant or a policy."""
    return run


def loops_of(count: int, loop_settings: LayerLoopSettings) -> list[Loop]:
    """Returns the loops over layers; a group is one iteration.

    Raises:
      UserError: the layers are not a multiple of the group.
    """
    if loop_settings.has_one_loop:
        saving = (
            save_input
            if loop_settings.recompute == "full"
            else partial(save_products, recompute=loop_settings.recompute)
        )
        return [Loop(saving, count, as_it_is)]
    from mtjax.models.recompute_methods import loops_by_method

    return loops_by_method(count, loop_settings)


def scan_accumulating(
    run: RunLayer,
    stack: LayerInputs,
    loops: list[Loop],
    accumulators: list[Array] | None,
    offset: Array | None,
    x: Array,
) -> tuple[Array, MixerStates]:
    """Runs several loops over one stack; each backward iteration adds its layer's gradients to accumulators in place.

    Args:
      stack: parameters [layers of the stack, ...], and numbers and states of the layers to run, [layers, ...].
      accumulators: float32 [layers of the stack, ...]; zeros when None.
      offset: index in the stack of the first layer to run; 0 when None.

    Returns:
      The output of the last layer, and the layers' states, stacked.
    """
    # Autodiff of `lax.scan` would stack the gradients of each loop, and the compiler concatenate these stacks and add
    # them to `accumulators`: two or three times the memory. Instead, loops carry the stack, unchanged, for the sake of
    # its cotangent, which begins as `accumulators` and is updated in place. An iteration reads its layer from a copy
    # without gradient.
    layers, *numbers_and_states = stack
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
    accumulators = zeros_like_shards(carried) if accumulators is None else accumulators
    new_states: list[MixerStates] = []
    for loop in loops:
        wrapped, count = loop.wrap(iteration), loop.times
        indices = jnp.arange(first, first + count) + (0 if offset is None else offset)
        inputs = (indices, *jax.tree.map(lambda a, s=slice(first, first + count): a[s], numbers_and_states))
        (x, carried), state = lax.scan(wrapped, (x, carried), inputs)
        new_states.append(state)
        first += count
    joined = jax.tree.map(lambda *of_loops: jnp.concatenate(of_loops), *new_states)
    return seed_cotangents(accumulators, x, carried), joined


def save_products(run: Any, recompute: Literal["none", "selective"]) -> Any:
    """Wraps `run` to save its products with weights, and the attention core unless `recompute` is selective."""
    # `jax.checkpoint` saves the arrays with these names and recomputes all other arrays in the backward pass.
    always = (SAVED, DROPOUT_MASK, ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    saved_names = [*always, *([ATTENTION_CORE] if recompute == "none" else [])]
    # Norms, activations and casts have no name: they are cheaper to repeat than to store.
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names)
    return jax.checkpoint(run, policy=policy)


def save_input(run: Any) -> Any:
    """Wraps `run` to save only its input."""
    return jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
