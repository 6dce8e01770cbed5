"""dots.llm1: its config.json as published, and what mtjax does not have of others."""

from typing import Any

import pytest

from mtjax import config
from mtjax.config.model_identity import differences
from mtjax.convert.model_types.registry import family_of_model
from mtjax.convert.stream import config_of
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.experts import DOTS1

PUBLISHED: dict[str, Any] = {
    "model_type": "dots1",
    "hidden_size": 4096,
    "num_hidden_layers": 62,
    "intermediate_size": 10944,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "vocab_size": 152064,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "n_group": None,
    "topk_group": None,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32768,
    "rope_theta": 10000000,
    "scoring_func": "sigmoid",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Of rednote-hilab/dots.llm1.inst, as far as it concerns the network."""


def test_the_preset_is_the_published_model():
    model = config_of(DOTS1.model_settings(PUBLISHED, frozenset(), "config.json"), "config.json").model
    preset = config.load("dots1-142b").model
    assert differences(model, preset) == ["vocab_multiple is 1024 there and 256 here"]
    assert model.sequence_length == 32768
    assert family_of_model(preset) is DOTS1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_shared_experts", None, "n_shared_experts is None, but must be 1 or more"),
        ("layer_types", ["full_attention", "chunked_attention"], "layer_types has chunked_attention, but must have"),
        ("layer_types", ["full_attention"] * 3, "layer_types has 3 layers, but num_hidden_layers is 62"),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "base": 3}, "has base, which mtjax does not support"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config has weight_block_size None"),
        ("scoring_func", "softmax", "scoring_func is 'softmax', but must be 'sigmoid'"),
    ],
)
def test_what_mtjax_does_not_have_is_one_sentence(key, value, message):
    with pytest.raises(UserError, match=message):
        DOTS1.model_settings(PUBLISHED | {key: value}, frozenset(), "config.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_expert_size": 0}, "dots1, does not support shared_expert_size 0"),
        ({"shared_expert_size": 2000}, "dots1, does not support shared_expert_size 2000"),
        ({"router_bias": False}, "dots1, does not support router_bias False"),
    ],
)
def test_models_that_are_not_quite_dots1_have_no_family(settings, message):
    model = config.replace(config.load("dots1-142b"), **settings).model
    with pytest.raises(UserError, match=message):
        family_of_model(model)
