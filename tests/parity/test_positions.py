"""Windows and positions that differ between layers, as transformers computes them: logits, loss and every gradient."""

from typing import Any

import numpy as np
import pytest

from mtjax.config import Config
from mtjax.config.sizes import head_dim, mlp_size, num_kv_heads, rotated_layers, windowed_layers
from tests.parity.compare import Named, assert_next_token_parity, shaken
from tests.parity.test_llama import as_llama, as_neox, llama_config, rope_parameters
from tests.tiny import tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

TOLERANCE = 2e-5
KINDS = {True: "sliding_attention", False: "full_attention"}
LONG = {
    "rope_scaling": "longrope",
    "rope_fraction": 0.5,
    "hidden_size": 64,
    "rope_short_factors": (1.0, 1.5),
    "rope_long_factors": (1.25, 3.0),
}
"""Rotates two pairs of a head of 8."""


def network_of(config: Config, kind: str) -> Any:
    model = config.model
    longest = model.rope_original_length if model.rope_scaling == "dynamic" else model.sequence_length
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=mlp_size(model),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=num_kv_heads(model),
        head_dim=head_dim(model),
        max_position_embeddings=longest,
        original_max_position_embeddings=model.rope_original_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=False,
        pad_token_id=None,
        attn_implementation="eager",
        sliding_window=model.attention_window,
        layer_types=[KINDS[on] for on in windowed_layers(model)],
        no_rope_layers=[int(on) for on in rotated_layers(model)],
    )
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))


def apart(named: Named, config: Config) -> dict[str, np.ndarray]:
    """Phi-3's fused matrices under Llama's names."""
    model, found = config.model, dict(named)
    query, key = model.num_heads * head_dim(model), num_kv_heads(model) * head_dim(model)
    for name in [name for name in named if "qkv_proj" in name]:
        parts = np.split(found.pop(name), [query, query + key])
        found |= {name.replace("qkv", letter): part for letter, part in zip("qkv", parts, strict=True)}
    for name in [name for name in named if "gate_up_proj" in name]:
        parts = np.split(found.pop(name), 2)
        found |= {name.replace("gate_up", one): part for one, part in zip(("gate", "up"), parts, strict=True)}
    return found


@pytest.mark.parametrize(
    ("kind", "fields", "mesh"),
    [
        ("Ministral", {"attention_window": 7, "window_layers": "SFS"}, "2x4"),
        ("Ministral", {"attention_window": 5, "window_layers": "FS"}, "data=1,context=2,model=2"),
        pytest.param("Mistral", {"attention_window": 9}, "data=1,context=4,model=1", marks=pytest.mark.exhaustive),
        ("SmolLM3", {"rope_layers": "RNR"}, "2x4"),
        ("SmolLM3", {"position": "none"}, "1x1"),
        ("Phi3", LONG | {"rope_original_length": 64}, "1x1"),
        ("Phi3", LONG | {"rope_original_length": 16, "attention_window": 5}, "data=1,context=2,model=2"),
        ("Llama", {"rope_scaling": "dynamic", "rope_original_length": 16, "rope_factor": 4.0}, "1x1"),
    ],
)
def test_layers_are_those_of_transformers(kind: str, fields: dict[str, Any], mesh: str) -> None:
    config = llama_config(**{"num_layers": 3, "num_kv_heads": 2, "rope_theta": 100.0} | fields)
    network = network_of(config, kind)
    assert_next_token_parity(network, config, mesh, lambda named: as_llama(apart(named, config), config), TOLERANCE)


def test_layers_with_a_window_have_a_base_of_their_own_which_is_not_scaled() -> None:
    fields = {"rope_scaling": "linear", "rope_factor": 4.0, "attention_window": 7, "window_layers": "SFS"}
    config = llama_config(**fields, num_layers=3, num_kv_heads=2, rope_theta=100.0, rope_local_theta=10.0)
    network, of_positions = network_of(config, "Ministral"), torch.arange(24)[None]
    local = transformers.MinistralConfig(
        hidden_size=32, num_attention_heads=8, head_dim=4, rope_parameters={"rope_type": "default", "rope_theta": 10.0}
    )
    rotary = transformers.models.ministral.modeling_ministral.MinistralRotaryEmbedding(local)

    def swap(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, named | {"position_embeddings": rotary(torch.zeros(1), of_positions)}

    for number in (0, 2):
        network.model.layers[number].register_forward_pre_hook(swap, with_kwargs=True)
    assert_next_token_parity(network, config, "2x4", lambda named: as_llama(named, config), TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "scaled", "mesh"),
    [
        ("Falcon", True, "2x4"),
        pytest.param("Bloom", False, "1x1", marks=pytest.mark.exhaustive),
        ("Bloom", False, "data=1,context=2,model=2"),
    ],
)
def test_alibi_is_that_of_transformers(kind: str, scaled: bool, mesh: str) -> None:
    """12 heads, no power of 2. BLOOM is without the norm of its embeddings."""
    config = tiny_config(
        position="alibi",
        alibi_scaled=scaled,
        activation="gelu_exact" if scaled else "gelu",
        num_layers=3,
        hidden_size=48,
        num_heads=12,
        sequence_length=24,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    own = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False, "num_hidden_layers": 3}
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=config.model.vocab_size,
        hidden_size=48,
        n_layer=3,
        num_attention_heads=12,
        attn_implementation="sdpa" if scaled else "eager",  # Falcon's eager attention adds the biases twice
        **(own if scaled else {"n_head": 12}),
    )
    network = shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))
    network.eval()
    if not scaled:
        network.transformer.word_embeddings_layernorm = torch.nn.Identity()

    def as_ours(named: Named) -> dict[str, Any]:
        names = {
            "transformer.h": "gpt_neox.layers",
            "self_attention": "attention",
            "transformer.ln_f": "gpt_neox.final_layer_norm",
        }
        found = {}
        for name, array in named.items():
            for theirs, neox in names.items():
                name = name.replace(theirs, neox)
            found[name.replace("transformer.word_embeddings", "gpt_neox.embed_in")] = array
        ours = as_neox(found | {"embed_out.weight": found["gpt_neox.embed_in.weight"]}, config)
        del ours["output"]
        return ours

    assert_next_token_parity(network, config, mesh, as_ours, TOLERANCE)
