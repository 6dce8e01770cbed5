"""Recompute that differs between layers, is of several layers from one input, or saves inputs in the host's memory."""

from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtjax.errors import UserError
from mtjax.models.layer_loop import (
    LayerLoopSettings,
    Loop,
    MixerStates,
    RunLayer,
    SavePolicy,
    as_it_is,
    save_input,
    save_products,
    scan_accumulating,
)
from mtjax.sharding.param_comm import LayerInputs

LAYER_INPUT = "layer input"


def loops_by_method(count: int, loop_settings: LayerLoopSettings) -> list[Loop]:
    """Returns the loops over layers; see `layer_loop.loops_of`."""
    loops = [Loop(saving, each, as_it_is) for saving, each in _policies(count, loop_settings)]
    if not any(loop_settings.unquantized):
        return loops
    from mtjax.models.float8 import unquantized

    (loop,), (first, last) = loops, loop_settings.unquantized
    # Separate loops, as all layers of a loop are one program.
    ends = [loop._replace(times=each, variant=unquantized) for each in (first, last)]
    return [loop for loop in (ends[0], loop._replace(times=count - first - last), ends[1]) if loop.times]


def _policies(count: int, loop_settings: LayerLoopSettings) -> list[tuple[SavePolicy, int]]:
    """Returns the policies of loops over layers, each with its number of iterations.

    Raises:
      UserError: the layers are not a multiple of the group.
    """
    # `none`, `selective`: one loop. `full`: layers save their input, all of them (`uniform`, group by group) or the
    # first `num_layers` (`block`), where later layers save their products.
    if loop_settings.recompute != "full":
        return [(partial(save_products, recompute=loop_settings.recompute), count)]
    saving_input = save_input_on_host if loop_settings.recompute_offload else save_input
    if loop_settings.recompute_method == "block":
        first = min(loop_settings.recompute_num_layers, count)
        loops: list[tuple[SavePolicy, int]] = [
            (saving_input, first),
            (partial(save_products, recompute="none"), count - first),
        ]
        return [loop for loop in loops if loop[1]]
    if count % loop_settings.layers_per_group:
        raise UserError(f"{count} layers are not a multiple of recompute_num_layers {loop_settings.layers_per_group}")
    return [(saving_input, count // loop_settings.layers_per_group)]


def save_input_on_host(run: Any) -> Any:
    """Wraps `run` to save only its input, in host memory."""
    # XLA: its host offloading copies the input to pinned host memory after the forward pass of a layer, and back before
    # its backward pass.
    to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(carry: Any, *inputs: Any) -> Any:
        """Names the hidden states alone: in a tuple, the rest is the stack of parameters (`scan_accumulating`)."""
        if not isinstance(carry, tuple):
            return run(checkpoint_name(carry, LAYER_INPUT), *inputs)
        x, *others = carry
        return run((checkpoint_name(x, LAYER_INPUT), *others), *inputs)

    return jax.checkpoint(named, policy=to_host)


def scan_groups(
    run: RunLayer,
    group: int,
    stack: LayerInputs,
    loops: list[Loop],
    accumulators: list[Array] | None,
    offset: Array | None,
    x: Array,
) -> tuple[Array, MixerStates]:
    """Scans over groups of layers that are recomputed from one input; arguments otherwise as of `scan_accumulating`."""
    count = len(stack.number)
    # [layers / group, group, ...]
    stack, accumulators = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), (stack, accumulators))
    of_group = partial(_run_group, run)
    if len(loops) > 1 or accumulators is not None or offset is not None:
        x, states = scan_accumulating(of_group, stack, loops, accumulators, offset, x)
    else:
        x, states = lax.scan(loops[0].wrap(of_group), x, stack)
    return x, jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), states)


def _run_group(run: RunLayer, x: Array, layers: LayerInputs) -> tuple[Array, MixerStates]:
    """Runs the layers of one group; while the group is recomputed, its layers save their products."""
    return lax.scan(save_products(run, "none"), x, layers)


def check_offload(loop_settings: LayerLoopSettings, platform: str) -> None:
    """Checks that devices of `platform` have a host to offload to.

    Raises:
      UserError: they don't.
    """
    if loop_settings.recompute_offload and platform == "cpu":
        raise UserError(
            "recompute_offload moves layer inputs from a GPU to its host, and the mesh consists of CPUs: remove it"
        )
