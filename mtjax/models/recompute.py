"""What layers keep for their backward pass, and what they compute again: `recompute` and what goes with it.

Whatever is chosen, products of activations with weights are kept once, in the compute type, and with them what names
itself here; norms, activation functions and casts of weights are cheap and always computed again. Nothing that was
gathered along the sequence is kept: its split source is, and the gather runs again.

Per layer, in units of s b h elements at f = 4h and with sequence parallelism all of it over t: the layer's input 1,
query, key and value 3/t, attention's output 1/t, what it adds to the residual stream 1, MLP 4/t, and two masks of a
byte each - less than the `10 + 24/t` bytes of arXiv 2205.05198, whose kernels keep the results of norms and GELU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtjax.config import Training
from mtjax.errors import UserError
from mtjax.sharding.axes import varying_like

DROPOUT_MASK = "dropout mask"
ATTENTION_OUTPUT = "attention output"
ATTENTION_CORE = "attention core"
"""Probabilities and their dropout mask: `5 a s^2 b / t` bytes, the share that selective recompute drops."""
LAYER_INPUT = "layer input"

Layers = Any
"""A tree of arrays whose first dimension is the layer."""
RunLayer = Callable[[Array, Any, Array], Array]
"""(input, one layer, its number) -> output."""


@dataclass(frozen=True)
class Recompute:
    """Megatron's `--recompute-granularity`, `--recompute-method` and `--recompute-num-layers`."""

    kind: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    offload: bool = False
    """Layer inputs wait in the host's memory."""

    @classmethod
    def of(cls, training: Training) -> "Recompute":
        """As the config says."""
        return cls(
            training.recompute, training.recompute_method, training.recompute_num_layers, training.recompute_offload
        )


def scan_layers(run: RunLayer, x: Array, layers: Layers, count: int, recompute: Recompute) -> Array:
    """The output of `count` layers, one after the other.

    Args:
      run: one layer.
      x: input of the first.
      layers: their parameters, stacked.
      count: how many they are.
      recompute: what each keeps.
    """
    numbers = jnp.arange(count)
    if recompute.kind != "full":
        return _scan(_keeping(run, recompute.kind), x, (layers, numbers))
    if recompute.method == "block":
        return _scan_block(run, x, layers, count, recompute)
    if count % recompute.num_layers:
        raise UserError(f"{count} layers are no multiple of recompute_num_layers {recompute.num_layers}")
    if recompute.num_layers == 1:
        return _scan(_again(run, recompute), x, (layers, numbers))
    groups = jax.tree.map(lambda a: a.reshape(-1, recompute.num_layers, *a.shape[1:]), (layers, numbers))

    def run_group(x: Array, layers: Layers, numbers: Array) -> Array:
        return _scan(_keeping(run, "none"), x, (layers, numbers))

    return _scan(_again(run_group, recompute), x, groups)


def _scan(run: RunLayer, x: Array, stacked: tuple[Layers, Array]) -> Array:
    return lax.scan(lambda x, layer: (run(x, *layer), None), x, stacked)[0]


def _scan_block(run: RunLayer, x: Array, layers: Layers, count: int, recompute: Recompute) -> Array:
    """The first `num_layers` layers computed again, the others not: two loops that pick their layers from one stack.

    Slices of the stack would be copies. Gradients, one stack for each loop, flow through zeros that are added to a
    layer's parameters: the compiler drops the sum, and autodiff does not sum into a stack of all layers in every turn.
    """
    fixed = jax.tree.map(lax.stop_gradient, layers)

    def run_picked(x: Array, zeros: Layers, number: Array) -> Array:
        pick = lambda a, zero: lax.dynamic_index_in_dim(a, number, keepdims=False) + zero  # noqa: E731
        return run(x, jax.tree.map(pick, fixed, zeros), number)

    split = recompute.num_layers
    if split >= count:
        return _scan(_again(run, recompute), x, (layers, jnp.arange(count)))
    zeros: Any = _zeros(split, layers)
    first, rest = zeros
    x = _scan(_again(run_picked, recompute), x, (first, jnp.arange(split)))
    return _scan(_keeping(run_picked, "none"), x, (rest, jnp.arange(split, count)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _zeros(split: int, layers: Layers) -> tuple[Layers, Layers]:
    """Zeros in place of the first `split` layers and of the others; their gradients are the layers'."""
    zeros = lambda a: varying_like(jnp.zeros_like(a), a)  # noqa: E731
    return jax.tree.map(lambda a: zeros(a[:split]), layers), jax.tree.map(lambda a: zeros(a[split:]), layers)


def _zeros_forward(split: int, layers: Layers) -> tuple[tuple[Layers, Layers], None]:
    return _zeros(split, layers), None


def _zeros_backward(split: int, _: None, gradients: tuple[Layers, Layers]) -> tuple[Layers]:
    first, rest = gradients
    return (jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, rest),)


_zeros.defvjp(_zeros_forward, _zeros_backward)


def _keeping(run: RunLayer, kind: Literal["none", "selective"]) -> RunLayer:
    """`run` that keeps its products with weights, and the attention core unless `kind` is selective."""
    names = [DROPOUT_MASK, ATTENTION_OUTPUT, *([ATTENTION_CORE] if kind == "none" else [])]
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*names)
    )
    return jax.checkpoint(run, policy=policy)


def _again(run: RunLayer, recompute: Recompute) -> RunLayer:
    """`run` that keeps its input alone."""
    policies = jax.checkpoint_policies
    if not recompute.offload:
        return jax.checkpoint(run, policy=policies.nothing_saveable)
    to_host = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def run_named(x: Array, layer: Any, number: Array) -> Array:
        return run(checkpoint_name(x, LAYER_INPUT), layer, number)

    return jax.checkpoint(run_named, policy=to_host)


def check_offload(recompute: Recompute, platform: str) -> None:
    """Checks that devices of `platform` have a host to offload to.

    Raises:
      UserError: they don't.
    """
    if recompute.offload and platform == "cpu":
        raise UserError(
            "recompute_offload moves layer inputs from a GPU to its host, and the mesh is of CPUs: leave it out"
        )
