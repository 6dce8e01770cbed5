"""Where layers are unrolled if nothing asks for it."""

import pytest

from mtjax import config
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import MOST_UNROLLED, Plan
from mtjax.layout.stacks import FEWEST_PREFETCHED
from tests.tiny import program_of, tiny_config

EXPERTS = {"family": "llama", "num_experts": 4}


@pytest.mark.parametrize(
    ("fields", "mesh", "expected"),
    [
        ({}, "2x2", True),
        ({"zero": 3, "recompute": "selective", "attention_dropout": 0.0, "attention": "blocks"}, "4x1", True),
        ({"unroll_layers": False}, "2x2", False),
        ({"recompute": "full"}, "2x2", False),
        ({"recompute": "selective"}, "2x2", False),
        ({"microbatch_size": 2}, "1x2x1", False),
        (EXPERTS, "1x1", False),
        ({"family": "t5"}, "1x1", False),
        ({"family": "hybrid", "layer_pattern": "MM"}, "1x1", False),
        ({"family": "llama", "fp8": "delayed"}, "1x1", False),
        ({"rampup_batch_size": (4, 4, 100)}, "1x1", False),
        ({"zero": 3, "global_batch_size": 16}, "8x1", True),
        # prefetched in the loop, over links between servers, if that has four layers
        ({"zero": 3, "global_batch_size": 16, "num_layers": FEWEST_PREFETCHED}, "16x1", False),
        ({"zero": 3, "global_batch_size": 16, "num_layers": FEWEST_PREFETCHED - 1}, "16x1", True),
        ({"global_batch_size": 32, "microbatch_size": 1}, "16x1", True),  # reduced after the last microbatch
        ({"num_layers": MOST_UNROLLED + 1}, "1x1", False),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) if isinstance(value, dict) else str(value),
)
def test_layers_are_unrolled_on_gpus_where_that_is_possible(fields, mesh, expected):
    run = tiny_config(mesh=mesh, **fields)
    plan = Plan.of(run, parse_mesh(mesh))
    assert plan.unrolled is expected
    assert plan.unrolls(run, on_gpus=False) is False


def test_a_program_for_cpus_has_a_loop_and_says_so_in_its_config():
    assert program_of("1x1").config.training.unroll_layers is False
    assert config.Config().training.unroll_layers is None


PATTERN = {"family": "hybrid", "layer_pattern": "*-*-", "num_layers": 4}
BLOCK = {"num_layers": 8, "recompute": "full", "recompute_method": "block", "zero": 3}


@pytest.mark.parametrize(
    ("fields", "mesh", "expected"),
    [
        (PATTERN, "2x1", True),
        (PATTERN, "data=1,context=2", True),
        (PATTERN, "1x2", False),  # no communication to overlap
        ({**PATTERN, "zero": 3}, "1x1", False),
        ({**BLOCK, "recompute_num_layers": 8}, "2x1", True),  # of all layers: one loop
        ({**BLOCK, "recompute_num_layers": 7}, "2x1", False),
        ({**BLOCK, **PATTERN, "recompute_num_layers": 4}, "2x1", False),
    ],
    ids=str,
)
def test_layers_are_prefetched_where_one_loop_has_communication(fields, mesh, expected):
    run = tiny_config(mesh=mesh, **fields)
    assert Plan.of(run, parse_mesh(mesh), unrolled=False).prefetches(run.model) is expected
