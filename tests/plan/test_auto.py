"""`--mesh auto`: every mesh of the devices is weighed, and the fastest that fits is taken."""

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.config import load, replace
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.plan.auto import fastest_mesh
from mtjax.plan.search import Space, search
from tests.tiny import tiny_config

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("name", ["gpt2-8.3b", "gpt2-1.2b"])
def test_it_is_the_one_that_the_search_finds_with_the_runs_own_settings(name):
    config = replace(load(name), vocab_size=50257, microbatch_size=None)
    anatomy, plan = anatomy_of(config.model), Plan.of(config, MeshShape())
    space = Space((plan.recompute,), (plan.zero,), (plan.sequence_parallel,), max_stages=1, chunks=(1,))
    found = search(anatomy, plan, 64, DGX_H100, space).fitting
    whole = [c for c in found if c.plan.microbatches == 1]  # as the run would: all its samples at a time
    mesh = fastest_mesh(config, 64, H100)
    assert mesh == min(whole, key=lambda c: c.order).plan.mesh
    assert mesh.size == 64


def test_what_fits_on_no_mesh_says_what_it_needs():
    config = replace(load("gpt2-8.3b"), vocab_size=50257)
    with pytest.raises(
        UserError, match=r"on 1 x h100 this run needs at least \d+\.\d GiB per GPU \(on mesh 1x1\), and \d"
    ):
        fastest_mesh(config, 1, H100)


def test_ranks_share_long_samples_where_these_are_too_few_for_the_devices():
    config = replace(load("llama3-8b"), vocab_size=128_256, sequence_length=32_768, global_batch_size=1, zero=1)
    mesh = fastest_mesh(config, 8, H100)
    assert (mesh.data, mesh.size) == (1, 8)
    assert mesh.context > 1


@pytest.mark.parametrize(("devices", "mesh"), [(1, "1x1"), (4, "4x1"), (8, "8x1"), (16, "8x2")])
def test_on_devices_that_nothing_is_known_of_data_ways_come_first(devices, mesh):
    assert fastest_mesh(tiny_config(), devices, "cpu") == parse_mesh(mesh)


def test_devices_that_no_mesh_divides_are_an_error():
    with pytest.raises(UserError, match=r"no mesh of 3 devices fits this run \(3x1: global_batch_size 8 .*; 1x3: num_"):
        fastest_mesh(tiny_config(), 3, "cpu")
