"""A model on a mesh without an optimizer: the same parameters and losses as the run's."""

import jax
import numpy as np
import pytest

from mtjax.models.sharded_model import ShardedModel
from tests.tiny import batch_of, drawn_parameters, mesh_of, program_of, tiny_config


def test_a_placed_model_is_the_one_that_a_run_begins_with():
    program = program_of("2x4", zero=1)
    placed = ShardedModel(tiny_config(zero=1), mesh_of("2x4"), trains=True)
    parameters, expected = drawn_parameters(placed), program.initialize(0).parameters
    jax.tree.map(np.testing.assert_array_equal, parameters, expected)
    for leaf, target, trained in zip(
        *map(jax.tree.leaves, (parameters, placed.restore_target, program.abstract_state.parameters)), strict=True
    ):
        assert leaf.sharding == target.sharding == trained.sharding
        assert (leaf.shape, leaf.dtype) == (target.shape, target.dtype) == (trained.shape, trained.dtype)
    batch = batch_of(program, 0)
    found, wanted = (p.evaluation(parameters, batch)["loss"] for p in (placed, program))
    assert (float(found[0]), float(found[1])) == (float(wanted[0]), float(wanted[1]))


@pytest.mark.parametrize(("zero", "in_parts"), [(2, False), (3, True)])
def test_what_no_run_trains_is_in_parts_with_zero_3_alone(zero, in_parts):
    """Nobody would gather it once a step."""
    placed = ShardedModel(tiny_config(zero=zero), mesh_of("2x4"))
    trained = ShardedModel(tiny_config(zero=zero), mesh_of("2x4"), trains=True)
    assert (placed.parameter_sharding == trained.parameter_sharding) == in_parts
