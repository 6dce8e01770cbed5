import os
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from mtjax.errors import UserError
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime import devices
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.axes import make_mesh
from tests.tiny import mesh_of


def test_model_is_the_fastest_axis_and_all_are_explicit():
    mesh = mesh_of("2x4")
    assert [d.id for d in mesh.devices[0]] == [0, 1, 2, 3]
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_too_few_devices_offers_inspect():
    with pytest.raises(UserError, match=r"needs 64 devices, and there are 8 .*mtjax inspect --mesh 8x8"):
        attach_devices(parse_mesh("8x8"))


def test_places_must_divide_over_processes():
    with pytest.raises(UserError, match="8 devices, which is not a multiple of 3 processes"):
        attach_devices(parse_mesh("2x4"), num_processes=3)


def test_devices_have_threads_for_all_of_their_collectives(monkeypatch):
    """With a thread a device a pipeline's step stands still in every third run or so, and XLA ends the process."""
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    for mesh, threads in (("1x1", None), ("2x4", "32"), ("2x2x2", "32"), ("data=2,expert=2,model=1", "16")):
        monkeypatch.delenv("NPROC", raising=False)
        attach_devices(parse_mesh(mesh))
        assert os.environ.get("NPROC") == threads


@pytest.mark.parametrize(("platforms", "threads"), [("cpu", "32"), ("", None)])
def test_on_a_machine_with_gpus_only_cpus_that_were_asked_for_get_threads(platforms, threads, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.delenv("NPROC", raising=False)
    attach_devices(parse_mesh("2x4"))
    assert os.environ.get("NPROC") == threads


@pytest.mark.parametrize(("visible", "threads"), [("", "32"), ("-1", "32"), ("0", None)])
def test_a_machine_whose_gpus_are_hidden_has_cpus(visible, threads, monkeypatch):
    """Without their threads, collectives of the virtual devices may wait for each other forever."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("NPROC", raising=False)
    attach_devices(parse_mesh("2x4"))
    assert os.environ.get("NPROC") == threads


def test_axes_of_one_way_are_left_out_but_data_and_model():
    assert make_mesh(parse_mesh("stage=1,context=1,model=4"), jax.devices()).shape == {"data": 1, "model": 4}
