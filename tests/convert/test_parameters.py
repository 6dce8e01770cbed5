"""The parameters that a converter lists."""

from mtjax.convert.parameters import parameters_of
from tests.tiny import tiny_config


def test_they_do_not_depend_on_how_a_run_was_spread():
    """A run on stages, its layers in another order and unequal, has the parameters of one device."""
    plain = parameters_of(tiny_config(num_layers=5))
    spread = {"mesh": "2x2x2", "layers_per_stage": (3, 2), "sequence_parallel": True, "zero": 3}
    assert parameters_of(tiny_config(num_layers=5, **spread)) == plain
    assert plain["stack.layers.mlp.up.weight"].num_layers == 5
