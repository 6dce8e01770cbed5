"""Optimizers other than AdamW, each a transformation of gradients before weight decay and the learning rate.

Every one computes on entire stacks of layers, and the same as on each layer by itself. `mtjax.layout.optimizer_states`
says which arrays each keeps.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mtjax.config import Config, Optimizer
from mtjax.layout.layouts import LAYERS, is_decayed
from mtjax.layout.optimizer_states import factored_dimensions, matrices_of, optimizer_states
from mtjax.layout.stages import Orders, order_of
from mtjax.sharding.newton_schulz import orthogonalize
from mtjax.sharding.param_specs import ParamSpec
from mtjax.train.optimizer import make_learning_rate
from mtjax.train.rounding import round_stochastically, rows_of

Tree = Any

CONSISTENT_RMS = 0.2
"""RMS of Muon's updates, about that of AdamW's, so that both have one learning rate: arXiv 2502.16982, equation 4."""
CLIPPED_RMS, SMALLEST_SQUARE, DECAY_POWER = 1.0, 1e-30, 0.8
"""Adafactor's d, epsilon_1, and the exponent of beta_2 at step t, 1 - t^-0.8: arXiv 1804.04235, algorithms 5 and 7."""


def make_rule(config: Config, records: Tree, orders: Orders, weight_decay: Any) -> optax.GradientTransformation:
    """Builds the optimizer of a config, without gradient clipping.

    Args:
      config: of the run.
      records: `ParamSpec` of every trained parameter, in a tree like theirs.
      orders: order of layers in stacked parameters.
      weight_decay: a number, traced or not.
    """
    options = config.optimizer
    learning_rate = make_learning_rate(options, config.training.steps)
    mask = jax.tree.map(lambda record: is_decayed(record.logical_axes), records)
    # It applies weight decay and learning rate itself, as its average needs the resulting step.
    if options.optimizer == "schedule-free":
        return optax.chain(schedule_free(options, learning_rate, mask, weight_decay))
    scale = SCALES.get(options.optimizer)
    return optax.chain(
        scale(config, records) if scale else _adam(config, records, orders),
        # After the scaling: decoupled, as in AdamW (arXiv 1711.05101), for every optimizer.
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _sgd(config: Config, records: Tree) -> optax.GradientTransformation:
    momentum = config.optimizer.sgd_momentum
    return optax.trace(momentum) if momentum else optax.identity()


def _lion(config: Config, records: Tree) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.optimizer.beta1, config.optimizer.beta2)


class AdafactorState(NamedTuple):
    """Averages of squared gradients, each in a tree like the parameters', without those that are not kept."""

    count: Any
    v_row: Tree
    v_col: Tree
    nu: Tree


def _adafactor(config: Config, records: Tree) -> optax.GradientTransformation:
    """Builds Adafactor without momentum, whose updates have an RMS of at most 1 in each layer's parameter."""
    every, structure = jax.tree.flatten(records)
    dimensions = [factored_dimensions(record.logical_axes, record.shape) for record in every]

    def init(params: Tree) -> AdafactorState:
        leaves = jax.tree.leaves(params)
        pairs = list(zip(leaves, dimensions, strict=True))
        # The sum gives an average its shape and sharding; its values are not computed.
        rows = [None if d is None else jnp.zeros_like(a.sum(d[1])) for a, d in pairs]
        columns = [None if d is None else jnp.zeros_like(a.sum(d[0])) for a, d in pairs]
        full = [jnp.zeros_like(a) if d is None else None for a, d in pairs]
        return AdafactorState(jnp.zeros([], jnp.int32), *map(structure.unflatten, (rows, columns, full)))

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, AdafactorState]:
        decay = 1.0 - jnp.float32(state.count + 1) ** -DECAY_POWER
        kept = (_slots(tree) for tree in (state.v_row, state.v_col, state.nu))
        results = [
            _factored(record, d, decay, g, *arrays)
            for record, d, g, *arrays in zip(every, dimensions, jax.tree.leaves(updates), *kept, strict=True)
        ]
        result, *averages = (structure.unflatten(column) for column in zip(*results, strict=True))
        return result, AdafactorState(optax.safe_increment(state.count), *averages)

    return optax.GradientTransformation(init, update)


def _factored(
    record: ParamSpec,
    dimensions: tuple[int, int] | None,
    decay: Array,
    gradient: Array,
    rows: Any,
    columns: Any,
    full: Any,
) -> tuple[Array, Any, Any, Any]:
    """Returns one parameter's update and its averages."""
    square = jnp.square(gradient) + SMALLEST_SQUARE
    if dimensions is None:
        full = decay * full + (1 - decay) * square
        update = gradient * full**-0.5
    else:
        second, largest = dimensions
        rows = decay * rows + (1 - decay) * square.mean(largest)
        columns = decay * columns + (1 - decay) * square.mean(second)
        second_of_rows = second - (second > largest)  # the second dimension, in an array without the largest
        # Rows times columns over their mean approximate each square (algorithm 4).
        row_factor = (rows / rows.mean(second_of_rows, keepdims=True)) ** -0.5
        update = gradient * jnp.expand_dims(row_factor, largest) * jnp.expand_dims(columns**-0.5, second)
    # Each layer is clipped by itself, as if it were no stack.
    of_layer = tuple(range(int(record.logical_axes[:1] == (LAYERS,)), gradient.ndim))
    rms = jnp.sqrt(jnp.square(update).mean(of_layer, keepdims=True))
    return update / jnp.maximum(1.0, rms / CLIPPED_RMS), rows, columns, full


class MuonState(NamedTuple):
    """Momentum of every parameter, and Adam's averages of squares of those that are not orthogonalized."""

    count: Any
    mu: Tree
    nu: Tree


def _muon(config: Config, records: Tree) -> optax.GradientTransformation:
    """Builds Muon for the layers' matrices, and Adam for everything else: `matrices_of` decides.

    With Nesterov's momentum and corrected bias, as in `optax.contrib.muon`.
    """
    options, every = config.optimizer, jax.tree.leaves(records)
    structure = jax.tree.structure(records)
    is_muon = [matrices_of(record.logical_axes) is not None for record in every]
    dtype = optimizer_states(config).newton_schulz

    def init(params: Tree) -> MuonState:
        squares = [
            None if muon else jnp.zeros_like(a) for a, muon in zip(jax.tree.leaves(params), is_muon, strict=True)
        ]
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), structure.unflatten(squares))

    def one(record: ParamSpec, muon: bool, count: Array, g: Array, mu: Array, nu: Any) -> tuple[Array, Array, Any]:
        if not muon:
            mu, nu = _average(g, mu, options.beta1), _average(jnp.square(g), nu, options.beta2)
            unbiased = nu / (1 - options.beta2**count)
            return mu / (1 - options.beta1**count) / (jnp.sqrt(unbiased) + options.epsilon), mu, nu
        beta = options.muon_momentum
        mu = _average(g, mu, beta)
        # Nesterov: the momentum after the next step, with each part's bias corrected by its own number of steps.
        ahead = beta * (mu / (1 - beta ** (count + 1))) + (1 - beta) * (g / (1 - beta**count))
        _, rows, columns = matrices_of(record.logical_axes).sizes(record.shape)  # pyright: ignore[reportOptionalMemberAccess]
        # The elements of an orthogonal matrix have an RMS of max(rows, columns)^-0.5.
        return orthogonalize(ahead, record, dtype) * (CONSISTENT_RMS * max(rows, columns) ** 0.5), mu, nu

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, MuonState]:
        count: Any = optax.safe_increment(state.count)
        columns = (every, is_muon, *map(_slots, (updates, state.mu, state.nu)))
        results = [one(record, muon, count, *rest) for record, muon, *rest in zip(*columns, strict=True)]
        result, mu, nu = (structure.unflatten(column) for column in zip(*results, strict=True))
        return result, MuonState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _adam(config: Config, records: Tree, orders: Orders) -> optax.GradientTransformation:
    """Builds Adam with moments in types of less precision; the update is computed in float32."""
    options, every, structure = config.optimizer, jax.tree.leaves(records), jax.tree.structure(records)

    def init(params: Tree) -> optax.ScaleByAdamState:
        mu, nu = (
            optax.tree.zeros_like(params, dtype=jnp.dtype(dtype))
            for dtype in (options.adam_mu_dtype, options.adam_nu_dtype)
        )
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count: Any = optax.safe_increment(state.count)
        mu, nu = (jax.tree.map(lambda a: a.astype(jnp.float32), tree) for tree in (state.mu, state.nu))
        mu = jax.tree.map(lambda g, m: _average(g, m, options.beta1), updates, mu)
        nu = jax.tree.map(lambda g, v: _average(jnp.square(g), v, options.beta2), updates, nu)
        first, second = 1 - options.beta1**count, 1 - options.beta2**count
        result = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + options.epsilon), mu, nu)
        if options.adam_nu_dtype == "bfloat16":
            # A step changes it by a share of 1 - beta2, less than half of the distance between two numbers.
            # The key is that of seed and step, so that a resumed run rounds as an uninterrupted one.
            key = jax.random.fold_in(jax.random.key(config.training.seed), count)
            leaves = [
                round_stochastically(v, jax.random.fold_in(key, number), record, rows_of(order_of(record.name, orders)))
                for number, (v, record) in enumerate(zip(jax.tree.leaves(nu), every, strict=True))
            ]
            nu = structure.unflatten(leaves)
        return result, optax.ScaleByAdamState(count, optax.tree.cast(mu, options.adam_mu_dtype), nu)

    return optax.GradientTransformation(init, update)


class ScheduleFreeState(NamedTuple):
    """Schedule-Free's iterate z, the averages of squares, the sum of the weights of x's average, and counters."""

    z: Tree
    nu: Tree
    weight_sum: Any
    max_rate: Any
    count: Any


def schedule_free(
    options: Optimizer, learning_rate: optax.Schedule, mask: Tree, weight_decay: Any
) -> optax.GradientTransformation:
    """Builds Schedule-Free AdamW (arXiv 2405.15682), whose parameters are the average x: that is evaluated and saved.

    Gradients are those at `y = (1 - beta1) z + beta1 x` (`training_point`).
    """
    base = optax.chain(
        optax.scale_by_rms(decay=options.beta2, eps=options.epsilon, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
    )

    def init(params: Tree) -> ScheduleFreeState:
        zero = jnp.zeros([], jnp.float32)
        z = jax.tree.map(jnp.copy, params)
        return ScheduleFreeState(z, optax.tree.zeros_like(params), zero, zero, jnp.zeros([], jnp.int32))

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, ScheduleFreeState]:
        rate = jnp.asarray(learning_rate(state.count), jnp.float32)
        inner: Any = base.init(params)
        # Between steps, only the averages and the counter of optax's state are kept.
        inner = (inner[0]._replace(count=state.count, nu=state.nu), *inner[1:])
        moved: Any = base.update(updates, inner, training_point(options, params, state))
        steps, after = moved
        z = jax.tree.map(lambda a, step: a - rate * step, state.z, steps)
        # Averages weigh each z by the squared rate, so that those of the warmup count less.
        max_rate = jnp.maximum(state.max_rate, rate)
        total = state.weight_sum + max_rate**2
        share = jnp.where(total > 0, max_rate**2 / jnp.where(total > 0, total, 1.0), 0.0)
        # optax adds updates to parameters; here these are the average x.
        result = jax.tree.map(lambda x, a: share * (a - x), params, z)
        return result, ScheduleFreeState(z, after[0].nu, total, max_rate, optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def training_point(options: Optimizer, parameters: Tree, state: ScheduleFreeState) -> Tree:
    """Returns where Schedule-Free takes gradients: `y = (1 - beta1) z + beta1 x`."""
    beta = options.beta1
    return jax.tree.map(lambda x, z: (1 - beta) * z + beta * x, parameters, state.z)


def _average(value: Array, average: Array, decay: float) -> Array:
    return (1 - decay) * value + decay * average


def _slots(tree: Tree) -> list[Any]:
    """Returns the leaves of a tree, None where it has none."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


SCALES: Mapping[str, Callable[[Config, Tree], optax.GradientTransformation]] = {
    "muon": _muon,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
}
"""Transformation of gradients by optimizer."""
