"""Loss and every gradient of hybrid models beside transformers' and torch's, on one device and on meshes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mtjax.config import Config
from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.parameters import parameters_of
from mtjax.convert.table import name_of
from tests.families.hybrid.test_model import EXPERTS, FACTORS, QWEN3_NEXT, SHARED, hybrid_config
from tests.parity.compare import assert_next_token_parity, shaken
from tests.parity.trees import nested

pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = pytest.mark.torch


ONE_BLOCK: dict[str, Any] = {"num_kv_heads": 2, "block_attention_adapters": False, "position": "none"}


def theirs(config: Config) -> Any:
    """transformers' network of a config, with weights large enough for every part to matter."""
    kind = KINDS[model_type(config)]
    settings = MODEL_TYPES[model_type(config)].config_json(config.model)
    chunk = {} if kind == "Qwen3Next" else {"mamba_chunk_size" if kind == "FalconH1" else "chunk_size": 7}
    # Falcon-H1's embedding would have no gradient of the padding's row.
    made = getattr(transformers, f"{kind}Config")(**settings, **chunk, attn_implementation="eager", pad_token_id=None)
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(made))


KINDS = {
    "mamba2": "Mamba2",
    "nemotron_h": "NemotronH",
    "falcon_h1": "FalconH1",
    "qwen3_next": "Qwen3Next",
    "zamba2": "Zamba2",
}


def model_type(config: Config) -> str:
    if "G" in config.model.layer_pattern:
        return "qwen3_next"
    if "H" in config.model.layer_pattern:
        return "falcon_h1"
    if "Z" in config.model.layer_pattern:
        return "zamba2"
    return "mamba2" if set(config.model.layer_pattern) == {"M"} else "nemotron_h"


def as_ours(named: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """transformers' tensors under our names and in our shapes, by the table of the conversion."""
    files = {}
    for name, array in named.items():
        if name.startswith("model.") and model_type(config) in ("mamba2", "nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        head, is_of_experts, matrix = name.rpartition("experts.")
        if is_of_experts and "shared" not in head:  # one tensor of all in memory, one for each in files
            halves = {"gate_proj": 0, "up_proj": 1} if matrix == "gate_up_proj" else {matrix: 0}
            parts = np.split(array, len(halves), 1)
            files |= {
                f"{head}experts.{i}.{own}.weight": one for own, at in halves.items() for i, one in enumerate(parts[at])
            }
        else:
            files[name] = array
    parameters = parameters_of(config)
    arrays = {name: np.zeros(parameter.stacked_shape, np.float32) for name, parameter in parameters.items()}
    for parameter, layer, tensor in MODEL_TYPES[model_type(config)].table_of(config.model).select(parameters).tensors():
        into = arrays[parameter.name] if layer is None else arrays[parameter.name][layer]
        if (name := name_of(tensor, layer)) in files:  # biases of routers have no gradient
            tensor.insert(tensor.view(files[name], parameter), into, parameter)
    return nested(arrays)


@pytest.mark.parametrize(
    ("pattern", "mesh", "fields"),
    [
        ("MM", "1x1", {"ssm_heads": 8}),
        pytest.param("MM", "1x2", {"ssm_heads": 8, "ssm_groups": 1}, marks=pytest.mark.exhaustive),
        ("M-M*-", "2x2", {"sequence_parallel": True}),
        ("MZMzZ", "2x2", {**SHARED, "sequence_parallel": True, "ssm_rate_floor": 0.001}),
        pytest.param("ZMZ", "1x1", {**SHARED, **ONE_BLOCK, "ssm_rate_floor": 0.3}, marks=pytest.mark.exhaustive),
        ("H-", "1x2", {**FACTORS, "position": "rope", "attention_scale": 0.3, "sequence_parallel": True}),
        ("GE*-", "1x2", {**QWEN3_NEXT, "sequence_parallel": True}),
        pytest.param(
            "ME*EM", "1x2", {**EXPERTS, "router_aux_loss": 0.0, "ssm_rate_floor": 0.3}, marks=pytest.mark.long
        ),
    ],
)
def test_gradients_equal_transformers(pattern: str, mesh: str, fields: dict[str, Any]) -> None:
    config = hybrid_config(pattern, vocab_multiple=2, **fields)
    assert_next_token_parity(theirs(config), config, mesh, lambda named: as_ours(named, config), 1e-5)
