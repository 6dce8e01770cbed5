"""Which layers of a Qwen3 with experts have some."""

from typing import Any

import pytest

from mtjax.convert.families.qwen3 import QWEN3_MOE
from mtjax.convert.stream import config_of
from mtjax.errors import UserError

CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "vocab_size": 128}


def first_dense_layers(**entries: Any) -> int:
    settings = QWEN3_MOE.model_settings(CONFIG | entries, frozenset(), "config.json")
    return config_of(settings, "config.json").model.first_dense_layers


def test_layers_without_experts_are_the_first():
    """As transformers' decoder layer decides: not in mlp_only_layers, and a multiple of the step from 1 on."""
    assert first_dense_layers() == 0
    assert first_dense_layers(mlp_only_layers=None, decoder_sparse_step=1) == 0
    assert first_dense_layers(mlp_only_layers=[1, 0]) == 2
    assert first_dense_layers(decoder_sparse_step=4) == 3
    assert QWEN3_MOE.write(config_of({"num_layers": 4, "num_experts": 8, "first_dense_layers": 2}, "").model)[
        "mlp_only_layers"
    ] == [0, 1]


@pytest.mark.parametrize("entries", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_other_layers_without_experts_are_refused(entries: dict[str, Any]):
    with pytest.raises(UserError, match="behind some that have experts, and mtjax's are the first"):
        first_dense_layers(**entries)
