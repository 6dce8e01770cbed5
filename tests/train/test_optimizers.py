"""Every optimizer against optax on the whole, unstacked parameters of one device."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.memory import stage_memory
from mtjax.config import to_dict, validate
from mtjax.errors import UserError
from mtjax.layout.layouts import is_decayed
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.optimizer_states import FACTORED_FROM, matrices_of
from mtjax.layout.plan import Plan
from mtjax.layout.stages import order_of
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.runtime.checkpoints.past import Past
from mtjax.sharding.param_specs import dotted
from mtjax.train.changes import check_states
from mtjax.train.optimizer import make_learning_rate
from mtjax.train.step import TrainStep
from tests.same_numbers import by_name
from tests.tiny import batch_of, initial_state, program_of, tiny_config

SETTINGS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "weight_decay": 0.1}
LLAMA: dict[str, Any] = {"family": "llama", "num_kv_heads": 4, "mlp_size": 48}
STEPS = 3


def unstacked(program: Any, tree: Any) -> dict[str, Any]:
    """Arrays by name and layer; with Muon one matrix each, as optax has no stacks."""
    muon = program.config.optimizer.optimizer == "muon"
    found = {}
    for record, array in zip(jax.tree.leaves(program.trainable_records), jax.tree.leaves(tree), strict=True):
        array = np.asarray(array)
        matrices = matrices_of(record.logical_axes) if muon else None
        if matrices:
            _, rows, columns = matrices.sizes(record.shape)
            array = array.transpose(*matrices.stacked, *matrices.rows, *matrices.columns).reshape(-1, rows, columns)
        layers = array if matrices or record.is_stacked else [array]
        found |= {f"{record.name}/{i}": layer for i, layer in enumerate(layers)}
    return found


def reference(program: Any) -> Any:
    """The same optimizer by optax, for `unstacked` parameters."""
    config, options = program.config, program.config.optimizer
    schedule = make_learning_rate(options, config.training.steps)
    records = {record.name: record for record in jax.tree.leaves(program.trainable_records)}
    of = lambda names: {name: records[name.rpartition("/")[0]] for name in names}  # noqa: E731
    decay = optax.add_decayed_weights(
        options.weight_decay, lambda tree: {n: is_decayed(r.logical_axes) for n, r in of(tree).items()}
    )
    rate = optax.scale_by_learning_rate(schedule)
    clip = optax.clip_by_global_norm(options.clip_grad_norm)
    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)
    match options.optimizer:
        case "muon":
            # Of matrices `contrib.muon` is Muon, with decay and rate.
            muon = contrib.muon(
                schedule, beta=options.muon_momentum, weight_decay=options.weight_decay, consistent_rms=0.2
            )
            labels = lambda tree: {n: "muon" if matrices_of(r.logical_axes) else "adam" for n, r in of(tree).items()}  # noqa: E731
            return optax.chain(clip, optax.partition({"muon": muon, "adam": optax.chain(adam, decay, rate)}, labels))
        case "adafactor":
            scale = optax.chain(
                optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM), optax.clip_by_block_rms(1.0)
            )
        case "lion":
            scale = optax.scale_by_lion(options.beta1, options.beta2)
        case "sgd":
            scale = optax.trace(options.sgd_momentum)
        case "schedule-free":
            base = optax.chain(
                optax.scale_by_rms(options.beta2, options.epsilon, eps_in_sqrt=False, bias_correction=True), decay, rate
            )
            # optax counts the steps of the rate that weighs averages from 1, and those of the base optimizer from 0.
            return optax.chain(clip, contrib.schedule_free(base, lambda k: schedule(k - 1), b1=options.beta1))
        case _:
            scale = adam
    return optax.chain(clip, scale, decay, rate)


CASES = [
    pytest.param("muon", "1x1", {}, marks=pytest.mark.exhaustive),
    pytest.param("muon", "2x2", {"zero": 1, **LLAMA}, marks=pytest.mark.long),
    pytest.param("muon", "4x2", {"zero": 3, "num_layers": 3}, marks=pytest.mark.long),
    ("muon", "2x2x2", {"zero": 2, "microbatch_size": 2}),
    pytest.param("muon", "data=2,shard=2,model=2", {"zero": 1}, marks=pytest.mark.long),
    pytest.param("muon", "context=2,expert=2,model=2", {"zero": 1, "num_experts": 4}, marks=pytest.mark.long),
    pytest.param("adafactor", "1x2", {"hidden_size": 128}, marks=pytest.mark.exhaustive),
    pytest.param("adafactor", "2x2", {"zero": 1, "hidden_size": 128}, marks=pytest.mark.long),
    pytest.param("lion", "2x2", {"zero": 3}, marks=pytest.mark.long),
    ("sgd", "2x1x2", {"zero": 1}),
    ("schedule-free", "2x2", {"zero": 1, "decay_style": "constant"}),
]
NARROW: dict[str, Any] = {"adam_mu_dtype": "bfloat16", "adam_nu_dtype": "bfloat16", "clip_grad_norm": 0.0}


def update_of(program: TrainStep) -> Any:
    """The optimizer's update of parameters by gradients, on the program's mesh."""

    def updated(gradients: Any, state: Any, parameters: Any) -> Any:
        updates, state = program.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    places = program.state_sharding
    return jax.jit(updated, out_shardings=(places.parameters, places.optimizer))


def reference_step(rule: Any, optimizer: str) -> Any:
    """A step on one device: (gradients, state, parameters) -> (parameters, state, parameters for evaluation). One
    program, where each operation on each shape would be one."""

    def stepped(gradients: Any, state: Any, parameters: Any) -> Any:
        updates, state = rule.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        is_average = optimizer == "schedule-free"
        return parameters, state, contrib.schedule_free_eval_params(state[1], parameters) if is_average else parameters

    return jax.jit(stepped)


@pytest.mark.parametrize(("optimizer", "mesh", "settings"), CASES, ids=str)
def test_updates_are_those_of_optax(optimizer: str, mesh: str, settings: dict[str, Any]) -> None:
    """Random gradients on the mesh, and on the whole layers of one device."""
    program = program_of(mesh, optimizer=optimizer, clip_grad_norm=0.5, **SETTINGS, **settings)
    places = program.state_sharding
    state, rule, random = initial_state(program), reference(program), np.random.default_rng(0)
    ours, parameters = state.optimizer, state.parameters
    flat: Any = unstacked(program, parameters)
    theirs: Any = jax.jit(rule.init)(flat)

    update, reference_update = update_of(program), reference_step(rule, optimizer)
    for step in range(STEPS):
        gradients = jax.tree.map(lambda a: random.normal(size=a.shape).astype(np.float32), parameters)
        placed = jax.tree.map(jax.device_put, gradients, places.parameters)
        parameters, ours = program.on_mesh(update, placed, ours, parameters)
        flat, theirs, expected = reference_update(unstacked(program, gradients), theirs, flat)
        for name, array in unstacked(program, parameters).items():
            np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=3e-6, err_msg=f"{step} {name}")


@pytest.mark.long
def test_schedule_free_takes_gradients_between_average_and_iterate() -> None:
    """A step against optax, which keeps that point as the parameters, and gradients of the same model there."""
    # Of gradients near 0 only the sign would count with a small epsilon, and that is rounding.
    program = program_of("1x2", optimizer="schedule-free", decay_style="constant", epsilon=1e-4, **SETTINGS)
    state, rule = initial_state(program), reference(program)
    point = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state.parameters)  # the step donates its state
    theirs: Any = jax.jit(rule.init)(unstacked(program, point))
    reference_update = reference_step(rule, "schedule-free")
    gradients_of = jax.jit(lambda p, batch: program.gradients(p, batch, None))
    for step in range(STEPS):
        batch = batch_of(program, step)
        loss, _, gradients = program.on_mesh(gradients_of, point, batch)
        state, metrics = program.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        flat: Any = unstacked(program, point)
        flat, theirs, average = reference_update(unstacked(program, gradients), theirs, flat)
        for name, array in unstacked(program, state.parameters).items():
            np.testing.assert_allclose(array, average[name], rtol=2e-5, atol=3e-6, err_msg=f"{step} {name}")
        restacked = [
            np.stack([flat[f"{r.name}/{i}"] for i in range(r.shape[0])]) if r.is_stacked else flat[f"{r.name}/0"]
            for r in jax.tree.leaves(program.records)
        ]
        values = jax.tree.unflatten(jax.tree.structure(point), restacked)
        point = jax.tree.map(jax.device_put, values, program.parameter_sharding)


def moments_after(mesh: str, steps: int, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and squares' averages after steps with the same gradients, whatever the mesh."""
    program = program_of(mesh, microbatch_size=1, num_layers=3, **SETTINGS, **NARROW, **LLAMA, **settings)
    state = initial_state(program)
    numbers = program.layer_orders

    def gradient(record: Any, like: Any) -> jax.Array:
        draw = np.random.default_rng(len(record.name)).normal(
            size=(3, *like.shape[1:]) if record.is_stacked else like.shape
        )
        order = order_of(record.name, numbers)
        draw = draw if order is None else draw[np.maximum(order.flat, 0)]
        return jax.device_put(draw.astype(np.float32), like.sharding)

    gradients = jax.tree.map(gradient, program.records, state.parameters)

    update = update_of(program)
    optimizer, parameters = state.optimizer, state.parameters
    for _ in range(steps):
        parameters, optimizer = program.on_mesh(update, gradients, optimizer, parameters)
    assert {a.dtype for a in jax.tree.leaves((optimizer[1][0].mu, optimizer[1][0].nu))} == {jnp.dtype("bfloat16")}

    squares = {name: gradient.astype(np.float64) ** 2 for name, gradient in by_name(program, gradients).items()}
    share = {n: v.astype(np.float64) / squares[n] for n, v in by_name(program, optimizer[1][0].nu).items()}
    return by_name(program, parameters), share


@pytest.mark.long
def test_moments_in_bfloat16_are_those_of_adam_on_every_mesh() -> None:
    """With random bits that depend on the element alone; rounding to nearest would lose changes of a thousandth."""
    steps = 40
    alone, share = moments_after("1x1", steps, {})
    exact = 1 - 0.999**steps
    every = np.concatenate([s.ravel() for s in share.values()])
    assert abs(every.mean() / exact - 1) < 2e-3  # to nearest it would stop at half
    assert every.std() / exact < 0.05
    other, other_share = moments_after("2x2x2", steps, {"zero": 1, "layers_per_stage": (2, 1)})
    for name, array in share.items():
        np.testing.assert_array_equal(other_share[name], array, err_msg=name)
        np.testing.assert_allclose(other[name], alone[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "optimizer",
    ["muon", *(pytest.param(name, marks=pytest.mark.long) for name in ("adafactor", "schedule-free", "adamw"))],
)
def test_states_are_restored_to_the_bit_on_other_meshes(optimizer: str, tmp_path: Path) -> None:
    """Saved on two unequal stages, restored on one with ZeRO-3, saved there, and restored on the stages."""
    settings = {"optimizer": optimizer, "hidden_size": 128, "num_layers": 3, "microbatch_size": 1, **SETTINGS}
    settings |= {"schedule-free": {"decay_style": "constant"}, "adamw": NARROW}.get(optimizer, {})
    staged = program_of("1x2x2", layers_per_stage=(2, 1), **settings)
    alone = program_of("2x2", zero=3, **settings)
    random = np.random.default_rng(0)

    def filled(path: Any, like: Any) -> jax.Array:
        array = (10 + random.normal(size=like.shape)).astype(like.dtype)
        order = order_of(dotted(path), staged.layer_orders)
        if order is not None:
            array[np.asarray(order.flat) < 0] = 0  # a slot without a layer
        return jax.device_put(array, like.sharding)

    first = jax.tree_util.tree_map_with_path(filled, staged.abstract_state)
    state = first
    for number, (writer, reader) in enumerate([(staged, alone), (alone, staged)]):
        folder = tmp_path / str(number)
        with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
            checkpoints.save(state, writer.config, 0)
        with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
            restored = checkpoints.restore(reader.abstract_state, reader.config)
        assert restored is not None
        state = restored.state
        assert jax.tree.map(lambda a: a.sharding, state) == reader.state_sharding
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs), err_msg=dotted(path))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            {},
            {"optimizer": "muon"},
            "holds the states of optimizer adamw, and optimizer is muon: resume with --optimizer",
        ),
        (
            {"optimizer": "sgd"},
            {"optimizer": "sgd", "sgd_momentum": 0.0},
            "saved with sgd_momentum 0.9, and sgd_momentum",
        ),
    ],
)
def test_another_optimizer_s_checkpoint_is_refused(then: Any, now: Any, message: str) -> None:
    past = Past(step=5, consumed_samples=40, tables=to_dict(tiny_config(**then)))
    with pytest.raises(UserError, match=message):
        check_states(past, tiny_config(**now))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon_momentum": 0.9}, "muon_momentum 0.9 is for optimizer muon, and optimizer is adamw"),
        ({"optimizer": "lion", "sgd_momentum": 0.8}, "sgd_momentum 0.8 is for optimizer sgd, and optimizer is lion"),
        ({"optimizer": "muon", "adam_nu_dtype": "bfloat16"}, "adam_nu_dtype bfloat16 is for optimizer adamw"),
        ({"optimizer": "schedule-free"}, "decay_style is cosine: add --decay-style constant"),
        ({"optimizer": "schedule-free", "decay_style": "constant", "layer_decay": 0.9}, "and layer_decay is 0.9"),
    ],
)
def test_what_an_optimizer_can_not_do_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**settings))


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
@pytest.mark.parametrize("optimizer", ["adamw", "narrow", "muon", "adafactor", "lion", "sgd", "schedule-free"])
def test_bytes_of_states_are_counted(optimizer: str, mesh: str) -> None:
    """By formula, and in the shards of the step's arguments."""
    settings = {"hidden_size": 256, "num_layers": 3, "zero": 1, "decay_style": "constant"}
    settings |= {"adam_nu_dtype": "bfloat16"} if optimizer == "narrow" else {"optimizer": optimizer}
    program = program_of(mesh, **settings, **LLAMA)
    shards = (
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.abstract_state.optimizer)
        if leaf.ndim
    )
    config = program.config
    formula = stage_memory(anatomy_of(config.model), Plan.of(config, parse_mesh(mesh)))
    assert formula.optimizer == sum(shards)
