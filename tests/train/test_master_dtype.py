"""Master weights in bfloat16: stochastic rounding by numpy, the gradients of float32 ones, checkpoints and bytes."""

import dataclasses
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.memory import stage_memory
from mtjax.config import to_dict, validate
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.errors import UserError
from mtjax.layout.layouts import gathers_in_compute_dtype, is_decayed
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.stages import order_of
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.checkpoints.weights import find_weights, restore_weights
from mtjax.train.changes import check_states
from mtjax.train.step import TrainStep
from tests.same_numbers import by_name
from tests.tiny import batch_of, initial_state, mesh_of, program_of, tiny_config

NARROW = ml_dtypes.bfloat16
SETTINGS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "compute_dtype": "bfloat16"}
SETTINGS |= {"family": "llama", "num_kv_heads": 4, "mlp_size": 48, "num_layers": 3}
MASTERS: dict[str, Any] = {"master_dtype": "bfloat16", **SETTINGS}
SHRINK: dict[str, Any] = {"learning_rate": 2.0**-8, "min_learning_rate": 0.0, "weight_decay": 0.5}
SHRINK |= {"decay_style": "constant", "warmup_steps": 0, "clip_grad_norm": 0.0}
"""Without gradients a step takes a share of 2^-9 off every decayed parameter, which float32 represents exactly: it is
from a quarter to half of the distance between two numbers in bfloat16, and rounded to nearest nothing."""
SHARE = 2.0**-9


def drawn(program: TrainStep) -> Any:
    """Parameters that do not depend on the mesh, far from 0 or ties."""

    def one(record: Any, like: Any) -> jax.Array:
        draw = np.random.default_rng(len(record.name)).normal(
            size=(3, *record.shape[1:]) if record.is_stacked else record.shape
        )
        order = order_of(record.name, program.layer_orders)
        if order is not None:
            draw = draw[np.maximum(order.flat, 0)]
            draw[np.asarray(order.flat) < 0] = 0  # a slot without a layer
        return jax.device_put(draw.astype(like.dtype), like.sharding)

    return jax.tree.map(one, program.records, program.abstract_state.parameters)


def shrunk(program: TrainStep, steps: int, finite: bool = True) -> tuple[Any, Any]:
    """Parameters before, and after steps without gradients."""
    before = drawn(program)
    state = dataclasses.replace(initial_state(program), parameters=before)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32, device=a.sharding), before)

    def update(state: Any, gradients: Any) -> Any:
        parameters, optimizer = program.updated(state, gradients, {}, jnp.float32(1), jnp.bool_(finite))
        return dataclasses.replace(state, parameters=parameters, optimizer=optimizer)

    compiled = jax.jit(update, out_shardings=program.state_sharding)
    for _ in range(steps):
        state = program.on_mesh(compiled, state, zeros)
    return before, state.parameters


def decayed(program: TrainStep) -> list[str]:
    return [record.name for record in jax.tree.leaves(program.records) if is_decayed(record.logical_axes)]


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        pytest.param("muon", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("adafactor", "lion", "sgd")),
    ],
)
def test_an_update_below_half_of_the_precision_is_made_by_chance(optimizer: str) -> None:
    """One step against float64: one of the two neighbours, the nearer one more often; many steps: the mean is right."""
    program = program_of("1x1", optimizer=optimizer, **SHRINK, **MASTERS)
    before, once = (by_name(program, tree) for tree in shrunk(program, 1))
    _, often = shrunk(program, 60)
    often = by_name(program, often)
    assert {name for name, array in once.items() if array.dtype == NARROW} == set(decayed(program))
    taken, expected, total = 0.0, 0.0, 0
    for name in decayed(program):
        start = before[name].astype(np.float64)
        exact = start * (1 - SHARE)
        assert (exact.astype(NARROW) == before[name]).all()  # to nearest it would stall
        above, below = before[name], np.nextafter(before[name], NARROW(0))
        assert ((once[name] == above) | (once[name] == below)).all()
        share = (start - exact) / (start - below.astype(np.float64))
        taken, expected, total = taken + (once[name] == below).sum(), expected + share.sum(), total + share.size
    assert abs(taken - expected) < 5 * math.sqrt(total / 4)
    ratios = np.concatenate(
        [(often[n].astype(np.float64) / before[n].astype(np.float64)).ravel() for n in decayed(program)]
    )
    assert abs(ratios.mean() / (1 - SHARE) ** 60 - 1) < 1e-3


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param(
            "2x2x2",
            {"zero": 1, "offload": "optimizer", "microbatch_size": 1, "layers_per_stage": (2, 1)},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "2x2x2", {"zero": 1, "microbatch_size": 1, "layers_per_stage": (2, 1)}, marks=pytest.mark.exhaustive
        ),
        pytest.param("4x2", {"zero": 3}, marks=pytest.mark.exhaustive),
        pytest.param("data=2,expert=2", {"zero": 2, "num_experts": 4}, marks=pytest.mark.exhaustive),
    ],
)
def test_rounding_is_the_same_on_every_mesh(mesh: str, settings: dict[str, Any]) -> None:
    """To the bit, on stages of unequal length and with moments in the host's memory too."""
    experts = {name: value for name, value in settings.items() if name == "num_experts"}
    alone, program = (
        program_of("1x1", **experts, **SHRINK, **MASTERS),
        program_of(mesh, **settings, **SHRINK, **MASTERS),
    )
    expected, found = by_name(alone, shrunk(alone, 3)[1]), by_name(program, shrunk(program, 3)[1])
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


CASES = [
    pytest.param("2x2", {"zero": 1}, marks=pytest.mark.exhaustive),
    pytest.param(
        "1x2", {"sequence_parallel": True, "microbatch_size": 2, "family": "gpt"}, marks=pytest.mark.exhaustive
    ),
    pytest.param("2x2", {"zero": 1, "microbatch_size": 2}, marks=pytest.mark.exhaustive),
    pytest.param("2x2", {"zero": 2, "microbatch_size": 2}, marks=pytest.mark.exhaustive),
    pytest.param("4x2", {"zero": 3}, marks=pytest.mark.long),
    pytest.param("2x2", {"zero": 3, "microbatch_size": 2, "recompute": "full"}, marks=pytest.mark.exhaustive),
    pytest.param("2x1", {"zero": 3, "unroll_layers": True}, marks=pytest.mark.long),
    pytest.param("2x1", {"zero": 1, "unroll_layers": True}, marks=pytest.mark.exhaustive),
    pytest.param("2x2x2", {"zero": 2, "microbatch_size": 1, "layers_per_stage": (2, 1)}, marks=pytest.mark.exhaustive),
    pytest.param("data=2,shard=2", {"zero": 1, "microbatch_size": 1}, marks=pytest.mark.exhaustive),
    pytest.param(
        "shard=2,context=2,expert=2", {"zero": 1, "num_experts": 4, "microbatch_size": 1}, marks=pytest.mark.long
    ),
    pytest.param("2x1", {"zero": 1, "tie_embeddings": True}, marks=pytest.mark.exhaustive),
    pytest.param("2x1", {"zero": 1, "fp8": "delayed", "hidden_size": 64, "mlp_size": 64}, marks=pytest.mark.long),
    pytest.param("2x1", {"zero": 2, "lora_rank": 4}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("mesh", "settings"), CASES, ids=str)
def test_gradients_are_those_of_the_same_values_in_float32(mesh: str, settings: dict[str, Any]) -> None:
    """To the bit: the program that keeps float32 casts the same numbers where products read them."""
    wide, narrow = (program_of(mesh, **{**masters, **settings}) for masters in (SETTINGS, MASTERS))
    state, of_wide = initial_state(narrow), initial_state(wide)
    same = jax.tree.map(
        lambda a, like: jax.device_put(np.asarray(a).astype(like.dtype), like.sharding),
        state.parameters,
        of_wide.parameters,
    )
    batch = batch_of(narrow, 0)

    def gradients(program: TrainStep, parameters: Any) -> Any:
        return program.on_mesh(jax.jit(lambda p, b: program.gradients(p, b, None)), parameters, batch)

    expected, found = gradients(wide, same), gradients(narrow, state.parameters)
    assert {a.dtype for a in jax.tree.leaves(found[2])} == {jnp.dtype("float32")}
    for (path, array), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs), err_msg=jax.tree_util.keystr(path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("4x2", {"zero": 3}, marks=pytest.mark.exhaustive),
        ("1x2x2", {"layers_per_stage": (2, 1), "microbatch_size": 4}),
    ],
)
def test_losses_are_those_of_the_same_values_in_float32(mesh: str, settings: dict[str, Any]) -> None:
    """Of an evaluation during training, to the bit."""
    wide, narrow = (program_of(mesh, **{**masters, **settings}) for masters in (SETTINGS, MASTERS))
    parameters = initial_state(narrow).parameters
    placed = lambda a, like: jax.device_put(np.asarray(a).astype(like.dtype), like.sharding)  # noqa: E731
    same = jax.tree.map(placed, parameters, initial_state(wide).parameters)
    batch = batch_of(narrow, 0)
    assert jax.device_get(narrow.evaluation(parameters, batch)) == jax.device_get(wide.evaluation(same, batch))


def test_a_skipped_step_rounds_nothing() -> None:
    program = program_of("1x1", **SHRINK, **MASTERS)
    before, after = shrunk(program, 2, finite=False)
    for mine, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def saved_by(program: TrainStep, folder: Path) -> tuple[Any, Path]:
    """Drawn parameters in a checkpoint."""
    step = jax.device_put(jnp.int32(3), program.state_sharding.step)
    state = dataclasses.replace(initial_state(program), step=step, parameters=drawn(program))
    with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
        checkpoints.save(state, program.config, 0)
    return state, folder


def test_checkpoints_are_resumed_and_read_as_weights(tmp_path: Path) -> None:
    """On another mesh to the bit; in float32 by evaluation and conversion; float32 weights are rounded to nearest."""
    staged = program_of("2x2x2", zero=1, microbatch_size=1, layers_per_stage=(2, 1), **SHRINK, **MASTERS)
    alone = program_of("1x1", **SHRINK, **MASTERS)
    state, folder = saved_by(staged, tmp_path / "narrow")
    with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
        restored = checkpoints.restore(alone.abstract_state, alone.config)
    assert restored is not None
    expected = by_name(staged, state.parameters)
    for name, array in by_name(alone, restored.state.parameters).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    weights, model = find_weights(folder), ShardedModel(alone.config, mesh_of("1x1"))
    for name, array in by_name(alone, restore_weights(weights, model.restore_target)).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected[name].astype(np.float32), err_msg=name)
    source = MtjaxSource(folder)
    for name, parameter in source.parameters.items():
        for layer, array in enumerate(source.slices(parameter)):
            own = expected[name] if parameter.num_layers is None else expected[name][layer]
            np.testing.assert_array_equal(array, own[: len(array)].astype(np.float32), err_msg=name)
    wide = program_of("1x1", **SETTINGS)
    state, folder = saved_by(wide, tmp_path / "wide")
    expected = by_name(wide, state.parameters)
    for name, array in by_name(alone, restore_weights(find_weights(folder), alone.restore_target)).items():
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)


def test_another_type_s_checkpoint_is_refused() -> None:
    past = Past(step=5, consumed_samples=40, tables=to_dict(tiny_config(**SETTINGS)))
    with pytest.raises(
        UserError, match="saved with master_dtype float32, and master_dtype is bfloat16: resume with --m"
    ):
        check_states(past, tiny_config(**MASTERS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute_dtype": "float32"}, "and compute_dtype is float32: set compute_dtype bfloat16"),
        ({"optimizer": "schedule-free", "decay_style": "constant"}, "schedule-free stores an average of weights"),
    ],
)
def test_what_can_not_be_stored_in_bfloat16_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**{**MASTERS, **settings}))


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("1x1", {}),
        ("4x2", {"zero": 1}),
        ("4x2", {"zero": 3}),
        ("2x2x2", {"zero": 2, "microbatch_size": 1, "layers_per_stage": (2, 1)}),
        ("data=2,expert=2", {"zero": 1, "num_experts": 4}),
        ("2x1", {"zero": 1, "lora_rank": 4}),
    ],
)
def test_bytes_are_counted(mesh: str, settings: dict[str, Any]) -> None:
    """By formula, and in the shards of the step's arguments."""
    program = program_of(mesh, **settings, **MASTERS)
    leaves = jax.tree.leaves(program.abstract_state.parameters)
    shards = (math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    config = program.config
    plan = Plan.of(config, parse_mesh(mesh))
    assert stage_memory(anatomy_of(config.model), plan).weights == sum(shards)
    trained = [record for record in jax.tree.leaves(program.records) if record.is_trainable]
    assert all((r.dtype == "bfloat16") == gathers_in_compute_dtype(r.logical_axes) for r in trained)
