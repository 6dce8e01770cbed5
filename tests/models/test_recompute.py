"""What the layers keep for their backward pass, read off the traced step; the numbers stay those of one device."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mtjax.analysis import memory
from mtjax.analysis.anatomy import anatomy_of
from mtjax.config import replace, validate
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.models.layer_loop import LayerLoopSettings, choose_loop
from mtjax.models.recompute_methods import LAYER_INPUT
from mtjax.sharding.param_comm import LayerInputs
from tests.tiny import num_carried, program_of, run_steps, tiny_config

LAYERS = 4


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every operation of a program and of the programs inside, outermost first."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def kept_stacks(mesh: str = "1x1", **fields: Any) -> list[tuple[int, Counter]]:
    """Turns of every loop over layers of the forward pass, and what each turn leaves for the backward pass.

    That is a count of (type, elements), by what a loop stacks.
    """
    program = program_of(mesh, num_layers=LAYERS, compute_dtype="bfloat16", **fields)
    with jax.set_mesh(program.mesh):
        traced = jax.make_jaxpr(program._step)(program.abstract_state, program.abstract_batch())
    found = []
    for eqn in (e for e in equations(traced.jaxpr) if e.primitive.name == "scan"):
        carried = num_carried(eqn)
        stacks, carries = eqn.outvars[carried:], [v.aval.dtype for v in eqn.outvars[:carried]]
        if carries[:1] == [np.dtype("bfloat16")] and stacks and not eqn.params["reverse"]:
            kept = Counter((str(v.aval.dtype), v.aval.size // eqn.params["length"]) for v in stacks)
            found.append((eqn.params["length"], kept))
    return found


def sizes_of() -> tuple[int, int, int]:
    """s b h, s b f and a s^2 b of the tiny model."""
    config = tiny_config()
    model, b = config.model, config.training.global_batch_size
    tokens = model.sequence_length * b
    return tokens * model.hidden_size, tokens * 4 * model.hidden_size, model.num_heads * model.sequence_length * tokens


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_products_and_masks_are_kept_and_nothing_else(recompute):
    sbh, sbf, core = sizes_of()
    ((turns, kept),) = kept_stacks(recompute=recompute)
    expected = Counter(
        {
            ("bfloat16", sbh): 3,  # the layer's input, attention's output before and after its projection
            ("bfloat16", 3 * sbh): 1,  # query, key and value
            ("bfloat16", sbf): 1,
            ("bool", sbh): 2,
        }
    )
    if recompute == "none":
        expected += Counter({("float32", core): 1, ("bool", core): 1})
    large = Counter({k: n for k, n in kept.items() if k[1] > 64})
    assert turns == LAYERS and large == expected
    model = anatomy_of(tiny_config(num_layers=LAYERS).model)
    by_formula = memory.stage_memory(model, Plan(MeshShape(), 8, 8, recompute=recompute)).kept
    width = {"bfloat16": 2, "float32": 4, "bool": 1}
    assert by_formula == LAYERS * sum(width[dtype] * size * n for (dtype, size), n in large.items())


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 1)])
def test_selective_recompute_computes_the_scores_again_and_no_other_product(recompute, again):
    program = program_of("1x1", num_layers=LAYERS, compute_dtype="bfloat16", recompute=recompute)
    with jax.set_mesh(program.mesh):
        traced = jax.make_jaxpr(program._step)(program.abstract_state, program.abstract_batch())
    batched = [
        bool(eqn.params["dimension_numbers"][1][0])
        for eqn in equations(traced.jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    # Each once forward, twice backward: scores and context; four with weights. The loss: forward, again, two backward.
    assert sum(batched) == 6 + again
    assert len(batched) - sum(batched) == 3 * 4 + 4


def test_full_recompute_keeps_layer_inputs():
    sbh, _, _ = sizes_of()
    ((turns, kept),) = kept_stacks(recompute="full")
    assert turns == LAYERS
    assert Counter({k: n for k, n in kept.items() if k[1] > 64}) == Counter({("bfloat16", sbh): 1})


def test_uniform_groups_keep_one_input_each():
    sbh, _, _ = sizes_of()
    groups = [kept for turns, kept in kept_stacks(recompute="full", recompute_num_layers=2) if turns == LAYERS // 2]
    inputs = Counter({("bfloat16", sbh): 1})
    assert inputs in [Counter({k: n for k, n in kept.items() if k[1] > 64}) for kept in groups]


def test_block_recomputes_the_first_layers_alone():
    sbh, sbf, _ = sizes_of()
    (first, some), (rest, more) = kept_stacks(recompute="full", recompute_method="block", recompute_num_layers=1)
    assert (first, rest) == (1, LAYERS - 1)
    assert Counter({k: n for k, n in some.items() if k[1] > 64}) == Counter({("bfloat16", sbh): 1})
    assert more["bfloat16", sbf] == 1 and more["bfloat16", 3 * sbh] == 1
    stack = jax.tree.leaves(program_of("1x1", num_layers=LAYERS).abstract_parameters)
    assert not {("float32", leaf.size // LAYERS) for leaf in stack if leaf.size // LAYERS > 1024} & set(more)


@pytest.mark.parametrize(
    ("settings", "is_part", "inputs"),
    [
        ({}, False, 1),
        ({}, True, 1),
        ({"unquantized": (1, 1)}, False, 3),
        ({"recompute_num_layers": 2}, True, 1),
        ({"recompute_method": "block"}, True, 1),
    ],
)
def test_offload_names_the_hidden_states_and_no_parameters(
    settings: dict[str, Any], is_part: bool, inputs: int
) -> None:
    """Loops that add up gradients carry all layers' parameters beside the hidden states."""
    x, weights = np.ones((3, 5), np.float32), np.ones((LAYERS, 5, 5), np.float32)
    loop_settings = LayerLoopSettings("full", **settings, recompute_offload=True)

    def loss(x: Any, weights: Any) -> Any:
        layers = LayerInputs(weights, jax.numpy.arange(LAYERS))
        run = lambda x, inputs: (jax.numpy.tanh(x @ inputs.parameters), None)  # noqa: E731
        first = jax.numpy.int32(0) if is_part else None
        return choose_loop(run, layers, loop_settings, first)(x)[0].sum()

    named = [
        eqn.outvars[0].aval.shape
        for eqn in equations(jax.make_jaxpr(loss)(x, weights).jaxpr)
        if eqn.primitive.name == "name" and eqn.params["name"] == LAYER_INPUT
    ]
    assert named == [x.shape] * inputs


KINDS = [
    {"recompute": "selective"},
    {"recompute": "full", "recompute_num_layers": 2},
    {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 3},
]


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        *KINDS,
        pytest.param(KINDS[1] | {"microbatch_size": 1}, marks=pytest.mark.exhaustive),
        pytest.param(KINDS[2] | {"microbatch_size": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda f: "-".join(map(str, f.values())),
)
def test_every_kind_trains_as_one_device_does(fields):
    expected_state, expected = run_steps(program_of("1x1", num_layers=LAYERS), 3)
    state, losses = run_steps(program_of("2x4", num_layers=LAYERS, **fields), 3)
    np.testing.assert_allclose([m["loss"] for m in losses], [m["loss"] for m in expected], rtol=1e-5)
    for found, there in zip(*map(jax.tree.leaves, (state.parameters, expected_state.parameters)), strict=True):
        # Adam divides by the root of the square: elements whose gradient is rounding noise may take any step.
        there = np.asarray(there)
        assert np.abs(np.asarray(found) - there).mean() < 1e-5 * max(1.0, np.abs(there).max())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recompute": "full", "recompute_num_layers": 5}, "24 is not a multiple of recompute_num_layers 5"),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 25}, "25 is above num_layers 24"),
        (
            {"family": "t5", "num_decoder_layers": 3, "recompute": "full", "recompute_num_layers": 2},
            "num_decoder_layers 3 is not a multiple of recompute_num_layers 2",
        ),
        ({"recompute_num_layers": 0}, "at least 1"),
        ({"recompute_offload": True}, "recompute is none: use --recompute full"),
    ],
)
def test_what_cannot_be_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        validate(replace(tiny_config(num_layers=24), **fields))


def test_offload_needs_a_gpu():
    with pytest.raises(UserError, match="the mesh consists of CPUs"):
        program_of("1x1", recompute="full", recompute_offload=True)
