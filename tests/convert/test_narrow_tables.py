"""OPT-350M and the first GPT: what their config.json describes, without torch."""

from typing import Any

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Config, replace
from mtjax.config.checks import validate
from mtjax.convert.megatron_arguments import misfits
from mtjax.convert.megatron_tables import TRANSFORMER_ENGINE
from mtjax.convert.model_types.registry import MODEL_TYPES, family_of_model
from mtjax.convert.stream import config_of
from mtjax.errors import UserError
from tests.tiny import tiny_config

OPT_350M: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
NARROW: dict[str, Any] = {"norm_placement": "post", "embedding_size": 24}


def read(config: dict[str, Any]) -> Config:
    """mtjax's settings of a config.json."""
    settings = MODEL_TYPES[config["model_type"]].model_settings(config, frozenset(), "config.json")
    return config_of({**settings, "vocab_multiple": 1}, "config.json")


def test_opt_350m_has_its_published_number_of_parameters_and_is_written_as_read():
    """transformers counts 331,196,416 of facebook/opt-350m, two rows of positions that no token reads included."""
    model = read(OPT_350M).model
    assert (model.norm_placement, model.embedding_size) == ("post", 512)
    assert parameters(anatomy_of(model)) + 2 * 1024 == 331_196_416
    family = family_of_model(model)
    assert family.model_type == "opt"
    written = family.write(model)
    assert {name: written[name] for name in OPT_350M if name in written} == {
        name: value for name, value in OPT_350M.items() if name != "model_type"
    }


def test_bloom_560m_has_its_published_number_of_parameters_and_heads():
    """559,214,592 of bigscience/bloom-560m; its config.json has other names of keys than transformers writes."""
    published = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}
    model = read(published).model
    assert (parameters(anatomy_of(model)), model.num_heads) == (559_214_592, 16)
    for other in ({}, {"n_embed": None}):  # null is not a value
        assert read({"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, **other}).model == model
    with pytest.raises(UserError, match="num_attention_heads is 16, but n_head, the same setting, is 8: remove one"):
        read({**published, "n_head": 8})


def test_gpt_neo_has_its_published_number_of_parameters():
    """125,198,592 of EleutherAI/gpt-neo-125m, whose layers have a window of 256 tokens in turn."""
    small = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}
    model = read({"model_type": "gpt_neo", **small}).model
    assert (model.attention_window, model.window_layers, model.attention_bias) == (256, "FS", "output")
    assert parameters(anatomy_of(model)) == 125_198_592
    listed = {"attention_layers": ["local"] * 12}
    assert read({"model_type": "gpt_neo", **small, **listed}).model.window_layers == "S"
    with pytest.raises(UserError, match="attention_types has 24 layers, but num_layers is 12"):
        read({"model_type": "gpt_neo", **small, "attention_types": [[["global", "local"], 12]]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_num_layers": 1}, "norm_placement is post, and its layers read hidden states of a final norm"),
        ({"mtp_num_layers": 1, "norm_placement": "pre"}, "embedding_size is 24 and hidden_size 32, which its layers"),
        ({"parallel_residual": "one_norm"}, "only works with norm_placement pre, not post"),
        ({"family": "bert"}, "embedding_size only works with the families gpt and llama, and family is bert"),
    ],
)
def test_what_is_not_combined_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**{**NARROW, **settings}))


def test_megatron_has_neither():
    wrong = misfits(replace(tiny_config(), **NARROW).model, TRANSFORMER_ENGINE)
    assert {"norm_placement post", "embedding_size 24"} <= {*wrong}
