"""Runs go on elsewhere with the optimizer's state: megatron-core's in mtjax, and mtjax's in megatron-core.

megatron-core trains in four CPU processes with its distributed optimizer, on the corpus that mtjax reads, too.
"""

import contextlib
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mtjax.commands.convert import main
from mtjax.commands.train import main as train_main
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.runtime.checkpoints.weights import find_weights
from tests.parity.megatron_core.cases import RESUMED, RUN, SAVED, VOCAB
from tests.parity.processes import run_ranks

NEEDED = [name for name in ("torch", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("bare_end"),
]
MODULE = "tests.parity.megatron_core.resumed"
SHIFTED = ("gpt in bfloat16, small buckets", "fully_reshardable")
"""megatron-core 0.16 takes the padding between buckets for tensors."""
WRITTEN = {"llama": (), "gpt in bfloat16, small buckets": (), "experts": ("--expert", 2)}
"""Runs that go back, and how."""
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


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Cases of this module's tests that run."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    named = {of.params["name"] for of in parameters if of is not None}
    return [name for name, case in RESUMED.items() if name in named or not case["rare"]]


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    write_corpus(folder)
    (folder / "cases.json").write_text(json.dumps(chosen(request)))
    run_ranks(MODULE, "train", folder)
    return folder


def train(folder: Path, *options: str) -> np.ndarray:
    """Losses of the steps that the command trains."""
    jax.devices()  # all eight: else the first run in this process would ask for as many as its mesh has
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as complained:
        code = train_main(["--config", str(folder / "config.toml"), "--resume", *options])
    assert code == 0, complained.getvalue()[-3000:] + said.getvalue()[-2000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line])


def convert(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    """Every folder of theirs as a run, but the one that megatron-core damages."""
    for name, layout in CASES:
        if (name, layout) != SHIFTED and (theirs / "saved" / name).exists():
            saved, run = theirs / "saved" / name / layout, theirs / "ours" / name / layout
            given = ("--with-optimizer", "--vocab-size", VOCAB)
            convert("--from", f"megatron:{saved}", "--to", f"mtjax:{run}", *given)
    return theirs / "ours"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if case["rare"] else name for name, case in RESUMED.items()],
)
def test_every_layout_of_the_optimizer_is_the_same_state(name: str, ours: Path) -> None:
    """Parameters, both moments and all counters, to the bit."""
    found = [find_weights(run).metadata["fingerprints"] for run in (ours / name).iterdir()]
    assert all(one == found[0] for one in found)
    assert sum(".mu." in array for array in found[0]) == sum(array.startswith("parameters.") for array in found[0])


def test_what_megatron_core_shifts_is_refused(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = theirs / "saved" / SHIFTED[0] / SHIFTED[1]
    command = ["--from", f"megatron:{saved}", "--to", f"mtjax:{tmp_path / 'run'}", "--with-optimizer"]
    assert main(command) == 2
    assert "megatron-core has shifted them" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name, case in RESUMED.items() if case["trained"]])
def test_the_next_ten_losses_are_theirs(name: str, theirs: Path, ours: Path) -> None:
    """The same samples, rates, weight decay, moments and counters: float32 in both, or bfloat16 in both."""
    losses = train(next(iter((ours / name).iterdir())), "--mesh", "1x1", "--checkpoint-every", "4")
    expected = np.load(theirs / f"{name}-train.npz")["loss"]
    assert len(losses) == RUN["steps"] - SAVED
    np.testing.assert_allclose(losses, expected[SAVED:], rtol=3e-3 if RESUMED[name]["bf16"] else 1e-5)
    assert expected[-1] < 0.9 * expected[0]


def test_runs_of_ours_go_on_in_megatron(theirs: Path, ours: Path) -> None:
    """Those that the test above has continued, from their twelfth step."""
    for name, given in WRITTEN.items():
        checkpoint = next(iter((ours / name).iterdir())) / "checkpoints" / "12"
        assert checkpoint.is_dir()
        target = f"megatron:{theirs / 'written' / name}"
        options = ("--ckpt-format", "torch_dist", "--transformer-impl", "local", "--with-optimizer")
        convert("--from", f"mtjax:{checkpoint}", "--to", target, *options, *given)
    run_ranks(MODULE, "resume", theirs)
    for name in WRITTEN:
        found, expected = (np.load(theirs / f"{name}-{mode}.npz")["loss"] for mode in ("resume", "train"))
        np.testing.assert_allclose(found, expected[12:], rtol=3e-3 if RESUMED[name]["bf16"] else 1e-5)
