"""Layers without a loop: the numbers are those of the loop, and so are the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh
from mtjax.models.recompute_in_order import _token_of
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
EXPERTS = LLAMA | {"num_experts": 4}


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("4x1", LLAMA | {"zero": 3, "recompute": "selective", "attention": "blocks"}),
        pytest.param("2x2", SPLIT | {"zero": 3, "recompute": "full"}, marks=pytest.mark.long),
        *(
            pytest.param(mesh, fields, marks=pytest.mark.long)
            for mesh, fields in [
                ("1x1", {"compute_dtype": "bfloat16"}),
                ("1x1", {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1}),
                ("4x1", {"zero": 3, "microbatch_size": 1, "attention_dropout": 0.1}),
                ("data=2,expert=2", EXPERTS | {"zero": 3, "recompute": "full", "expert_dispatch": "all-to-all"}),
                ("2x2", EXPERTS | {"recompute": "selective", "attention": "blocks", "lora_rank": 4}),
            ]
        ),
        *(
            pytest.param(mesh, fields, marks=pytest.mark.exhaustive)
            for mesh, fields in [
                ("2x4", SPLIT | {"zero": 1}),
                ("4x1", LLAMA | {"recompute": "full", "zero": 1, "microbatch_size": 1}),
                ("2x2", SPLIT | {"zero": 3}),
                ("2x1", LLAMA | {"zero": 3, "lora_rank": 4}),
                ("data=2,expert=2", EXPERTS | {"zero": 1, "microbatch_size": 2, "router_bias": True}),
                ("data=1,expert=2,model=2", EXPERTS | SPLIT | {"zero": 3, "capacity_factor": 1.0}),
                ("2x2", LLAMA | {"zero": 2}),
                ("2x1", LLAMA | {"zero": 3, "compute_dtype": "bfloat16", "num_kv_heads": 4, "qk_norm": True}),
                ("2x2", {"family": "bert", "norm_placement": "post"}),
                ("2x2", LLAMA | {"zero": 1, "microbatch_size": 2, "lora_rank": 4, "lora_dropout": 0.1}),
                ("2x4", {"recompute": "full", "attention_dropout": 0.1}),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_numbers_are_those_of_the_loop(mesh, fields):
    looped, unrolled = (program_of(mesh, **fields, unroll_layers=unroll) for unroll in (False, True))
    (expected_state, expected), (state, found) = (run_steps(program, 2) for program in (looped, unrolled))
    for name in ("loss", "grad_norm"):
        rtol = 1e-2 if "compute_dtype" in fields else 1e-5
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=rtol)
    for own, there in zip(*map(jax.tree.leaves, (state.parameters, expected_state.parameters)), strict=True):
        assert own.shape == there.shape and own.sharding == there.sharding
        there = np.asarray(there)  # Adam's steps of gradients that are rounding noise may be any
        if "compute_dtype" not in fields:
            assert np.abs(np.asarray(own) - there).mean() < 1e-5 * max(1.0, np.abs(there).max())


def test_a_recomputed_layer_waits_for_all_matrices_of_the_layers_above_beside_many_experts():
    """A router and vectors may be reduced later; attention's matrices are small beside those of 64 experts together."""
    shapes = {
        "experts": (64, 128, 2, 96),
        "query": (128, 4, 32),
        "shared": (128, 2, 48),
        "router": (64, 10),
        "scale": (128,),
        "bias": (3, 4, 32),
    }
    gradients = {name: jnp.full(shape, 2.0**n) for n, (name, shape) in enumerate(shapes.items())}
    token = _token_of((gradients, jnp.zeros((), jnp.int32)), jnp.zeros(1))
    assert token == 1 + 2 + 4


def test_its_program_has_no_loop_over_layers():
    """Of one microbatch and a loss in one chunk: no loop at all, and as many layers as the model has."""

    def loops(unroll: bool) -> int:
        program = program_of("1x1", hidden_dropout=0.0, attention_dropout=0.0, unroll_layers=unroll, num_layers=3)
        text = program.lower_step().as_text()
        return text.count("stablehlo.while")

    assert loops(True) < loops(False)


@pytest.mark.parametrize(
    ("fields", "mesh", "what"),
    [
        ({"recompute": "full", "recompute_num_layers": 2}, "1x1", "does not support recompute_num_layers 2"),
        ({"recompute": "full", "recompute_offload": True}, "1x1", "does not support recompute_offload"),
        ({"recompute": "selective"}, "1x1", "holds no scores of all queries"),
        ({"microbatch_size": 1}, "1x2x1", "has 2 stages"),
        ({"family": "t5", "position": "relative"}, "1x1", "t5 has several"),
    ],
    ids=["groups", "offload", "selective", "stages", "T5"],
)
def test_what_it_does_not_go_with_is_said(fields, mesh, what):
    with pytest.raises(UserError, match=what):
        check_config(tiny_config(unroll_layers=True, **fields), parse_mesh(mesh))
