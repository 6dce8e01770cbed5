import pytest

from mtjax.sharding.mesh import MAX_CPU_DEVICES
from mtjax.train.local import processes_needed
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("mesh", "count"), [("2x4", 1), ("32x8", 1), ("64x8", 2), ("96x8", 3), ("257x1", 257), ("1x300", 2)]
)
def test_no_process_has_more_cpu_devices_than_xla_runs(mesh, count):
    assert processes_needed(tiny_config(mesh=mesh), {}) == count
    data, model = map(int, mesh.split("x"))
    assert data * model // count <= MAX_CPU_DEVICES


def test_a_process_that_was_started_starts_none():
    assert processes_needed(tiny_config(mesh="64x8", coordinator="h:1", num_processes=2, process_id=0), {}) == 1
    assert processes_needed(tiny_config(mesh="64x8"), {"SLURM_STEP_NUM_TASKS": "8"}) == 1
