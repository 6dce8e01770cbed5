"""lm-eval against a live server, compared with lm-eval with transformers; opt-in.

.venv/bin/python -m venv --system-site-packages LM && LM/bin/pip install 'lm-eval[api,hf]==0.4.13'
LM_EVAL=LM/bin/python python -m pytest -m long tests/serve/test_lm_eval.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluate.lm_eval_tasks import TASKS, write_tasks
from tests.serve.conftest import KEY

PYTHON = os.environ.get("LM_EVAL")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def evaluate(tasks: Path, out: Path, model: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Returns results by task, and the responses."""
    command = [str(PYTHON), "-m", "lm_eval", "--model", model, "--tasks", ",".join(TASKS), "--include_path", str(tasks)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--output_path", str(out), "--log_samples", "--batch_size", "4", "--device", "cpu"]
    environment = {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks), "TQDM_DISABLE": "1"}
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (results,) = out.rglob("results*.json")
    lines = [line for path in sorted(out.rglob("samples*.jsonl")) for line in path.read_text().splitlines()]
    samples = map(json.loads, lines)
    answers = [(row["doc_id"], np.ravel(row["filtered_resps"]).tolist()) for row in samples]
    return json.loads(results.read_text())["results"], answers


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="LM_EVAL names no Python that has lm-eval")
def test_lm_eval_equals_transformers(live, tasks, tmp_path) -> None:
    theirs = evaluate(tasks, tmp_path / "theirs", "hf", {"pretrained": live.folder, "dtype": "float32"})
    server = {"model": "tiny", "base_url": f"{live.address}/v1/completions", "tokenizer_backend": "remote"} | {
        "auth_token": KEY
    }
    ours = evaluate(tasks, tmp_path / "ours", "local-completions", {**server, "num_concurrent": 3, "max_length": 96})
    for task, metrics in theirs[0].items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                assert ours[0][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
    assert len(ours[1]) == 36
    for (number, own), (same, other) in zip(ours[1], theirs[1], strict=True):
        assert number == same and [as_number(word) for word in own] == [as_number(word) for word in other]


def as_number(word: str) -> object:
    """Parses lm-eval's strings, which may be log-probabilities, texts or booleans."""
    try:
        return pytest.approx(float(word), rel=1e-5)
    except ValueError:
        return word
