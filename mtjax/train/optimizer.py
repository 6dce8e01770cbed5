"""AdamW with gradient clipping (section 4.2 of arXiv 1909.08053), its learning rate, and the search for NaNs.

Learning rates are as in Megatron's `OptimizerParamScheduler`, but count steps where it counts samples, which differs
while the batch size is ramped up. Update k, counted from 0, uses the value at k.

Devices find the first tensor of loss and gradients that is not finite before a step changes anything, and all of them
skip the step; the host reports it when it logs (`mtjax.train.skipped_steps`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mtjax.config import Config, Optimizer
from mtjax.config.layer_pattern import KIND_OF
from mtjax.layout.layouts import LAYERS, is_decayed
from mtjax.layout.optimizer_states import optimizer_states
from mtjax.layout.stacks import DENSE, STACK
from mtjax.layout.stages import PLAIN, Orders
from mtjax.sharding.axes import min_and_sum_over_shards, shard_like_rows

Tree = Any
LayerNumbersOf = Callable[[str], Sequence[int]]
"""Maps the dotted name of a stacked array to the numbers of its layers in the model."""
ALL_FINITE = -1
"""`first_bad` when every tensor is finite; else it is the index of the first that is not."""
Ratio = jax.Array
"""Fraction of a phase that is over, 0 to 1."""


DECAYS: Mapping[str, Callable[[Ratio], jax.Array]] = {
    "constant": jnp.ones_like,
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: (1.0 + jnp.cos(jnp.pi * ratio)) / 2,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - jnp.sqrt(ratio),
}
"""Shape of a decay from 1 to 0, as a function of the fraction of its steps that is over."""


def make_learning_rate(options: Optimizer, steps: int) -> optax.Schedule:
    """Builds the learning rate as a function of the step, counted from 0.

    Step k of the warmup has `initial + (peak - initial) k / warmup_steps`: without an initial rate the first update
    changes only Adam's moments, as in Megatron. After `decay_steps` every style but constant is at the minimum.
    """
    peak, initial, warmup = options.learning_rate, options.initial_learning_rate, options.warmup_steps
    # In a run that is no longer than its warmup, the rate rises to the end.
    last = max(options.decay_steps or steps, warmup + 1)
    decayed = _decayed(options, last)

    # Each phase is computed for every k and selected with `where`, since k is traced.
    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        k = jnp.asarray(step, jnp.float32)
        ended = peak if options.decay_style == "constant" else options.min_learning_rate
        after = jnp.where(k > last, ended, decayed(k))
        return jnp.where(k <= warmup, initial + (peak - initial) * k / warmup, after) if warmup else after

    return rate


def _decayed(options: Optimizer, last: int) -> Callable[[jax.Array], jax.Array]:
    """Builds the learning rate between the end of the warmup and step `last`."""
    peak, floor, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    if options.decay_style == "inverse-square-root":
        return lambda k: jnp.maximum(floor, peak * (warmup / jnp.maximum(k, 1)) ** 0.5)  # peak x sqrt(warmup / k)
    first, style = warmup, options.decay_style
    if options.decay_style == "WSD":
        assert options.wsd_decay_steps is not None  # the config is checked
        first, style = last - options.wsd_decay_steps, options.wsd_decay_style
    return lambda k: floor + (peak - floor) * DECAYS[style](jnp.clip((k - first) / (last - first), 0, 1))


def make_optimizer(config: Config, records: Any, orders: Orders = PLAIN) -> optax.GradientTransformationExtraArgs:
    """Builds global-norm clipping followed by the optimizer, with layer-wise learning rate decay if the config sets it.

    Args:
      config: rates, decay and clipping.
      records: `ParamSpec` of every trained parameter, in a tree like theirs.
      orders: order of layers in stacked parameters.
    """
    options, steps = config.optimizer, config.training.steps
    clip = _clip(options.clip_grad_norm) if options.clip_grad_norm else optax.identity()
    if optimizer_states(config).is_plain:
        build = partial(
            optax.adamw,
            make_learning_rate(options, steps),
            b1=options.beta1,
            b2=options.beta2,
            eps=options.epsilon,
            # Biases and norms are not decayed.
            mask=jax.tree.map(lambda record: is_decayed(record.logical_axes), records),
        )
    else:
        from mtjax.train.optimizers import make_rule

        build = partial(make_rule, config, records, orders)
    if options.start_weight_decay is None:
        rule = build(weight_decay=options.weight_decay)
    else:
        from mtjax.train.weight_decay import with_weight_decay

        rule = with_weight_decay(build, options, steps)
    if config.finetuning.layer_decay == 1.0:
        return optax.chain(clip, rule)
    from mtjax.train.layer_decay import layer_decay

    # After the rule, not before it: Adam's updates do not depend on the scale of its gradients.
    return optax.chain(clip, rule, layer_decay(config, records, orders))


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Builds a scaling of gradients to a global norm of at most `max_norm`; their norm may be given to `update`."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        # XLA: optax's own clipping divides each gradient, which is not fused into the three updates that read it, so
        # all clipped gradients would be written to memory. A multiplication by one factor is recomputed in each fusion.
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) if norm is None else norm))
        return jax.tree.map(lambda gradient: gradient * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


@dataclass(frozen=True)
class CheckedTensor:
    """A parameter, or one layer of a stacked one."""

    name: str
    """Dotted name."""
    layer: int | None = None
    """Number of the layer in the model, from 0."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def norm_and_first_bad(
    scalar: Array,
    values: Tree,
    records: Tree,
    numbers_of: LayerNumbersOf,
    unrolled: bool = False,
    norm_may_overflow: bool = False,
) -> tuple[Array, Array]:
    """Returns the norm of all values, float32, and the index of the first tensor that is not finite, int32, in the
    order of the backward pass (`skipped_steps.tensors`), `ALL_FINITE` when everything is finite; both are replicated.

    A tensor counts as finite if the sum of squares of each device's shard is finite.

    Args:
      scalar: such as the loss; if only it, or the norm, is not finite, the index is the number of tensors.
      values: gradients or parameters, with any sharding.
      records: `ParamSpec` of each of the values.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...
      unrolled: whether stacked matrices have just been concatenated from those of the layers.
      norm_may_overflow: whether only tensors and `scalar` have to be finite.
    """
    in_tree_order = tensors_in_tree_order(records, numbers_of)
    # `backwards` is a permutation; `argsort` inverts it: the place in the backward pass's order of each tensor.
    leaves, leaf_records = jax.tree.leaves(values), jax.tree.leaves(records)
    counts = [a.shape[0] if record.is_stacked else 1 for a, record in zip(leaves, leaf_records, strict=True)]
    indices = np.split(np.argsort(backwards(in_tree_order)).astype(np.int32), np.cumsum(counts)[:-1])
    # Shard the indices like the layers (pipeline stages): a device that has only some layers needs only theirs.
    each = zip(indices, leaves, leaf_records, strict=True)
    sharded_indices = [shard_like_rows(i, a) if record.is_stacked else i for i, a, record in each]

    def of_shards(shards: tuple[list[Array], list[Array]]) -> tuple[Array, list[Array]]:
        """Returns the least index of a tensor of these shards that is not finite, and each array's sum of squares."""
        firsts, sums = [], []
        for a, index, record in zip(*shards, leaf_records, strict=True):
            squares = _squares_of_layers(a, unrolled and record.is_matrix) if record.is_stacked else jnp.square(a).sum()
            firsts.append(jnp.where(jnp.isfinite(squares), len(in_tree_order), index))
            sums.append(squares.sum())
        return jnp.concatenate(firsts).min(), sums

    first, sum_of_squares = min_and_sum_over_shards(of_shards, (leaves, sharded_indices))
    norm = jnp.sqrt(sum_of_squares)
    scalar = scalar if norm_may_overflow else scalar + norm
    is_finite = (first == len(in_tree_order)) & jnp.isfinite(scalar)
    return norm, jnp.where(is_finite, ALL_FINITE, first).astype(jnp.int32)


def _squares_of_layers(stack: Array, concatenated: bool) -> Array:
    """Returns the sum of squares of each layer, [layers]."""
    if not concatenated:
        return jnp.square(stack).sum(axis=tuple(range(1, stack.ndim)))
    # XLA: a slice of a concatenation is its operand; a sum over all of it takes 4 to 7 times as long as reading it.
    return jnp.stack([jnp.square(stack[i]).sum() for i in range(stack.shape[0])])


def tensors_in_tree_order(records: Tree, numbers_of: LayerNumbersOf) -> list[CheckedTensor]:
    """Lists the tensors of a model in the order of its parameters."""
    named: list[CheckedTensor] = []
    for record in jax.tree.leaves(records):
        layers: Sequence[int | None] = [None]
        if record.is_stacked:  # with pipeline stages there may be padding rows
            numbers, rows = numbers_of(record.name), range(record.shape[0])
            layers = numbers if len(numbers) == len(rows) else rows
        named += [CheckedTensor(record.name, layer) for layer in layers]
    return named


def backwards(in_tree_order: Sequence[CheckedTensor]) -> list[int]:
    """Returns the indices into `in_tree_order` in the backward pass's order, a decoder's stack before an encoder's."""
    one_section = {STACK, DENSE, *KIND_OF.values()}

    def key(index: int) -> tuple[bool, str, int, int]:
        tensor = in_tree_order[index]
        if tensor.layer is None:
            return True, "", 0, index
        stack = tensor.name.partition(f".{LAYERS}.")[0]
        return False, "" if stack in one_section else stack, -tensor.layer, index

    return sorted(range(len(in_tree_order)), key=key)
