"""Hybrid models of megatron-core: every tensor of any degrees, logits, and what it loads of ours."""

import subprocess
import sys
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.families.hybrid.megatron_arguments import pattern_of
from mtjax.runtime.checkpoints.weights import find_weights
from tests.parity.compare import relative
from tests.parity.converted import our_logits
from tests.parity.megatron_core.cases import HYBRID_SPLITS, HYBRIDS, VOCAB

NEEDED = [name for name in ("torch", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.torch,
]


def run_megatron(mode: str, folder: Path) -> None:
    program = "tests.parity.megatron_core.hybrid"
    command = [sys.executable, "-W", "ignore", "-m", program, mode, str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def convert(source: str, target: str, *options: str) -> None:
    padded = ("--vocab-multiple", "512") if target.startswith("mtjax:") else ()
    assert main(["--from", source, "--to", target, *padded, *options]) == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their checkpoints of both models, by one start of theirs, and ours of those with a single rank."""
    folder = tmp_path_factory.mktemp("megatron")
    run_megatron("save", folder)
    for name in HYBRIDS:
        convert(f"megatron:{folder / name / '1x1x1'}", f"mtjax:{folder / name / 'ours'}")
    return folder


@pytest.fixture(params=HYBRIDS)
def theirs(request: pytest.FixtureRequest, saved: Path) -> Path:
    """The checkpoints of a model."""
    return saved / request.param


def test_their_logits_are_ours(theirs: Path) -> None:
    model = find_weights(theirs / "ours").config.model
    with np.load(theirs / "logits.npz") as file:
        saved = dict(file)
    activation = "relu2" if HYBRIDS[theirs.name]["squared_relu"] else "swiglu"
    pattern = HYBRIDS[theirs.name]["hybrid_override_pattern"]
    assert (model.layer_pattern, model.ssm_groups, model.activation) == (pattern, 4, activation)
    found = our_logits(theirs / "ours", saved["tokens"].astype(np.int32), "1x2")
    assert relative(found, saved["logits"][..., : VOCAB - 6]) < 1e-5


@pytest.mark.parametrize("name", ["distributed", *("x".join(map(str, split)) for split in HYBRID_SPLITS[1:])])
def test_any_split_of_theirs_is_the_same_model(name: str, theirs: Path, tmp_path: Path) -> None:
    """And what we write of these degrees are their files, tensor by tensor."""
    import torch

    convert(f"megatron:{theirs / name}", f"mtjax:{tmp_path / 'ours'}")
    ours, again = (find_weights(folder) for folder in (theirs / "ours", tmp_path / "ours"))
    assert ours.metadata["fingerprints"] == again.metadata["fingerprints"]
    if name == "distributed":
        return
    split = tuple(map(int, name.split("x")))
    sizes = (f"--{kind}={count}" for kind, count in zip(("tensor", "pipeline", "expert"), split, strict=True))
    convert(f"mtjax:{theirs / 'ours'}", f"megatron:{tmp_path / 'back'}", *sizes)
    files = sorted((theirs / name).rglob("*.pt"))
    assert len(files) == prod(split)
    for path in files:
        expected = torch.load(path, weights_only=False)
        found = torch.load(tmp_path / "back/release" / path.parent.name / path.name, weights_only=False)
        tensors = {n: t for n, t in expected["model"].items() if torch.is_tensor(t)}
        assert found["model"].keys() == tensors.keys()
        for tensor, value in tensors.items():
            rows = (
                VOCAB // split[0] - 6 if tensor in ("embedding.word_embeddings.weight", "output_layer.weight") else None
            )
            assert torch.equal(found["model"][tensor][:rows], value[:rows]), f"{path} {tensor}"
        for argument, value in HYBRIDS[theirs.name].items():
            if not argument.startswith(("rotary", "use_rope", "transformer_impl")):
                assert getattr(found["args"], argument) == value, argument


@pytest.mark.long
def test_ours_are_loaded_strictly(saved: Path) -> None:
    for name in HYBRIDS:
        ours, written = saved / name / "ours", saved / name / "written"
        convert(f"mtjax:{ours}", f"megatron:{written}", "--ckpt-format", "torch_dist")
    run_megatron("load", saved)


def test_layers_by_their_shares_are_where_megatron_puts_them() -> None:
    allocation = pytest.importorskip("megatron.core.ssm.mamba_hybrid_layer_allocation")
    for layers in (1, 9, 10, 48, 56):
        for attention in (0.0, 0.08, 0.3, 0.5):
            for mlp in (0.0, 0.1, 0.2, 0.5):
                ratios = {"hybrid_attention_ratio": attention, "hybrid_mlp_ratio": mlp}
                theirs = allocation.allocate_layers(layers, attention, mlp)
                assert pattern_of({"num_layers": layers, **ratios}) == "".join(theirs)
