"""What layers save for their backward pass and what they compute again: the `recompute` settings.

`none` and `selective` save what is given a name below, once and in the compute type: products of activations with
weights, dropout masks, the output of attention. Norms, activation functions and casts of weights are cheap and always
computed again. Nothing that was gathered along the sequence is saved: its split source is, and the gather runs again.

Per layer, in units of s b h elements at f = 4h and with sequence parallelism all of it over t: the layer's input 1,
query, key and value 3/t, attention's output 1/t, what it adds to the residual stream 1, MLP 4/t, and two masks of a
byte each - less than the `10 + 24/t` bytes of arXiv 2205.05198, whose kernels keep the results of norms and GELU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtjax.config import Training
from mtjax.errors import UserError
from mtjax.sharding.param_comm import (
    accumulate_grads_into,
    differentiable_shards,
    index_layer,
    seed_cotangents,
    split_accumulators,
    zeros_like_shards,
)
from mtjax.sharding.prefetch import can_prefetch, gather_upfront, scan_with_prefetch
from mtjax.sharding.unstack import unstacked_layers

PRODUCT = "product"
"""Of activations with a weight."""
DROPOUT_MASK = "dropout mask"
ATTENTION_OUTPUT = "attention output"
ATTENTION_CORE = "attention core"
"""Probabilities and their dropout mask: `5 a s^2 b / t` bytes, the share that selective recompute drops."""
ATTENTION_STATISTICS = "attention statistics"
"""Of flash attention's softmax: a float32 a query and head."""
LAYER_INPUT = "layer input"

Layers = Any
"""A tree of arrays whose first dimension is the layer."""
States = Any
"""What layers read and return besides the stream, such as a cache, stacked like `Layers`; None where there is none."""
RunLayer = Callable[[Array, Any, Array, Any], tuple[Array, Any]]
"""(stream, one layer, its number, its state) -> (stream, state)."""
SavePolicy = Callable[[Any], Any]
"""Wraps a layer function so that it saves less for the backward pass."""


@dataclass(frozen=True)
class Recompute:
    """Megatron's `--recompute-granularity`, `--recompute-method` and `--recompute-num-layers`."""

    kind: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    offload: bool = False
    """Layer inputs wait in the host's memory."""

    @property
    def group(self) -> int:
        """Layers that are computed again from one input."""
        return self.num_layers if self.kind == "full" and self.method == "uniform" else 1

    @property
    def in_chunk(self) -> "Recompute":
        """What layers save of a chunk whose input a stage of a pipeline keeps: all, when it is computed again."""
        return Recompute() if self.kind == "full" else self

    @classmethod
    def of(cls, training: Training) -> "Recompute":
        """As the config says."""
        return cls(
            training.recompute, training.recompute_method, training.recompute_num_layers, training.recompute_offload
        )


def scan_layers(
    run: RunLayer,
    x: Array,
    layers: Layers,
    numbers: Array,
    recompute: Recompute,
    states: States = None,
    first: Array | None = None,
) -> tuple[Array, States]:
    """Runs layers one after the other.

    Args:
      run: one layer.
      x: input of the first.
      layers: their parameters, stacked.
      numbers: of the layers.
      recompute: what each saves for its backward pass.
      states: what each layer reads besides the stream, stacked, if anything.
      first: place of the first layer in `layers`, which may hold more than are run; None where it holds just these.

    Returns:
      The output of the last, and each layer's new state, stacked.
    """
    count, group = len(numbers), recompute.group
    loops = _loops(count, recompute)
    if (apart := unstacked_layers(layers)) is not None:
        ((saving, _),) = loops
        return _run_one_by_one(saving(run), x, apart, numbers, states)
    layers, sums = split_accumulators(layers)
    elsewhere = first is not None or states is not None or recompute.offload
    if len(loops) == group == 1 and not elsewhere and can_prefetch(layers):
        ((saving, _),) = loops
        return scan_with_prefetch(run, saving, x, layers, numbers, sums)
    layers = gather_upfront(layers)
    stack: Any = (layers, numbers, states)
    if group > 1:
        stack, sums = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), (stack, sums))
        run = partial(_run_group, run)
    if len(loops) > 1 or sums is not None or first is not None:
        x, states = _scan_adding(run, x, stack, loops, sums, first)
    else:
        ((saving, _),) = loops
        x, states = _scan(saving(run), x, stack)
    if group > 1:
        states = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), states)
    return x, states


def scan_interleaved(
    run: RunLayer,
    x: Array,
    stacks: Sequence[Layers],
    numbers: Array,
    recompute: Recompute,
    first: Array | None = None,
) -> tuple[Array, States]:
    """Runs layers of several stacks in turns: in each turn as many of every stack, one stack after the other.

    Args:
      run: one layer, of any of them.
      x: input of the first.
      stacks: their parameters.
      numbers: of the layers in the order in which they run, [turns, layers of a turn].
      recompute: what each layer saves for its backward pass.
      first: the first turn's number, where the stacks hold layers of more turns than are run; None where of just these.

    Returns:
      The output of the last, and the states of the last layers of the turns, stacked.
    """
    turns, found = len(numbers), [split_accumulators(gather_upfront(layers)) for layers in stacks]
    held = sum(len(jax.tree.leaves(layers)[0]) for layers, _ in found) // numbers.shape[1]
    ((saving, _),) = _loops(turns, recompute)
    saved = saving(run)

    def in_turns(tree: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(held, -1, *a.shape[1:]), tree)

    def turn(x: Array, stacks: Sequence[Layers], numbers: Array, _: None) -> tuple[Array, States]:
        one, state = iter(numbers), None
        for layers in stacks:
            for i in range(len(jax.tree.leaves(layers)[0])):
                x, state = saved(x, jax.tree.map(lambda a, i=i: a[i], layers), next(one), None)
        return x, state

    stack: Any = (in_turns([layers for layers, _ in found]), numbers, None)
    sums = [total for _, totals in found for total in totals or []]
    if not sums and first is None:
        return _scan(turn, x, stack)
    return _scan_adding(turn, x, stack, [(lambda run: run, turns)], in_turns(sums) or None, first)


def _loops(count: int, recompute: Recompute) -> list[tuple[SavePolicy, int]]:
    """What layers save, and how many of them save it, one loop after the other; a group counts as one layer."""
    if recompute.kind != "full":
        return [(partial(_save_products, kind=recompute.kind), count)]
    save_input = partial(_save_input, offload=recompute.offload)
    if recompute.method == "block":
        first = min(recompute.num_layers, count)
        loops: list[tuple[SavePolicy, int]] = [
            (save_input, first),
            (partial(_save_products, kind="none"), count - first),
        ]
        return [loop for loop in loops if loop[1]]
    if count % recompute.group:
        raise UserError(f"{count} layers are not a multiple of recompute_num_layers {recompute.group}")
    return [(save_input, count // recompute.group)]


def _run_group(run: RunLayer, x: Array, layers: Layers, numbers: Array, states: States) -> tuple[Array, States]:
    return _scan(_save_products(run, "none"), x, (layers, numbers, states))


def _run_one_by_one(run: RunLayer, x: Array, layers: list[Any], numbers: Array, states: States) -> tuple[Array, States]:
    """Without a loop: what a layer keeps goes into no stack, and comes out of none."""
    after = []
    for i, layer in enumerate(layers):
        x, state = run(x, layer, numbers[i], jax.tree.map(lambda a, i=i: a[i], states))
        after.append(state)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *after)


def _scan(run: RunLayer, x: Array, stack: tuple[Layers, Array, States]) -> tuple[Array, States]:
    return lax.scan(lambda x, layer: run(x, *layer), x, stack)


def _scan_adding(
    run: RunLayer,
    x: Array,
    stack: tuple[Layers, Array, States],
    loops: list[tuple[SavePolicy, int]],
    sums: list[Array] | None,
    offset: Array | None,
) -> tuple[Array, States]:
    """Loops over one stack; each backward iteration adds its layer's gradients to those of the stack.

    By itself autodiff would stack the gradients of each loop, and the compiler concatenate them and add them to `sums`:
    two or three times the memory. So loops carry the stack, unchanged, for its cotangent: that begins as `sums`, and
    iterations write to it in place. An iteration takes its layer from a copy that has no gradient.
    """
    layers, *scanned = stack
    fixed = jax.tree.map(lax.stop_gradient, layers)

    def turn(
        x: Array, carried: list[Array], place: Array, number: Array, state: Any
    ) -> tuple[tuple[Array, list[Array]], Any]:
        layer, carried = accumulate_grads_into(index_layer(fixed, place), carried, place)
        x, state = run(x, layer, number, state)
        return (x, carried), state

    carried, first = jax.tree.leaves(differentiable_shards(layers)), 0
    sums = zeros_like_shards(carried) if sums is None else sums
    states: list[States] = []
    for saving, turns in loops:
        saved, places = saving(turn), jnp.arange(first, first + turns) + (0 if offset is None else offset)
        part = (places, *jax.tree.map(lambda a, s=slice(first, first + turns): a[s], scanned))
        (x, carried), state = lax.scan(lambda carry, at, saved=saved: saved(*carry, *at), (x, carried), part)
        states.append(state)
        first += turns
    return seed_cotangents(sums, x, carried), jax.tree.map(lambda *parts: jnp.concatenate(parts), *states)


def _save_products(run: Any, kind: Literal["none", "selective"]) -> Any:
    """`run` that saves its products with weights, and the attention core unless `kind` is selective."""
    always = (PRODUCT, DROPOUT_MASK, ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    names = [*always, *([ATTENTION_CORE] if kind == "none" else [])]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(run, policy=policy)


def _save_input(run: Any, offload: bool) -> Any:
    """`run` that saves only its input."""
    policies = jax.checkpoint_policies
    if not offload:
        return jax.checkpoint(run, policy=policies.nothing_saveable)
    to_host = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda x, *rest: run(checkpoint_name(x, LAYER_INPUT), *rest), policy=to_host)


def check_offload(recompute: Recompute, platform: str) -> None:
    """Checks that devices of `platform` have a host to offload to.

    Raises:
      UserError: they don't.
    """
    if recompute.offload and platform == "cpu":
        raise UserError(
            "recompute_offload moves layer inputs from a GPU to its host, and the mesh is of CPUs: leave it out"
        )
