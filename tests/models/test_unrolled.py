"""Layers without a loop: the numbers are those of the loop, and so are the parameters."""

import jax
import numpy as np
import pytest

from mtjax.config import replace, validate
from mtjax.errors import UserError
from mtjax.theory.mesh import parse_mesh
from mtjax.theory.unrolling import MOST, unrolled_layers
from tests.tiny import program_of, run_steps, tiny_config

SPLIT = {"sequence_parallel": True, "microbatch_size": 2}
LLAMA = {
    "family": "llama",
    "num_kv_heads": 2,
    "position": "rope",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "bias": False,
    "tie_embeddings": False,
}


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("2x4", SPLIT | {"zero": 1}),
        *(
            pytest.param(mesh, fields, marks=pytest.mark.long)
            for mesh, fields in [
                ("1x1", {}),
                ("2x4", SPLIT | {"zero": 3, "recompute": "full", "recompute_num_layers": 2}),
                ("2x2", {"zero": 2, "recompute": "selective"}),
                ("1x1", {"recompute": "full", "recompute_method": "block"}),
                ("2x4", LLAMA | {"zero": 1}),
                ("2x2", {"family": "t5", "position": "relative", "zero": 3}),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_numbers_are_those_of_the_loop(mesh, fields):
    looped, unrolled = (program_of(mesh, **fields, unroll_layers=unroll) for unroll in ("none", "all"))
    (expected_state, expected), (state, found) = (run_steps(program, 2) for program in (looped, unrolled))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5)
    for own, there in zip(*map(jax.tree.leaves, (state.parameters, expected_state.parameters)), strict=True):
        assert own.shape == there.shape and own.sharding == there.sharding
        there = np.asarray(there)  # Adam's steps of gradients that are rounding noise may be any
        assert np.abs(np.asarray(own) - there).mean() < 1e-5 * max(1.0, np.abs(there).max())


@pytest.mark.parametrize(
    ("fields", "mesh", "platform", "most"),
    [
        ({}, "1x1", "cpu", 0),
        ({}, "1x1", "gpu", MOST),
        ({"recompute": "full"}, "1x1", "gpu", 0),
        ({"microbatch_size": 1, "sequence_length": 64}, "1x1", "gpu", 0),
        ({"unroll_layers": "none"}, "1x1", "gpu", 0),
        ({"unroll_layers": "3"}, "1x1", "cpu", 3),
        ({"unroll_layers": "all"}, "1x2x1", "gpu", 0),
        ({"unroll_layers": "all", "family": "t5", "position": "relative", "sequence_parallel": True}, "1x1", "gpu", 0),
    ],
)
def test_auto_goes_by_target_depth_and_what_layers_keep(fields, mesh, platform, most):
    large = {"hidden_size": 1536, "num_heads": 16, "num_layers": 40, "sequence_length": 1024, "microbatch_size": 8}
    run = tiny_config(**large | {"compute_dtype": "bfloat16", "hidden_dropout": 0.0, "attention_dropout": 0.0} | fields)
    assert unrolled_layers(run, parse_mesh(mesh), platform) == most


@pytest.mark.parametrize("value", ["0", "some", "-1", ""])
def test_other_words_are_refused(value):
    with pytest.raises(UserError, match="unroll_layers .*must be auto, all, none or a whole number above 0"):
        validate(replace(tiny_config(), unroll_layers=value))
