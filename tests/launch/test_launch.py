"""What is checked before anything starts, and what a restart changes."""

from pathlib import Path

import pytest

from mtjax.commands.launch import main
from mtjax.errors import LOST, UserError
from mtjax.launch import run
from mtjax.launch.devices import mesh_within, working_gpus
from mtjax.launch.run import launch, reason
from mtjax.runtime.processes.local import Ended
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--restarts", "3"], "the options of mtjax train go after `--`"),
        (["--restarts", "-1", "--", "--mesh", "2x4"], "restarts is -1, and must be 0 or more"),
        (["--processes", "65", "--", "--mesh", "65x1"], "65 processes are too many for one machine: at most 64"),
        (
            ["--processes", "3", "--", "--mesh", "2x4"],
            "mesh 2x4 has 8 devices, which is not divisible by --processes 3",
        ),
        (["--", "--mesh", "1024x1024", "--global-batch-size", "1024"], "which up to 64 processes .* can't provide"),
        (["--processes", "1", "--", "--mesh", "128x4", "--global-batch-size", "128"], "use --processes 2 or more"),
        (["--", "--mesh", "2x3"], "is not divisible by the tensor parallel degree 3"),
        (
            ["--", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "0"],
            "remove --coordinator, --num-processes",
        ),
        (["--", "--hiden-size", "64"], "no option is called --hiden-size - did you mean '--hidden-size'"),
    ],
)
def test_wrong_input_starts_nothing(words, message, monkeypatch, tmp_path, capsys):
    def never(*_):
        raise AssertionError("something was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run_members", never)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    with pytest.raises(UserError, match=message):
        raise UserError(line)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What was started, by attempts that end as `ends` says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LONGEST_PAUSE", 0.0)
    attempts, ends = [], []

    def members(these, peer_timeout):
        attempts.append(these)
        return ends[len(attempts) - 1]

    monkeypatch.setattr(run, "run_members", members)
    return attempts, ends


def options_of(member):
    words = list(member.arguments)
    return {word: words[i + 1] if i + 1 < len(words) else "" for i, word in enumerate(words) if word.startswith("--")}


def test_a_failure_is_resumed_in_the_same_folder_with_the_devices_that_are_left(started, capsys):
    attempts, ends = started
    ends += [Ended([-9, LOST, LOST, LOST], False), Ended([1, LOST], False), Ended([0, 0], False)]
    gpus = iter([["0", "1", "2", "3"]] + [["0", "2", "3"]] * 2)
    config = tiny_config(mesh="4x1")
    assert launch(["--mesh", "4x1"], config, "tiny", None, 2, {}, gpus=lambda: next(gpus)) == 0
    assert [len(members) for members in attempts] == [4, 2, 2]  # three ways don't divide a batch of 8
    for number, members in enumerate(attempts):
        options = options_of(members[0])
        assert options["--out"] == "runs/tiny-1"
        assert options["--mesh"] == ("2x1" if number else "4x1")
        assert ("--resume" in options) == (number > 0)
    assert [member.environment["CUDA_VISIBLE_DEVICES"] for member in attempts[0]] == ["0", "1", "2", "3"]
    assert [member.environment["CUDA_VISIBLE_DEVICES"] for member in attempts[1]] == ["0", "2"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "launch: process 0 was killed by SIGKILL; restart 1 of 2 in 0 s"
    assert second == "launch: process 0 ended with code 1; restart 2 of 2 in 0 s"


@pytest.mark.parametrize(
    ("end", "code"),
    [(Ended([0], False), 0), (Ended([2], False), 2), (Ended([1], True), 1), (Ended([-9], False), 137)],
)
def test_what_is_not_started_again(started, end, code):
    """What is done, wrong or asked to stop, and what failed once too often."""
    attempts, ends = started
    ends += [end]
    restarts = 0 if code == 137 else 5
    assert launch([], tiny_config(), "tiny", None, restarts, {}, gpus=lambda: None) == code
    assert len(attempts) == 1


def test_several_processes_share_the_gpus(started):
    attempts, ends = started
    ends += [Ended([0, 0], False)]
    names = [str(i) for i in range(8)]
    assert launch([], tiny_config(mesh="2x2"), "tiny", 2, 0, {}, gpus=lambda: names) == 0
    assert [member.environment["CUDA_VISIBLE_DEVICES"] for member in attempts[0]] == ["0,1", "2,3"]
    with pytest.raises(UserError, match="mesh 2x2 needs 4 devices, and this machine has 3 working GPUs"):
        launch([], tiny_config(mesh="2x2"), "tiny", 2, 0, {}, gpus=lambda: names[:3])


def test_a_mesh_of_the_planners_choice_takes_all_gpus_there_are(started):
    attempts, ends = started
    ends += [Ended([1] * 8, False), Ended([0] * 6, False)]
    gpus = iter([[str(i) for i in range(8)], [str(i) for i in range(6)]])
    assert launch([], tiny_config(mesh="auto"), "tiny", None, 1, {}, gpus=lambda: next(gpus)) == 0
    assert [len(members) for members in attempts] == [8, 6]
    assert options_of(attempts[1][5])["--mesh"] == "auto"
    ends += [Ended([0, 0], False)]
    assert launch([], tiny_config(mesh="auto"), "tiny", 2, 0, {}, gpus=lambda: None) == 0
    assert len(attempts[2]) == 2


def test_who_was_killed_is_the_reason_and_not_who_followed():
    assert reason(Ended([LOST, LOST, -11], False)) == "process 2 was killed by SIGSEGV"
    assert reason(Ended([0, 1, LOST], False)) == "process 1 ended with code 1"


@pytest.mark.parametrize(("count", "mesh"), [(9, "4x2"), (8, "4x2"), (7, "2x2"), (4, "2x2"), (3, "1x2"), (2, "1x2")])
def test_fewer_devices_give_up_data_ways(count, mesh):
    assert str(mesh_within(tiny_config(mesh="4x2"), count)) == mesh


def test_no_mesh_for_too_few_devices():
    with pytest.raises(
        UserError, match=r"mesh 4x2 needs 8 devices, and there are 1; no mesh with a smaller data parallel degree"
    ):
        mesh_within(tiny_config(mesh="4x2"), 1)


def test_a_gpu_that_does_not_answer_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 0\necho Unable to determine the device handle for GPU1: Unknown Error\necho 2\n"
    )
    program.chmod(0o755)
    assert working_gpus({"PATH": str(tmp_path)}) == ["0", "2"]
    assert working_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1,2"}) == ["2"]
    assert working_gpus({"PATH": "", "CUDA_VISIBLE_DEVICES": "1,2"}) == ["1", "2"]
    # CUDA ends its list at the first name that is not a device's.
    assert working_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "2, 0,-1,1"}) == ["2", "0"]
    for hidden in ("", "-1", "NoDevFiles"):
        assert working_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": hidden}) is None
    assert working_gpus({"PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}) is None
    monkeypatch.setattr(Path, "glob", lambda *_: iter([]))
    assert working_gpus({"PATH": str(tmp_path)}) is None
