"""Logits, loss and gradients of decoder types on meshes, with transformers' gradients converted like weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import Config, replace
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import SavedModel
from mtjax.models.sharded_model import ShardedModel
from tests.parity.compare import Named, assert_next_token_parity
from tests.parity.decoder_types import CASES
from tests.parity.float64 import in_float64
from tests.parity.test_decoder_types import network_of
from tests.tiny import mesh_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
pytest.importorskip("transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

TOLERANCE = 1e-5
SPLIT = {"sequence_parallel": True}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "1x1": ("1x1", {}),
    "1x2": ("1x2", {}),
    "2x2": ("2x2", SPLIT),
    "stages": ("2x2x2", SPLIT),
    "context": ("data=1,context=2,model=2", {}),
}
"""Name -> mesh, and settings."""
ALWAYS = (("opt 350m", "stages"), ("gpt_oss", "stages"), ("gemma3_text", "2x2"), ("deepseek_v3", "1x2"))
"""Cases of `make test-all`; `make test-layouts` runs the product."""
IN_FLOAT64 = (
    *("exaone4", "zamba2", "zamba2, one block, grouped keys", "qwen3_next"),
    "qwen3_next, three taps, biases, dense layers, a key for each query",
)
"""Cases of which transformers computes in float64, from which its gradients in float32 are 1e-5 to 6e-5: without norms
before their sublayers; in Zamba2's shared blocks; and of decays of gated delta nets, where what tokens read of
themselves cancels."""
NOISE = {
    **dict.fromkeys((*IN_FLOAT64[3:], "falcon_h1, normalized", "phi3, long", "flint", "exaone_moe"), 0.1),
    **dict.fromkeys((*IN_FLOAT64[1:3], "mamba2, three taps, limited, tied"), 0.05),
}
"""Standard deviation of what is added to initial weights, where gradients in float32, transformers' or ours, are more
than 1e-5 from float64's with more: ours of the decays' logarithms, differences of sums, are up to 2e-5 from them then.
"""
PRODUCT = [(name, mesh) for name in CASES for mesh in MESHES if mesh != "context" or name == "opt 350m"]


def converted(source: HuggingFaceSource, config: Config, shape: str) -> Any:
    """The tree of a folder's arrays, with our names and shapes, and layers in the order of a mesh's stages."""
    placed = ShardedModel(config, mesh_of(shape))
    return jax.tree.map(np.asarray, SavedModel(Path(), source).parameters(placed))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *ALWAYS,
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in PRODUCT if case not in ALWAYS),
    ],
)
def test_logits_loss_and_gradients(name: str, mesh: str, tmp_path: Path) -> None:
    network = network_of(CASES[name], NOISE.get(name, 0.2))
    for module in network.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # this token has no gradient there
        if "e_score_correction_bias" in module._buffers:  # a parameter of ours, without a gradient
            module.e_score_correction_bias = torch.nn.Parameter(module._buffers.pop("e_score_correction_bias"))
    folder = tmp_path / "weights"
    network.save_pretrained(folder)
    shape, settings = MESHES[mesh]
    fields = {"compute_dtype": "float32", "attention": "xla", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"global_batch_size": 4, "microbatch_size": 2 if "stages" in mesh else None, "vocab_multiple": 2}
    config = HuggingFaceSource(folder, 2).origin.config
    if "stages" in mesh and config.model.num_layers % 2:
        fields |= {"layers_per_stage": (config.model.num_layers // 2 + 1, config.model.num_layers // 2)}
    if config.model.num_experts:  # its loss is that of the tokens alone
        fields |= {"router_aux_loss": 0.0, "router_z_loss": 0.0, "router_bias_update_rate": 0.0}
    config = replace(config, mesh=shape, **fields, **settings)

    def as_ours(named: Named) -> Any:
        """Rows of positions that no token reads have no gradient, and a gradient of a tied table is of both uses."""
        saved = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        zeros = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in network.named_parameters()}
        given = {name: torch.tensor(array, dtype=torch.float32) for name, array in named.items()}
        network.save_pretrained(saved, state_dict=zeros | given)
        return converted(HuggingFaceSource(saved, 2), config, shape)

    network = in_float64(network) if name in IN_FLOAT64 else network
    assert_next_token_parity(network, config, shape, as_ours, TOLERANCE)
