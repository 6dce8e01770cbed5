"""Windows and positions that differ between layers, as transformers computes them: logits, loss and every gradient."""

from typing import Any

import pytest

from mtjax.config import Config
from mtjax.config.sizes import head_dim, mlp_size, num_kv_heads, windowed_layers
from tests.parity.compare import assert_next_token_parity, shaken
from tests.parity.test_llama import as_llama, llama_config, rope_parameters

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

TOLERANCE = 2e-5
BASE: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "rope_theta": 100.0}
LAYERS = {True: "sliding_attention", False: "full_attention"}


def network_of(config: Config, kind: str, **more: Any) -> Any:
    model = config.model
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=mlp_size(model),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=num_kv_heads(model),
        head_dim=head_dim(model),
        max_position_embeddings=model.sequence_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=False,
        attn_implementation="eager",
        sliding_window=model.attention_window,
        layer_types=[LAYERS[on] for on in windowed_layers(model)],
        **more,
    )
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))


@pytest.mark.parametrize(
    ("kind", "fields", "mesh"),
    [
        ("Ministral", {"attention_window": 7, "window_layers": "SFS"}, "2x4"),
        ("Ministral", {"attention_window": 5, "window_layers": "FS"}, "data=1,context=2,model=2"),
        ("Mistral", {"attention_window": 9}, "data=1,context=4,model=1"),
    ],
)
def test_layers_are_those_of_transformers(kind: str, fields: dict[str, Any], mesh: str) -> None:
    config = llama_config(**BASE, **fields)
    assert_next_token_parity(network_of(config, kind), config, mesh, lambda named: as_llama(named, config), TOLERANCE)
