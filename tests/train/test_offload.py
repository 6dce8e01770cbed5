"""Moments in the host's memory: the same numbers, and checkpoints of runs with and without it."""

import dataclasses
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.memory import COPIES, stage_memory
from mtjax.analysis.optimizer import exposed_host_bytes, host_bytes, host_reads
from mtjax.analysis.timing import step_time
from mtjax.config import replace, validate
from mtjax.errors import UserError
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.sharding.host_memory import is_on_host
from mtjax.train.skipped_steps import bad_parameter
from mtjax.train.step import TrainStep
from tests.tiny import batch_of, initial_state, program_of, run_steps, tiny_config

SETTINGS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_layers": 3, "family": "llama"}
SETTINGS |= {"num_kv_heads": 4, "mlp_size": 48, "compute_dtype": "bfloat16"}
BOTH = "optimizer,parameters"
HYBRID: dict[str, Any] = {"num_layers": 4, "layer_pattern": "(M*)x2", "ssm_head_dim": 8}
GROWN: dict[str, Any] = {
    "pipeline_schedule": "interleaved",
    "start_weight_decay": 0.001,
    "weight_decay_style": "linear",
}


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path((state.parameters, state.optimizer))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def check_memories(state: Any, kind: str) -> None:
    """What is offloaded is in the host's memory, and nothing else."""
    adam = state.optimizer[1][0]
    assert not any(map(is_on_host, (adam.count, state.step)))
    assert {is_on_host(a) for a in jax.tree.leaves((adam.mu, adam.nu))} == {kind != "none"}
    assert {is_on_host(a) for a in jax.tree.leaves(state.parameters)} == {kind == BOTH}


LONG, EXHAUSTIVE = pytest.mark.long, pytest.mark.exhaustive
CASES = [
    ("4x1", BOTH, {"zero": 3, "microbatch_size": 1}),
    pytest.param("4x1", "optimizer", {"zero": 3, "microbatch_size": 1}, marks=pytest.mark.exhaustive),
    pytest.param("2x2", "optimizer", {"zero": 1}, marks=EXHAUSTIVE),
    pytest.param("2x2", BOTH, {"zero": 1, "microbatch_size": 2}, marks=EXHAUSTIVE),
    pytest.param("2x2", BOTH, {"zero": 2, "microbatch_size": 2, "recompute": "full"}, marks=EXHAUSTIVE),
    pytest.param(
        "1x2", BOTH, {"sequence_parallel": True, "microbatch_size": 2, "family": "gpt"}, marks=pytest.mark.exhaustive
    ),
    pytest.param("1x2", BOTH, {"tie_embeddings": True}, marks=EXHAUSTIVE),
    pytest.param("2x1", BOTH, {"zero": 3, "unroll_layers": True}, marks=LONG),
    pytest.param("data=2,expert=2", "optimizer", {"zero": 2, "num_experts": 4}, marks=pytest.mark.exhaustive),
    pytest.param("data=2,expert=2", BOTH, {"zero": 1, "num_experts": 4, "microbatch_size": 2}, marks=LONG),
    pytest.param("data=2,shard=2", BOTH, {"zero": 1, "microbatch_size": 1}, marks=pytest.mark.exhaustive),
    pytest.param("context=2", BOTH, {"zero": 1}, marks=pytest.mark.exhaustive),
    pytest.param("1x3x1", "optimizer", {"microbatch_size": 4}, marks=pytest.mark.exhaustive),
    pytest.param("2x2x1", BOTH, {"layers_per_stage": (2, 1), "zero": 2, "microbatch_size": 2}, marks=EXHAUSTIVE),
    pytest.param(
        "2x2x1", BOTH, {"num_layers": 4, "zero": 1, "microbatch_size": 1, "chunks": 2} | GROWN, marks=EXHAUSTIVE
    ),
    pytest.param("2x1", BOTH, {"compute_dtype": "float16", "num_layers": 1, "zero": 1}, marks=LONG),
    pytest.param("2x1", BOTH, {"compute_dtype": "float16"}, marks=EXHAUSTIVE),
    pytest.param(
        "2x1", BOTH, {"family": "t5", "zero": 1, "num_kv_heads": None, "microbatch_size": 2}, marks=EXHAUSTIVE
    ),
    pytest.param("2x1", BOTH, {"family": "hybrid", "zero": 3} | HYBRID, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("mesh", "kind", "settings"), CASES, ids=str)
def test_runs_and_checkpoints_with_and_without_offload(
    mesh: str, kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Losses and states equal those of a run without to the bit, and each resumes the other's checkpoint."""
    plain, offloaded = (program_of(mesh, **{**SETTINGS, "offload": offload, **settings}) for offload in ("none", kind))
    begun, losses = run_steps(plain, 2)
    first = offloaded.initialize(0)
    check_memories(first, kind)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(first.optimizer))
    state, found = run_steps(offloaded, 2, first)
    check_memories(state, kind)
    equal(state, begun)
    batch = batch_of(offloaded, 0)
    evaluated = [program.evaluation(at.weights, batch) for program, at in ((offloaded, state), (plain, begun))]
    assert jax.device_get(evaluated[0]) == jax.device_get(evaluated[1])
    expected, rest = saved_and_continued(plain, begun, tmp_path / "plain")
    after, more = saved_and_continued(offloaded, state, tmp_path / "offloaded")
    equal(after, expected)
    assert found + more == losses + rest
    for reader, name, where in (
        (offloaded, "plain", kind),
        (plain, "offloaded", "none"),
        (offloaded, "offloaded", kind),
    ):
        with closing(Checkpoints(tmp_path / name, keep_last=1)) as checkpoints:
            restored = checkpoints.restore(reader.abstract_state, reader.config)
        assert restored is not None and restored.skipped == ()
        check_memories(restored.state, where)
        equal(run_steps(reader, 2, restored.state)[0], expected)


def saved_and_continued(program: TrainStep, state: Any, folder: Path) -> tuple[Any, list[dict[str, float]]]:
    """Saves a state, and runs two steps while it is written."""
    with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
        checkpoints.save(state, program.config, 16)
        return run_steps(program, 2, state)


def equal(found: Any, expected: Any) -> None:
    theirs = arrays_of(expected)
    for name, array in arrays_of(found).items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("2x2", {"zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param("2x2x1", {"zero": 1, "layers_per_stage": (2, 1), "microbatch_size": 2}, marks=pytest.mark.long),
    ],
)
def test_the_copies_change_no_bit(mesh: str, settings: dict[str, Any]) -> None:
    """The update layer by layer is the same whatever is in the host's memory, and that of entire stacks is close: XLA
    may divide by a number or multiply by its inverse."""
    results: dict[tuple[str, str], Any] = {}
    for kind, memory in (("none", "none"), ("optimizer", "none"), ("optimizer", "optimizer"), (BOTH, BOTH)):
        program, stored = (program_of(mesh, **{**SETTINGS, "offload": name, **settings}) for name in (kind, memory))
        state, draw = stored.initialize(0), np.random.default_rng(0)
        gradients = jax.tree.map(
            lambda a, s, draw=draw: jax.device_put(draw.normal(size=a.shape).astype(np.float32), s),
            state.parameters,
            program.parameter_sharding,
        )

        def update(state: Any, gradients: Any, program: Any = program) -> Any:
            norm, finite = jax.numpy.float32(3.0), jax.numpy.bool_(True)
            parameters, optimizer = program.updated(state, gradients, {}, norm, finite)
            return dataclasses.replace(state, parameters=parameters, optimizer=optimizer)

        compiled = jax.jit(update, out_shardings=stored.state_sharding)
        for _ in range(2):
            state = program.on_mesh(compiled, state, gradients)
        check_memories(state, memory)
        results[kind, memory] = state
    equal(results["optimizer", "optimizer"], results["optimizer", "none"])
    equal(results[BOTH, BOTH], results["optimizer", "none"])
    plain = arrays_of(results["none", "none"])
    for name, array in arrays_of(results["optimizer", "none"]).items():
        np.testing.assert_allclose(array, plain[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", ["optimizer", pytest.param(BOTH, marks=EXHAUSTIVE)])
def test_a_skipped_step_moves_no_offloaded_state(kind: str) -> None:
    program = program_of("4x1", **{**SETTINGS, "offload": kind, "zero": 3, "microbatch_size": 1})
    state = initial_state(program)
    broken = jax.device_put(
        np.full(state.parameters["embedding"].shape, np.inf, np.float32), state.parameters["embedding"].sharding
    )
    state = dataclasses.replace(state, parameters={**state.parameters, "embedding": broken})
    before = arrays_of(state)
    after, metrics = program.step(state, batch_of(program, 0))
    assert float(metrics["skipped"]) == 1.0
    check_memories(after, kind)
    for name, array in arrays_of(after).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert "embedding" in str(bad_parameter(program, after.weights))


@LONG
def test_adapters_are_offloaded_and_their_base_is_not() -> None:
    settings = {**SETTINGS, "zero": 2, "lora_rank": 4}
    plain, offloaded = (program_of("2x1", **{**settings, "offload": kind}) for kind in ("none", BOTH))
    expected, losses = run_steps(plain, 3)
    state, found = run_steps(offloaded, 3, offloaded.initialize(0))
    assert losses == found
    equal(state, expected)
    for record, array in zip(jax.tree.leaves(offloaded.records), jax.tree.leaves(state.parameters), strict=True):
        assert is_on_host(array) == record.is_trainable


@pytest.mark.parametrize("kind", ["optimizer", BOTH])
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("1x1", {}),
        ("4x2", {"zero": 3}),
        ("2x2x2", {"zero": 1, "microbatch_size": 1, "layers_per_stage": (2, 1)}),
        ("data=2,expert=2", {"zero": 1, "num_experts": 4}),
        ("2x1", {"zero": 1, "lora_rank": 4}),
    ],
)
def test_bytes_are_counted(mesh: str, settings: dict[str, Any], kind: str) -> None:
    """By formula, and in the shards of the step's arguments: what is in the host's memory, and what is not."""
    program = program_of(mesh, **{**SETTINGS, "offload": kind, **settings})
    bytes_of = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize  # noqa: E731
    state = program.abstract_state
    hosted = [a for a in jax.tree.leaves((state.parameters, state.optimizer)) if is_on_host(a)]
    plan, anatomy = Plan.of(program.config, parse_mesh(mesh)), anatomy_of(program.config.model)
    assert host_bytes(anatomy, plan) == sum(map(bytes_of, hosted))
    masters = [a for a in jax.tree.leaves(state.parameters) if is_on_host(a)]
    assert host_reads(anatomy, plan) - host_bytes(anatomy, plan) == sum(map(bytes_of, masters))
    memory = stage_memory(anatomy, plan)
    assert memory.optimizer == 0
    assert memory.weights == sum(bytes_of(a) for a in jax.tree.leaves(state.parameters) if not is_on_host(a))
    # Validation copies these in float32; it needs no gradients, and no copies in the compute dtype.
    assert sum(map(bytes_of, masters)) <= memory.gradients + memory.activations.get(COPIES, 0)
    none = stage_memory(anatomy, Plan.of(replace(program.config, offload="none"), parse_mesh(mesh)))
    assert memory.total < none.total
    step_of = lambda config: step_time(anatomy, Plan.of(config, parse_mesh(mesh)), DGX_H100).total  # noqa: E731
    seconds = step_of(program.config) - step_of(replace(program.config, offload="none"))
    reads, writes, exposed = (count(anatomy, plan) for count in (host_reads, host_bytes, exposed_host_bytes))
    assert max(reads, writes) < exposed < reads + writes
    assert seconds == pytest.approx(exposed / 55e9, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "muon"}, "offload optimizer works with optimizer adamw only, and optimizer is muon"),
        ({"adam_mu_dtype": "bfloat16"}, "adam_mu_dtype float32 only, and adam_mu_dtype is bfloat16"),
        ({"check_replicas": 5}, "check_replicas 0 only, and check_replicas is 5"),
        ({"offload": BOTH, "compute_dtype": "float32"}, "and compute_dtype is float32, so that they would be as large"),
        ({"offload": BOTH, "master_dtype": "bfloat16"}, "master_dtype float32 only, .* or set offload optimizer"),
        ({"offload": BOTH, "fp8": "delayed"}, "fp8 none only, and fp8 is delayed: change it, or set offload optimizer"),
        (
            {"offload": BOTH, "router_bias": True, "num_experts": 4},
            "offload optimizer,parameters works with router_bias",
        ),
    ],
)
def test_what_can_not_be_offloaded_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**{"offload": "optimizer", "compute_dtype": "bfloat16", **settings}))
