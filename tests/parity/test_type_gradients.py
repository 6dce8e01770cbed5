"""Logits, loss and gradients of decoder types on meshes, with transformers' gradients converted like weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import replace
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import SavedModel
from mtjax.layout.mesh import MeshShape
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.mesh import make_mesh
from tests.parity.compare import Named, assert_next_token_parity
from tests.parity.decoder_types import CASES
from tests.parity.test_decoder_types import network_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
pytest.importorskip("transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

TOLERANCE = 1e-5
SPLIT = {"sequence_parallel": True}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "1x1": ("1x1", {}),
    "2x2": ("2x2", SPLIT),
    "stages": ("2x2x2", SPLIT),
    "context": ("data=1,context=2,model=2", {}),
}
"""Name -> mesh, and settings."""
ALWAYS = (("opt 350m", "stages"),)
"""Cases of the suite."""
OF_350M = [("opt 350m", mesh) for mesh in MESHES]
OTHERS = [
    (name, "2x2")
    for name in ("gpt_neo", "openai-gpt", "opt without biases and weights of norms", "seed_oss, bias of the output")
]


def converted(source: HuggingFaceSource) -> Any:
    """The tree of a folder's arrays, with our names and shapes."""
    placed = ShardedModel(source.origin.config, make_mesh(MeshShape(), jax.devices("cpu")))
    return jax.tree.map(np.asarray, SavedModel(Path(), source).parameters(placed))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *ALWAYS,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in dict.fromkeys([*OF_350M, *OTHERS])
            if case not in ALWAYS
        ),
    ],
)
def test_logits_loss_and_gradients(name: str, mesh: str, tmp_path: Path) -> None:
    network = network_of(CASES[name])
    for module in network.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # this token has no gradient there
    folder = tmp_path / "weights"
    network.save_pretrained(folder)
    shape, settings = MESHES[mesh]
    fields = {"compute_dtype": "float32", "attention": "xla", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"global_batch_size": 4, "microbatch_size": 2 if "stages" in mesh else None, "vocab_multiple": 2}
    config = replace(HuggingFaceSource(folder, 2).origin.config, mesh=shape, **fields, **settings)

    def as_ours(named: Named) -> Any:
        """Rows of positions that no token reads have no gradient, and a gradient of a tied table is of both uses."""
        saved = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        network.save_pretrained(saved, state_dict={tensor: torch.tensor(array) for tensor, array in named.items()})
        return converted(HuggingFaceSource(saved, 2))

    assert_next_token_parity(network, config, shape, as_ours, TOLERANCE)
