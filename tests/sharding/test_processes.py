"""Who started this process, and what is refused before jax's coordination service starts."""

import socket

import pytest

from mtjax.config import Parallel
from mtjax.errors import UserError
from mtjax.sharding import processes
from mtjax.sharding.launchers import check_library, find_launch
from mtjax.sharding.processes import local_devices, parse_address, start_processes

SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
TORCHRUN = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8"}
JAX = {"JAX_COORDINATOR_ADDRESS": "gpu1:12345", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}


def found(environment, **options):
    launch = find_launch(Parallel(**options), environment)
    return launch and (launch.source.partition(" (")[0], launch.count, launch.process, launch.coordinator)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),  # a batch script, without srun
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}, None),  # exported for another program
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"JAX_NUM_PROCESSES": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (SLURM, ("Slurm", 8, 3, None)),
        (OPEN_MPI, ("Open MPI", 4, 1, None)),
        ({"PMI_SIZE": "2"}, ("MPI", 2, None, None)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, ("Kubernetes", -1, None, None)),
        (TORCHRUN, ("torchrun's environment", 8, 3, "gpu1:29500")),
        (TORCHRUN | AGENT, ("torchrun's environment", 8, 3, "gpu1:29501")),  # the agent listens at 29500
        (TORCHRUN | AGENT | {"JAX_COORDINATOR_PORT": "7000"}, ("torchrun's environment", 8, 3, "gpu1:7000")),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, ("torchrun's environment", 8, 3, "[fe80::1]:29500")),
        (JAX, ("JAX's environment", 8, 3, "gpu1:12345")),
        # Several say the same: the first of the order is used.
        (JAX | TORCHRUN | SLURM, ("JAX's environment", 8, 3, "gpu1:12345")),
        (TORCHRUN | SLURM, ("torchrun's environment", 8, 3, "gpu1:29500")),
        # One launcher inside another: torchrun in each of 8 tasks, mpirun over 4 of Slurm's.
        (TORCHRUN | AGENT | SLURM | {"WORLD_SIZE": "64", "RANK": "60"},
         ("torchrun's environment", 64, 60, "gpu1:29501")),
        (SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "16"}, ("Open MPI", 16, 1, None)),
        # torchrun numbers its processes as they arrive.
        (TORCHRUN | AGENT | SLURM | {"RANK": "5"}, ("torchrun's environment", 8, 5, "gpu1:29501")),
        # The launcher completes what a job script has exported for all processes alike.
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "gpu1:12345"}, ("Slurm", 8, 3, "gpu1:12345")),
        (SLURM | {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "WORLD_SIZE": "8"},
         ("torchrun's environment", 8, 3, "gpu1:29500")),
    ],
)  # fmt: skip
def test_who_started_the_processes_is_read_from_the_environment(environment, launch):
    assert found(environment) == launch


def test_the_command_line_comes_first():
    options = {"coordinator": "gpu2:1", "num_processes": 8, "process_id": 3}
    assert found(JAX | TORCHRUN | SLURM, **options) == ("the command line", 8, 3, "gpu2:1")


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (
            JAX | {"JAX_NUM_PROCESSES": "4"} | TORCHRUN,
            {},
            "JAX_NUM_PROCESSES.* 4 processes, and by .*WORLD_SIZE.* 8: make",
        ),
        (JAX | {"JAX_PROCESS_ID": "4"} | TORCHRUN, {}, "JAX_PROCESS_ID.* process 4, and by .*WORLD_SIZE.* 3: make"),
        (JAX | {"JAX_NUM_PROCESSES": "4"} | SLURM, {}, "JAX_NUM_PROCESSES.* 4 processes, and by Slurm .* 8: make"),
        (TORCHRUN | SLURM | {"RANK": "0"}, {}, "RANK.* process 0, and by Slurm .* 3: make"),
        (SLURM | OPEN_MPI, {}, "Open MPI .* 4 processes, and by Slurm .* 8: make"),
        (SLURM | {"SLURM_NTASKS": "16"}, {}, "SLURM_STEP_NUM_TASKS is 8 and SLURM_NTASKS is 16"),
        (
            JAX,
            {"coordinator": "h:1", "num_processes": 2, "process_id": 0},
            "--num-processes.* 2 processes, and by JAX's",
        ),
        # in part
        ({"WORLD_SIZE": "2", "RANK": "1"}, {}, "has RANK, WORLD_SIZE, but not MASTER_ADDR or MASTER_PORT"),
        ({"RANK": "1"}, {}, "has RANK, but not MASTER_ADDR"),
        ({"JAX_NUM_PROCESSES": "2"}, {}, "has JAX_NUM_PROCESSES, but not JAX_COORDINATOR_ADDRESS or JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, "but not JAX_NUM_PROCESSES or JAX_PROCESS_ID"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, {}, "SLURM_STEP_NUM_TASKS=2, but not SLURM_JOB_ID"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "OMPI_COMM_WORLD_SIZE=2, but not OMPI_COMM_WORLD_RANK"),
        # impossible
        (TORCHRUN | {"RANK": "8"}, {}, "process 8 of 8: processes count from 0"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, {}, "WORLD_SIZE is 'two', and should be an integer of at least 1"),
        ({}, {"coordinator": "localhost:1"}, "set all three"),
        ({}, {"coordinator": "localhost:1", "num_processes": 2}, "set all three"),
        ({}, {"num_processes": 2, "process_id": 0}, "set all three"),
        ({}, {"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "--process-id 2 is not one of"),
    ],
)
def test_contradictions_and_gaps_are_refused_by_name(environment, options, message):
    with pytest.raises(UserError, match=message):
        start_processes(Parallel(**options), environment)


@pytest.mark.parametrize(
    ("environment", "library"),
    [
        ({"PMI_SIZE": "2"}, "mpi4py"),
        (OPEN_MPI, "mpi4py"),  # Open MPI 5 does not say where its first process is
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "kubernetes"),
    ],
)
def test_a_missing_library_of_a_launcher_is_named(environment, library, monkeypatch):
    monkeypatch.setattr("mtjax.sharding.launchers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {library}"):
        start_processes(Parallel(), environment)
    check_library(find_launch(Parallel(), OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}))


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}, [0]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "3"}, [0]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,5"}, [1]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, [0, 1]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, [0, 1]),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, [1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
         [1]),
    ],
)  # fmt: skip
def test_one_process_per_host_takes_all_its_gpus_and_each_of_several_its_own(environment, devices):
    assert local_devices(environment) == devices


def test_more_processes_on_a_host_than_gpus():
    with pytest.raises(UserError, match=r"torchrun started process 2 .*which has 2 GPUs"):
        local_devices({"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("address", "place"), [("gpu1:12345", ("gpu1", 12345)), ("[fe80::1]:80", ("fe80::1", 80)), ("[::]:1", ("::", 1))]
)
def test_an_address_has_a_host_and_a_port(address, place):
    assert parse_address(address, "--coordinator") == place


@pytest.mark.parametrize("address", ["localhost", ":12345", "::1:12345", "localhost:0", "localhost:99999", "h:http"])
def test_an_address_without_a_host_or_a_port_is_refused(address):
    with pytest.raises(UserError, match=f"--coordinator gives the address '{address}'"):
        start_processes(Parallel(coordinator=address, num_processes=2, process_id=0), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_refused_before_jax_ends_the_process(host):
    with socket.socket() as holder:
        holder.bind((host, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"can't listen at port {port} .*another program listens there"):
            start_processes(Parallel(coordinator=f"localhost:{port}", num_processes=2, process_id=0), {})
        with pytest.raises(UserError, match=f"can't listen at port {port}"):
            environment = TORCHRUN | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0"}
            start_processes(Parallel(), environment)


def test_a_host_without_an_address_is_waited_for_and_then_refused(monkeypatch, capsys):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(processes, "NAME_TIMEOUT", 0)
    monkeypatch.setattr(processes, "_check_port", lambda *_: None)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="nowhere:12345 has no address here after 0 s"):
        start_processes(Parallel(coordinator="nowhere:12345", num_processes=2, process_id=0), {})


def test_alone_without_a_launcher():
    assert start_processes(Parallel(), {}) == 1
