"""`torch_dist` checkpoints of megatron-core are read, and it loads those that mtjax writes, in four CPU processes."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.runtime.checkpoints.weights import find_weights
from tests.parity.compare import relative
from tests.parity.converted import our_logits
from tests.parity.megatron_core.cases import DISTRIBUTED, VOCAB

NEEDED = [name for name in ("torch", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
ROOT = Path(__file__).parents[2]
RANKS = 4
NAMES = [name for name, *_ in DISTRIBUTED]


def run_megatron(mode: str, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.parity.megatron_core.torch_dist", mode, str(folder)]
    outputs = [(folder / f"{mode}-{rank}.log").open("w+") for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | given | {"RANK": str(rank)}, stdout=output, stderr=subprocess.STDOUT
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
        texts = [output.seek(0) or output.read()[-2000:] for output in outputs]
        for output in outputs:
            output.close()
    assert codes == [0] * RANKS, "\n".join(texts)


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
