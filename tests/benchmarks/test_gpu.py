"""benchmarks/gpu.py without a GPU: invalid options, failing parts, and a rehearsal of all parts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KIT = ROOT / "benchmarks" / "gpu.py"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch):
    """The kit's package, as the script imports it."""
    monkeypatch.syspath_prepend(str(KIT.parent))
    from gpu_kit import main, page, parts, runner

    return {"main": main, "page": page, "parts": parts, "runner": runner}


def run(*options: str, timeout: int = 1200) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(KIT), *options], capture_output=True, text=True, timeout=timeout)


def test_a_part_that_fails_is_recorded_and_the_rest_goes_on(kit, tmp_path: Path, monkeypatch) -> None:
    """One process answers, one fails with a sentence, one outlasts its time; what is answered before that is kept."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "name, folder = sys.argv[2], pathlib.Path(sys.argv[3])\n"
        "if name == 'broken': sys.exit('error: it broke')\n"
        "(folder / f'{name}.json').write_text(json.dumps({'devices': 1, 'known': name}))\n"
        "if name == 'slow': time.sleep(600)\n"
    )
    runner, part = kit["runner"], kit["parts"].Part
    monkeypatch.setattr(runner, "ENTRY", script)
    parts = [
        part("machine", 30, ("machine",)),
        part("broken", 30, ("broken",)),
        part("slow", 1.5, ("slow",)),
        part("pair", 30, ("torch model", "mtjax model")),
        part("many", 30, ("many",), least_gpus=2),
    ]
    kept: list[list[str]] = []
    said: list[str] = []
    found = runner.run_parts(parts, tmp_path, 100, lambda f: kept.append(list(f)), said.append, rehearse=False)
    assert [a["state"] for a in found.values()] == ["done", "failed", "cut short", "done", "left out"]
    assert found["broken"]["error"] == "error: it broke"
    assert found["slow"]["known"] == "slow"
    assert found["pair"]["known"] == "mtjax model" and found["pair"]["torch"]["known"] == "torch model"
    assert [len(names) for names in kept] == [1, 2, 3, 4, 5]  # written after each
    assert "broken: failed after" in "\n".join(said)
    page = kit["page"].page({"date": "today", "command": "gpu.py", "seconds": 1.0, "parts": found})
    assert "- broken: failed: error: it broke" in page and "- slow: cut short" in page


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = run("--only", "machine")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: this machine has no NVIDIA GPU: use --rehearse") and "\n" not in done.stderr[:-1]
    )


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(["gpt2-1.2b"], marks=pytest.mark.exhaustive),
        pytest.param(["gpt2-1.2b", "llama-1b"], marks=pytest.mark.exhaustive),
    ],
    ids=["one model", "both"],
)
def test_rehearsed_to_the_last_line(models: list[str]) -> None:
    """Every part runs, the slow ones in one case; PyTorch's side where it is installed; nothing is written."""
    before = {p: p.read_bytes() for p in RESULTS.iterdir()}
    first, *others = [f"speed {model}" for model in models]
    more = (["features"], ["commands"]) if others else ([], [])
    parts = ["numbers", first, *more[0], "resume", "collectives", "meshes", *others, *more[1]]
    done = run("--rehearse", "--only", *parts)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    ended = [line.partition(":")[0] for line in lines if ": done after" in line]
    assert ended == ["machine", *parts]
    assert lines[-1].startswith("rehearsed in") and lines[-1].endswith("no results are written")
    assert {p: p.read_bytes() for p in RESULTS.iterdir()} == before


def test_tables_of_a_run_with_everything(kit) -> None:
    """A page of made-up figures has each of them in its place."""
    said = {"plan_seconds": 0.9, "inspect_seconds": 1.1}
    causes = {"products": {"measured": 0.6, "predicted": 0.5}}
    speed = {"parameters": 1.2e9, "microbatches": 4, "microbatch": 8, "sequence": 1024, "seconds": 1.0, "mfu": 0.5}
    speed |= {"tflops": 400.0, "peak_bytes": 50e9, "predicted": said, "causes": causes, "phases": {}}
    speed |= {"state": "done", "traced_seconds": 1.01, "torch": {"state": "done", "seconds": 1.2, "peak_bytes": 60e9}}
    best = {
        "device": "made up",
        "devices": 2,
        "memory": 8e10,
        "products": {"bfloat16": {"best": 800.0}},
        "state": "done",
    }
    document = {"date": "today", "command": "gpu.py", "seconds": 1.0, "parts": {"machine": best, "speed m": speed}}
    shown = kit["page"].page(json.loads(json.dumps(document)))
    ours, theirs = "1,000.0 | 50.0% | 50.0% | 50.0", "1,200.0 | 1.20 | 60.0"
    assert f"| m (1,200M) | 4 x 8 x 1,024 | {ours} | {theirs} | 900.0 (-10%) | 1,100.0 (+10%) |" in shown
    assert "| products | 600.0 | 500.0 |" in shown
    assert "Not run" not in shown
    row = {"feature": "windows", "attention": "cudnn", "error": 0.01, "limit": 0.02, "ok": True}
    failed = {"feature": "experts", "error": None, "limit": None, "ok": False, "why": "no kernel"}
    ran = {"failed": {}, "perplexities": {"evaluate": 215.5}, "texts": {"generate": "a\nb"}, "ok": True}
    parts = {"features": {"features": [row, failed], "state": "done"}, "commands": {**ran, "state": "done"}}
    shown = kit["page"].page({**document, "parts": {"machine": best, **parts}})
    assert "| windows | cudnn | 1.00e-02 | 2.00e-02 | holds |" in shown
    assert "| experts | - | no kernel | - | **WRONG** |" in shown
    assert "| evaluate | 215.500000 |" in shown and "| generate | a b |" in shown
    assert "greedy text on GPU and CPU: holds" in shown
