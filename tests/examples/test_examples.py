"""The examples for clusters, as far as they can be tried without one: with programs that stand in for the cluster's."""

import json
import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from mtjax import cli
from mtjax.layout.mesh import parse_mesh
from mtjax.sharding.processes import several_expected
from mtjax.train.options import DESCRIPTION, Options

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def parsed(words):
    """The config of a `mtjax train` command."""
    assert words[:2] == ["mtjax", "train"]
    return cli.parse(words[2:], "mtjax train", DESCRIPTION, Options).config


@pytest.fixture
def programs(tmp_path):
    """Adds programs that stand in: each notes its arguments, then does as its text says."""

    def add(name, then=""):
        path = tmp_path / name
        note = f'python3 -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@" >> {tmp_path}/{name}.said'
        path.write_text(f"#!/bin/bash\n{note}\n{then}\n")
        path.chmod(0o755)

    def said(name):
        path = tmp_path / f"{name}.said"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    add.said, add.path = said, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return add


@pytest.mark.parametrize(("code", "again"), [(0, False), (2, False), (75, True), (137, True)])
def test_slurm_puts_the_job_back_unless_it_is_done_or_wrong(programs, code, again):
    programs("srun", f"exit {code}")
    programs("scontrol")
    ended = subprocess.run(["bash", EXAMPLES / "slurm.sh"], env=programs.path | {"SLURM_JOB_ID": "7"})
    assert ended.returncode == code
    assert programs.said("scontrol") == ([["requeue", "7"]] if again else [])
    (words,) = programs.said("srun")
    config = parsed(words[words.index("mtjax") :])
    assert config.output.resume
    asked = dict(word.split("=") for line in batch_lines() for word in line.split() if "=" in word)
    assert parse_mesh(config.parallel.mesh).size == int(asked["--nodes"]) * int(asked["--ntasks-per-node"])


def batch_lines():
    lines = (EXAMPLES / "slurm.sh").read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_slurm_saves_before_the_time_is_up(programs, tmp_path):
    """The batch script gets the signal; `scancel` passes it to the processes, which save and end with code 0."""
    programs("srun", f"touch {tmp_path}/begun; until [ -e {tmp_path}/term ]; do sleep 0.05; done; sleep 0.2; exit 0")
    programs("scancel", f"touch {tmp_path}/term")
    programs("scontrol")
    process = subprocess.Popen(["bash", EXAMPLES / "slurm.sh"], env=programs.path | {"SLURM_JOB_ID": "7"})
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert programs.said("scancel") == [["--signal=TERM", "7"]]
    assert programs.said("scontrol") == [["requeue", "7"]]
    assert any("--signal=B:TERM@" in line for line in batch_lines())


def test_jobset_starts_as_many_processes_as_the_run_has():
    jobset = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    config = parsed([word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in words])
    assert spec["completions"] == spec["parallelism"] == config.parallel.num_processes
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert parse_mesh(config.parallel.mesh).size == spec["completions"] * gpus
    host, port = config.parallel.coordinator.split(":")
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(port) in [p["containerPort"] for p in container["ports"]]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_the_job_in_the_jobset_is_one_to_kubernetes():
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    jobset = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    template = jobset["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": template["spec"]}
    validator.validate(job, validator.latest_version(), strict=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_gives_each_node_its_place(programs, rank):
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    programs("mtjax")
    nodes, gpus = task["num_nodes"], int(task["resources"]["accelerators"].partition(":")[2])
    given = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NODE_RANK": rank, "NUM_NODES": nodes, "NUM_GPUS_PER_NODE": gpus}
    environment = programs.path | {f"SKYPILOT_{name}": str(value) for name, value in given.items()}
    subprocess.run(["bash", "-c", task["run"]], env=environment, check=True)
    (words,) = programs.said("mtjax")
    config = parsed(["mtjax", *words])
    parallel = config.parallel
    assert (parallel.coordinator, parallel.num_processes, parallel.process_id) == ("10.0.0.1:12345", nodes, rank)
    assert parse_mesh(parallel.mesh).size == nodes * gpus
    assert several_expected(parallel, {})
    assert task["setup"].strip() == "pip install '.[cuda]'"


def test_the_container_copies_what_the_wheel_is_built_from():
    lines = [line.split() for line in (EXAMPLES / "Containerfile").read_text().splitlines() if line]
    copied = {word for line in lines if line[0] == "COPY" for word in line[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied >= needed | set(wheel["packages"]) | set(wheel["force-include"])
    (install,) = [line for line in lines if line[0] == "RUN"]
    extras = install[-1].strip("'").removeprefix(".[").removesuffix("]").split(",")
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    assert ["ENTRYPOINT", '["mtjax"]'] in lines
