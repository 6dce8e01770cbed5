"""The command: exit codes, files, and errors in one line."""

import json
import os
from dataclasses import replace

import pytest

from mtjax.analysis.communication import contract_of
from mtjax.commands.inspect import main
from mtjax.inspect import command
from mtjax.inspect import report as reports
from mtjax.inspect.compiler_log import LEVEL
from mtjax.inspect.contract_file import load_contract
from tests.inspect.steps import needs_aot, theory_of, tiny

CONTRACT = """
name = "mine"
[[expect]]
phase = "layer forward"
kind = "all-reduce"
axis = "model"
count = "2*l*m"
elements = "b*s*h"
"""


@pytest.fixture
def compiled_once(monkeypatch, cpu_report):
    """The command on a step that is there already, whatever the options say of the model."""
    monkeypatch.setattr(
        command, "inspect", lambda config, target, contract, *_, **__: reports.report(cpu_report.step, contract)
    )


def run(capsys, *argv) -> tuple[int, str, str]:
    try:
        code = main([*argv])
    except SystemExit as e:  # tyro, for an unknown option
        code = int(e.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_holds(capsys, compiled_once, tmp_path):
    page, dump = tmp_path / "deep" / "page.html", tmp_path / "dump"
    code, out, _ = run(capsys, "--mesh", "2x4", "--html", str(page), "--dump", str(dump))
    assert code == 0
    assert "the contract holds" in out
    assert page.read_text().startswith("<!doctype html>")
    (text,) = dump.iterdir()
    assert "layers" in text.read_text()
    assert not list(tmp_path.rglob("*.tmp"))


def test_json_to_stdout_is_nothing_but_json(capsys, compiled_once):
    code, out, _ = run(capsys, "--json", "-")
    assert code == 0
    assert json.loads(out)["schema"] == "mtjax.inspect/1"


def test_the_page_says_where_it_is_and_a_step_that_does_not_fit_what_to_change(
    capsys, monkeypatch, tmp_path, cpu_report
):
    small = replace(cpu_report, memory=replace(cpu_report.memory, capacity=1000))
    monkeypatch.setattr(command, "inspect", lambda *_, **__: small)
    monkeypatch.setenv(LEVEL, "")
    monkeypatch.delenv(LEVEL)
    code, out, _ = run(capsys, "--html", str(tmp_path / "report.html"))
    assert os.environ[LEVEL] == "3"  # XLA would log an error
    assert code == 0  # the contract holds
    assert out.endswith(f"wrote {tmp_path / 'report.html'}\n")
    assert f"{small.step.mesh} does not fit: try " in out and "searches for a plan that fits" in out


def test_vs_reports_both(capsys, compiled_once, tmp_path):
    code, out, _ = run(capsys, "--vs", "1x8", "--json", str(tmp_path / "both.json"))
    assert code == 0
    assert "Comparison" in out
    assert len(json.loads((tmp_path / "both.json").read_text())["reports"]) == 2


def test_sweep_lists_every_mesh(capsys, compiled_once):
    code, out, _ = run(capsys, "--sweep", "8", "--num-heads", "4", "--hidden-size", "64")
    assert code == 0
    assert all(mesh in out for mesh in ("8x1", "4x2", "2x4", "1x8"))
    assert "1x8 was not compiled: num_heads 4 is not divisible" in out


def test_a_contract_of_ones_own_can_be_broken(capsys, compiled_once, tmp_path):
    file = tmp_path / "contract.toml"
    file.write_text(CONTRACT)
    code, out, _ = run(capsys, "--contract", str(file))
    assert code == 1
    assert "the contract is violated" in out
    assert "12 extra all-reduce over model in layer backward: f32[2,64,64], from op_name" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target", "h1000x8"], "h1000"),
        (["--target", "v100x16"], "compute capability 7.0"),
        (["--target", "attached"], "there are none"),
        (["--mesh", "1x5", "--vocab-size", "100"], "num_heads 8 is not divisible by the tensor parallel degree 5"),
        (["--sweep", "8", "--vs", "1x8"], "give one of them"),
        (["--sweep", "0"], "sweep is 0, and must be at least 1"),
        (["--intra-bandwidth", "100"], "the target is cpu"),
        (["--target", "h100x8", "--inter-bandwidth", "-1"], "above 0"),
        (["--time-on", "v100x16"], "needs a GPU program"),
        (["--contract", "/nowhere.toml"], "no contract file"),
        (["--vs", "gpt2-tinny"], "did you mean"),
        (["--vs", "hiden_size=3"], "did you mean 'hidden_size'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(capsys, argv, message, monkeypatch, cpu_report):
    if "--vs" in argv:
        monkeypatch.setattr(command, "inspect", lambda *_: cpu_report)
    if argv == ["--target", "v100x16"]:
        pytest.importorskip("jax_cuda13_plugin")
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("layer forward", "layer foward"), "did you mean 'layer forward'"),
        (("all-reduce", "all-reduse"), "did you mean 'all-reduce'"),
        (('elements = "b*s*h"', ""), "has no elements"),
        (('name = "mine"', 'naem = "mine"'), "unknown key 'naem'"),
        (("[[expect]]", "[expect]"), "under a line"),
        (('name = "mine"', 'split = ["head"]'), "is not one of"),
        (('"model"', '"modle"'), "no mesh axis is called 'modle'"),
        (('"b*s*h"', '"b*s*x"'), "uses 'x'"),
        (("name", "name ="), "is not valid TOML"),
    ],
)
def test_broken_contract_files(capsys, compiled_once, tmp_path, change, message):
    file = tmp_path / "contract.toml"
    file.write_text(CONTRACT.replace(*change))
    code, _, err = run(capsys, "--contract", str(file))
    assert code == 2
    assert message in err


def test_the_layouts_contract_written_down_is_the_layouts_contract(tmp_path):
    theirs = replace(contract_of(*theory_of(tiny())), name="tensor")
    lines = [
        f'[[expect]]\nphase = "{e.phase}"\nkind = "{e.kind}"\naxis = "{e.axis}"\ncount = "{e.count}"\n'
        f'elements = "{e.elements}"\ndtype = "{e.dtype}"\npooled = {str(e.pooled).lower()}\nwhy = "{e.why}"\n'
        for e in theirs.lines
    ]
    file = tmp_path / "tensor.toml"
    file.write_text('split = ["heads", "mlp", "vocab"]\n' + "".join(lines))
    assert load_contract(file) == theirs


@needs_aot
def test_missing_extra_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "--target", "h100x8", "--mesh", "2x4")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install '.[aot]'" in err


@needs_aot
def test_missing_cudnn_says_what_to_do(capsys, monkeypatch):
    def lower_step(_):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr("mtjax.train.step.TrainStep.lower_step", lower_step)
    code, _, err = run(capsys, "--target", "h100x8", "--mesh", "2x4", "--vocab-size", "100")
    assert (code, err.count("\n")) == (2, 1)
    assert "--attention xla" in err


def test_decoding_is_inspected_too(capsys, tmp_path):
    sizes = {"--num-layers": 1, "--hidden-size": 64, "--num-heads": 4, "--vocab-size": 250, "--mesh": "1x2"}
    words = [str(word) for pair in sizes.items() for word in pair]
    code, out, _ = run(capsys, "--generate", *words, "--context", "32", "--json", str(tmp_path / "r.json"))
    assert code == 0 and "logits stay sharded" in out and "KV cache for 32 tokens" in out
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["program"] == "decoding" and document["contract"]["holds"]
    assert {c["phase"] for c in document["collectives"]} == {"embedding forward", "layer forward", "sampling"}
    code, _, err = run(capsys, "--generate", "--context", "100000", *words)
    assert code == 2 and "context length is 64" in err
    for wrong, why in (
        (("--generate", "--sweep", "8"), "--sweep works for train steps only"),
        (("--context", "8"), "needs --generate"),
    ):
        code, _, err = run(capsys, *wrong)
        assert code == 2 and why in err
    code, _, err = run(capsys, "--generate", "--config", "bert-tiny", "--vocab-size", "250")
    assert code == 2 and "can't generate text" in err


def test_a_mesh_too_large_for_cpus_is_sent_to_the_target_of_gpus(capsys):
    assert main(["--config", "gpt2-8.3b"]) == 2
    assert "mesh 64x8 has 512 devices, and --target cpu compiles for at most 256: add --target h100x8" in (
        capsys.readouterr().err
    )
