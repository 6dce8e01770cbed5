"""Layers gathered and their gradients summed while others compute: the numbers of layers that do so for themselves."""

from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config.layer_pattern import expanded
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.sharding.prefetch import pattern as pattern_scan
from mtjax.sharding.prefetch import scan
from mtjax.train.step import make_train_step
from tests.inspect.steps import needs_aot, tiny
from tests.tiny import batch_of, initial_state, mesh_of, program_of, step_gradients, tiny_config

LAYERS: dict[str, Any] = {"num_layers": 4, "zero": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LONG = pytest.mark.long
ALONE = "mtjax.models.layer_loop.communicates"
ALONE_IN_PATTERN = "mtjax.models.pattern_stacks.communicates"
HYBRID: dict[str, Any] = {"family": "hybrid", "ssm_heads": 8, "ssm_head_dim": 4, "ssm_state": 6, "ssm_groups": 4}
SHARED: dict[str, Any] = {"activation": "geglu_exact", "position": "rope", "block_rank": 3, "tie_embeddings": True}


def pattern(letters: str, **fields: Any) -> dict[str, Any]:
    return HYBRID | {"layer_pattern": letters, "num_layers": len(expanded(letters))} | fields


def differentiated(mesh: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """A batch's loss, and gradients by name."""
    program = program_of(mesh, **LAYERS | fields)
    state, batch = initial_state(program), batch_of(program, 0)
    loss, _, gradients = step_gradients(program, state, batch)
    return loss, jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param(
            "2x4",
            {"recompute": "full", "sequence_parallel": True},
            id="full recompute, split sequences",
            marks=LONG,
        ),
        pytest.param("4x2", {"recompute": "none", "zero": 1}, id="ZeRO-1, gathered once"),
        pytest.param(
            "8x1", {"recompute": "selective", "zero": 2}, id="ZeRO-2, gathered once", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "4x2", {"zero": 2, "microbatch_size": 1}, id="ZeRO-2, two microbatches", marks=pytest.mark.exhaustive
        ),
        pytest.param("2x4", {"recompute": "full", "zero": 0, "hidden_dropout": 0.1}, id="sums and masks", marks=LONG),
        pytest.param("4x2", {"zero": 1, "family": "t5"}, id="T5, ZeRO-1", marks=LONG),
        pytest.param(
            "data=2,context=2,model=2",
            {"zero": 1, "family": "llama"},
            id="ranks that share samples",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("4x2", {"zero": 0, "lora_rank": 2}, id="frozen, sums alone", marks=pytest.mark.exhaustive),
        pytest.param(
            "4x2",
            {"recompute": "selective", "lora_rank": 2, "microbatch_size": 1},
            id="frozen, two microbatches",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "4x2", {"recompute": "none", "family": "t5", "microbatch_size": 1}, id="T5", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "data=2,expert=2,model=2",
            {"recompute": "selective", "family": "llama", "num_experts": 4, "experts_top_k": 2, "microbatch_size": 1}
            | {"lora_rank": 2},
            id="experts, frozen, two microbatches",
            marks=LONG,
        ),
        pytest.param(
            "data=2,expert=2,model=2",
            {"recompute": "selective", "family": "llama", "num_experts": 4, "experts_top_k": 2, "microbatch_size": 1},
            id="experts",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "8x1",
            {"recompute": "full", "grad_reduce_dtype": "bfloat16"},
            id="rounded on the wire",
            marks=LONG,
        ),
        pytest.param("4x2", pattern("(*-)x4", recompute="full", **DROPOUT), id="two kinds of layers"),
        pytest.param("2x4", pattern("(M-M*)x3", microbatch_size=2), id="pattern, two microbatches", marks=LONG),
        pytest.param("4x2", pattern("*(M-)x4", zero=1), id="two loops, gathered once", marks=pytest.mark.exhaustive),
        pytest.param("4x2", pattern("(M-)x4*-M", zero=2, lora_rank=2), id="frozen, two loops", marks=LONG),
        pytest.param("8x1", pattern("(M-)x2*-M", zero=0), id="pattern without ZeRO", marks=LONG),
        pytest.param(
            "data=2,expert=2,model=2",
            pattern("(ME)x4*", num_experts=4, experts_top_k=2, expert_size=16, sequence_parallel=True),
            id="pattern with experts",
            marks=LONG,
        ),
        pytest.param(
            "2x2", pattern("(MZ)x4", **SHARED, recompute="selective"), id="layers that share a block", marks=LONG
        ),
        pytest.param(
            "4x2",
            {"family": "llama", "num_layers": 8, "num_experts": 4, "experts_top_k": 2, "moe_every": 2},
            id="experts in every second layer",
            marks=LONG,
        ),
    ],
)
def test_gradients_are_those_of_layers_that_gather_for_themselves(mesh, fields, monkeypatch):
    loss, found = differentiated(mesh, fields)
    with monkeypatch.context() as patched:
        for name in (ALONE, ALONE_IN_PATTERN):
            patched.setattr(name, lambda *_: False)
        expected_loss, expected = differentiated(mesh, fields | {"learning_rate": 2e-2})  # a program of its own
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    rounded = "grad_reduce_dtype" in fields
    for (path, own), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(other).max() + 1e-8
        np.testing.assert_allclose(
            own, other, atol=(4e-3 if rounded else 2e-6) * scale, err_msg=jax.tree_util.keystr(path)
        )


@needs_aot
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_computing_waits_less_for_what_crosses_servers_on_h100s(zero, monkeypatch):
    """By half and more, of gathers and gradients that together take less time than what is computed beside them."""
    fields = {"mesh": "16x8", "num_layers": 8, "hidden_size": 4096, "num_heads": 32, "sequence_length": 4096}
    fields |= {"vocab_size": 1024, "attention": "xla", "recompute": "full", "sequence_parallel": True, "zero": zero}
    fields |= {"global_batch_size": 32 if zero == 3 else 16, "microbatch_size": 1, "grad_reduce_dtype": "bfloat16"}
    run, target = tiny(**fields), find_target("h100x8")
    ahead = inspect(run, target).time
    monkeypatch.setattr(ALONE, lambda layers: False)
    alone = inspect(run, target).time
    assert ahead is not None and alone is not None
    assert ahead.exposed_by_axes["data"] < 0.5 * alone.exposed_by_axes["data"]


@pytest.mark.parametrize(("mesh", "times"), [("4x2", 1), ("4x1", 0)])
def test_gradients_are_sent_before_the_next_gather_beside_tensor_parallel_collectives(mesh, times, monkeypatch):
    """In the one backward loop; the parameters' index then waits for all accumulators."""
    waited = []
    monkeypatch.setattr(scan, "after", lambda known, x: waited.append((list(known), x)) or x)
    program = make_train_step(tiny_config(**LAYERS, mesh=mesh), mesh_of(mesh))
    program.lower_step()
    assert len(waited) == times
    for known, index in waited:
        assert known and all(array.shape[0] == LAYERS["num_layers"] for array in known) and index.shape == ()


@pytest.mark.parametrize("mesh", ["4x2", "4x1"])
def test_in_patterns_the_next_gather_waits_for_a_part_of_the_backward_pass_too(mesh, monkeypatch):
    """For the sums of the layer above and the gradient of one matrix, the output's, which comes first."""
    waited, width = [], tiny_config().model.hidden_size
    monkeypatch.setattr(pattern_scan, "after", lambda known, x: waited.append([a.shape for a in known]) or x)
    program = make_train_step(tiny_config(**LAYERS | pattern("(*-)x4"), mesh=mesh), mesh_of(mesh))
    program.lower_step()
    # The last layer's parameters are still there; those of a loop are traced once.
    attention, mlp = (8, 4, width), (4 * width, width)
    assert [shapes[-1] for shapes in waited] == ([mlp, attention] * 2 if mesh == "4x2" else [])
    assert all(shape[0] == 4 for shapes in waited[1:] for shape in shapes[:-1])
