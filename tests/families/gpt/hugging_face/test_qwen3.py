"""Which layers of a Qwen3 with experts have some."""

from typing import Any

import pytest

from mtjax.convert.stream import config_of
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.experts import QWEN2_MOE, QWEN3_MOE

CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "vocab_size": 128}


def layers(**entries: Any) -> tuple[int, int]:
    """The first ones without experts, and of how many one has experts."""
    settings = QWEN3_MOE.model_settings(CONFIG | entries, frozenset(), "config.json")
    model = config_of(settings, "config.json").model
    return model.first_dense_layers, model.moe_every


def test_layers_without_experts_are_read_and_written():
    """As transformers' decoder layer decides: not in mlp_only_layers, and a multiple of the step from 1 on."""
    assert layers() == (0, 1)
    assert layers(mlp_only_layers=None, decoder_sparse_step=1) == (0, 1)
    assert layers(mlp_only_layers=[1, 0]) == (2, 1)
    assert layers(decoder_sparse_step=4) == (3, 1)
    assert layers(decoder_sparse_step=2) == layers(mlp_only_layers=[0, 2]) == (0, 2)
    assert layers(decoder_sparse_step=3, num_hidden_layers=6) == (0, 3)
    for settings, written in (({"first_dense_layers": 2}, [0, 1]), ({"moe_every": 2}, [0, 2])):
        model = config_of({"num_layers": 4, "num_experts": 8} | settings, "").model
        assert QWEN3_MOE.write(model)["mlp_only_layers"] == written


def test_layers_of_a_qwen2_with_experts_that_slide_are_refused():
    """transformers masks them without use_sliding_window, too."""
    kinds = ["full_attention", "sliding_attention"]
    entries = {"num_hidden_layers": 2, "layer_types": kinds}
    with pytest.raises(UserError, match="layer_types has sliding_attention, but must have full_attention alone"):
        QWEN2_MOE.model_settings(CONFIG | entries, frozenset(), "config.json")
    QWEN2_MOE.model_settings(CONFIG | entries | {"layer_types": kinds[:1] * 2}, frozenset(), "config.json")


@pytest.mark.parametrize(
    "entries",
    [
        {"mlp_only_layers": [1]},
        {"mlp_only_layers": [1, 3]},
        {"decoder_sparse_step": 3},
        {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"mlp_only_layers": [0, 1, 2, 3]},
    ],
)
def test_other_layers_without_experts_are_refused(entries: dict[str, Any]):
    with pytest.raises(UserError, match="all layers, all after the first k, every N-th"):
        layers(**entries)
