import pytest

from mtjax.config import Parallel
from mtjax.errors import UserError
from mtjax.sharding.processes import detect_launcher, local_devices, start_processes


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ("", 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, ("", 1)),  # a batch script, without srun
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, ("Slurm", 8)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, ("", 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("Open MPI", 4)),
        ({"PMI_SIZE": "2"}, ("MPI", 2)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("", 1)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, ("Kubernetes", -1)),
    ],
)
def test_launcher_is_detected_from_its_environment(environment, found):
    assert detect_launcher(environment) == found


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}, [0]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, [0, 1]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
    ],
)
def test_one_process_per_host_takes_all_its_gpus(environment, devices):
    assert local_devices(environment) == devices


@pytest.mark.parametrize(
    "options",
    [
        {"coordinator": "localhost:1"},
        {"coordinator": "localhost:1", "num_processes": 2},
        {"num_processes": 2, "process_id": 0},
    ],
)
def test_options_go_together(options):
    with pytest.raises(UserError, match="give all three"):
        start_processes(Parallel(**options))


def test_process_id_is_one_of_them():
    with pytest.raises(UserError, match="process-id 2 is not one of --num-processes 2"):
        start_processes(Parallel(coordinator="localhost:1", num_processes=2, process_id=2))


def test_alone_without_a_launcher():
    assert start_processes(Parallel(), {}) == 1
