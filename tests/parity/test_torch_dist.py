"""`torch_dist` checkpoints of megatron-core are read, and it loads those that mtjax writes, in four CPU processes."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.runtime.checkpoints.weights import find_weights
from tests.parity.compare import relative
from tests.parity.converted import our_logits
from tests.parity.megatron_core.cases import DISTRIBUTED, VOCAB
from tests.parity.processes import run_ranks

NEEDED = [name for name in ("torch", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
NAMES = [name for name, *_ in DISTRIBUTED]


def run_megatron(mode: str, folder: Path) -> None:
    run_ranks("tests.parity.megatron_core.torch_dist", mode, folder)


def convert(source: str, target: str, *options: str) -> None:
    padded = ("--vocab-multiple", "512") if target.startswith("mtjax:") else ()
    assert main(["--from", source, "--to", target, *padded, *options]) == 0


def fingerprints(folder: Path) -> dict[str, int]:
    return find_weights(folder).metadata["fingerprints"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their checkpoints, and ours of the same models."""
    folder = tmp_path_factory.mktemp("torch_dist")
    run_megatron("save", folder)
    for name in NAMES:
        convert(f"megatron:{folder / 'saved' / name}", f"mtjax:{folder / 'ours' / name}")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_their_distributed_checkpoints_are_read_to_the_bit(name: str, theirs: Path, tmp_path: Path) -> None:
    convert(f"megatron:{theirs / 'torch' / name}", f"mtjax:{tmp_path / 'ours'}")
    assert fingerprints(theirs / "ours" / name) == fingerprints(tmp_path / "ours")
    assert find_weights(theirs / "ours" / name).config.model == find_weights(tmp_path / "ours").config.model


@pytest.mark.parametrize("name", NAMES)
def test_their_distributed_checkpoints_give_their_logits(name: str, theirs: Path) -> None:
    saved = np.load(theirs / f"{name}.npz")
    tokens, logits = saved["tokens"].astype(np.int32), saved["logits"][..., : VOCAB - 6]
    assert relative(our_logits(theirs / "ours" / name, tokens, "1x1"), logits) < 1e-5


def test_ours_are_loaded_strictly_with_other_degrees(theirs: Path) -> None:
    """In `load` every rank compares its tensors; here ours are read again."""
    for name in NAMES:
        written = theirs / "written" / name
        options = ("--ckpt-format", "torch_dist", "--transformer-impl", "local")
        convert(f"mtjax:{theirs / 'ours' / name}", f"megatron:{written}", *options)
        convert(f"megatron:{written}", f"mtjax:{theirs / 'again' / name}")
        assert fingerprints(theirs / "again" / name) == fingerprints(theirs / "ours" / name)
    run_megatron("load", theirs)
