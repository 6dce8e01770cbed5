"""lm-eval's harness against a live server, beside transformers in the same harness; opt-in.

.venv/bin/python -m venv --system-site-packages LM && LM/bin/pip install 'lm-eval[api,hf]==0.4.13'
LM_EVAL=LM/bin/python python -m pytest -m long tests/serve/test_lm_eval.py
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import KEY

PYTHON = os.environ.get("LM_EVAL")
WORDS = ("the", "cat", "and", "dog", "went", "on", "to", "end", "of", "road", "there", "they", "rested")
TASKS = {
    "cloze": {  # as of LAMBADA
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "pages": {  # as of WikiText
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{text.split(' ')[-1]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder, own = tmp_path_factory.mktemp("tasks"), random.Random(0)
    texts = [" ".join(own.choices(WORDS, k=own.randint(4, 30))) for _ in range(12)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, "test_split": "test", **task}))
    return folder


def evaluate(tasks: Path, out: Path, model: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Results by task, and what was answered."""
    words = [str(PYTHON), "-m", "lm_eval", "--model", model, "--tasks", ",".join(TASKS), "--include_path", str(tasks)]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    words += ["--output_path", str(out), "--log_samples", "--batch_size", "4", "--device", "cpu"]
    environment = {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks), "TQDM_DISABLE": "1"}
    ran = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (results,) = out.rglob("results*.json")
    lines = [line for path in sorted(out.rglob("samples*.jsonl")) for line in path.read_text().splitlines()]
    samples = map(json.loads, lines)
    answers = [(row["doc_id"], np.ravel(row["filtered_resps"]).tolist()) for row in samples]
    return json.loads(results.read_text())["results"], answers


@pytest.mark.long
@pytest.mark.skipif(PYTHON is None, reason="LM_EVAL names no Python that has lm-eval")
def test_lm_eval_finds_what_it_finds_with_transformers(live, tasks, tmp_path) -> None:
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
    """Log-probabilities are written as strings, like texts and whether a token was the most likely."""
    try:
        return pytest.approx(float(word), rel=1e-5)
    except ValueError:
        return word
