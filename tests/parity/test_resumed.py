"""Runs go on elsewhere with the optimizer's state: megatron-core's in mtjax, and mtjax's in megatron-core.

megatron-core trains in four CPU processes with its distributed optimizer, on the corpus that mtjax reads, too.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mtjax.convert.__main__ import main
from mtjax.data.corpus.writer import IndexedWriter
from tests.parity.megatron_core.cases import RESUMED, RUN, SAVED, VOCAB
from tests.parity.processes import run_ranks

NEEDED = [name for name in ("torch", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
MODULE = "tests.parity.megatron_core.resumed"
CASES = [(name, layout or "plain") for name, case in RESUMED.items() for layout in case["layouts"]]


def write_corpus(folder: Path) -> None:
    """Texts in which some tokens are more frequent than others, and a tokenizer."""
    random = np.random.default_rng(3)
    with IndexedWriter(folder / "corpus", np.dtype("<u2")) as writer:
        for _ in range(40):
            text = np.append(random.geometric(0.02, random.integers(20, 400)) % (VOCAB - 7) + 1, 0)
            writer.add(text, np.array([len(text)]), np.ones(1))
        writer.finish()
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, VOCAB - 6)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    write_corpus(folder)
    run_ranks(MODULE, "train", folder)
    return folder


def train(folder: Path, *options: str) -> np.ndarray:
    """Losses of the steps that the command trains."""
    command = ["-m", "mtjax.train", "--config", str(folder / "config.toml"), "--resume", *options]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line])


def convert(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_next_ten_losses_are_theirs(name: str, layout: str, theirs: Path, tmp_path: Path) -> None:
    saved = theirs / "saved" / name / layout
    given = ("--with-optimizer", "--vocab-size", VOCAB)
    convert("--from", f"megatron:{saved}", "--to", f"mtjax:{tmp_path / 'run'}", *given)
    losses = train(tmp_path / "run", "--mesh", "1x1")
    expected = np.load(theirs / f"{name}-train.npz")["loss"]
    assert len(losses) == RUN["steps"] - SAVED
    np.testing.assert_allclose(losses, expected[SAVED:], rtol=1e-5 if not RESUMED[name]["bf16"] else 3e-3)
    assert expected[-1] < 0.9 * expected[0]
