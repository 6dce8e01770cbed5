"""Presets of published models: as many parameters as transformers' model of the published config.json, whose settings
they have."""

from typing import Any

import pytest

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config.model_identity import effective_settings
from mtjax.config.sizes import padded_vocab_size
from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.stream import config_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)
pytestmark = pytest.mark.torch

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi4-14b": (
        "phi3",  # microsoft/phi-4
        {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 100257,
        },
    ),
    "granite3-8b": (
        "granite",  # ibm-granite/granite-3.3-8b-base
        {
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49159,
            "max_position_embeddings": 131072,
            "rope_theta": 10000000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
        },
    ),
    "falcon-7b": ("falcon", {}),  # transformers' defaults are those of tiiuae/falcon-7b
    "command-r-35b": ("cohere", {"num_key_value_heads": 64, "rope_theta": 8000000.0}),  # CohereLabs/c4ai-command-r-v01
    "glm4-9b": ("glm4", {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}),  # zai-org/GLM-4-9B-0414
}
"""Preset -> type and what the published config.json has in addition to transformers' defaults of the type."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name: str) -> None:
    kind, published = PUBLISHED[name]
    theirs, ours = transformers.AutoConfig.for_model(kind, **published), config.load(name).model
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(theirs)
    tables = 1 if ours.tie_embeddings else 2
    padding = tables * (padded_vocab_size(ours) - theirs.vocab_size) * ours.hidden_size
    assert parameters(anatomy_of(ours)) == sum(p.numel() for p in network.parameters()) + padding
    settings = MODEL_TYPES[kind].model_settings(published, frozenset({"lm_head.weight"}), "config.json")
    settings |= {"sequence_length": ours.sequence_length, "vocab_multiple": ours.vocab_multiple}
    assert effective_settings(config_of(settings, "config.json").model) == effective_settings(ours)
