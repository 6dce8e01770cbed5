"""Llama and the other decoders that settings make: sizes, meshes, what grouped queries share."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mtjax import config as configs
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Config
from mtjax.layout.layouts import TENSOR
from mtjax.models.language_model import model_class
from mtjax.sharding.axes import use_rules
from tests.counted import rank_parameters
from tests.same_numbers import assert_same
from tests.tiny import LATENT, mesh_of, program_of, run_steps, tiny_config

GROUPED: dict[str, Any] = {"family": "llama", "num_kv_heads": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
MIXED: dict[str, Any] = {
    "position": "rope",
    "activation": "geglu",
    "num_kv_heads": 4,
    "tie_embeddings": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LATENTS: dict[str, Any] = {"family": "llama", "q_lora_rank": 28, "attention_dropout": 0.1, **LATENT}


DIFFERENT = GROUPED | {"num_layers": 4, "attention_window": 5, "window_layers": "SSF", "rope_layers": "RN"}
"""Layers of four kinds, with dropout."""


@pytest.mark.parametrize(
    ("fields", "mesh", "layout"),
    [
        (GROUPED, "2x4", {"sequence_parallel": True, "zero": 3}),
        (LATENTS, "2x2", {"sequence_parallel": True, "zero": 3}),
        pytest.param(MIXED, "1x8", {}, marks=pytest.mark.long),
        pytest.param(
            DIFFERENT,
            "data=1,stage=2,context=2,model=2",
            {"pipeline_schedule": "interleaved", "chunks": 2, "zero": 1},
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        "Llama, 2 key heads on 4 ways, split sequence, ZeRO-3",
        "latent attention, split sequence, ZeRO-3",
        "GPT, 4 key heads on 8 ways",
        "layers that differ, stages with two chunks, shared samples",
    ],
)
def test_losses_agree_on_every_mesh(fields: dict[str, Any], mesh: str, layout: dict[str, Any]) -> None:
    expected = run_steps(program_of("1x1", **fields), 4)[1]
    found = run_steps(program_of(mesh, recompute="full", microbatch_size=2, **fields, **layout), 4)[1]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=tolerance)
    assert len({m["loss"] for m in expected}) == 4
    assert_same(program_of(mesh, recompute="full", microbatch_size=2, **fields, **layout), program_of("1x1", **fields))


@pytest.mark.parametrize("fields", [GROUPED, MIXED | {"head_dim": 6}, LATENTS], ids=["Llama", "GPT", "latents"])
def test_parameters_count_what_the_formulas_say(fields: dict[str, Any]) -> None:
    program = program_of("2x4", recompute="full", microbatch_size=2, **fields)
    leaves = jax.tree.leaves(program.abstract_state.parameters)
    shape = anatomy_of(program.config.model)
    assert sum(leaf.size for leaf in leaves) == parameters(shape)
    held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert held == rank_parameters(shape, 4)


def abstract_size(config: Config) -> int:
    """Parameters of a config's model, which is not made."""
    with use_rules(TENSOR.rules), jax.set_mesh(mesh_of("1x1")):
        model = nnx.eval_shape(lambda: model_class(config)(config, key=jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
"""Parameters of the models on Hugging Face."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    config = configs.load(name)
    assert abstract_size(config) == parameters(anatomy_of(config.model)) == PUBLISHED[name]


@pytest.mark.torch
@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_sizes_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
    model = configs.load(name).model
    theirs = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.mlp_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
    )
    with torch.device("meta"):
        network = transformers.LlamaForCausalLM(theirs)
    assert sum(p.numel() for p in network.parameters()) == PUBLISHED[name]


def test_megatrons_example_counts_6240() -> None:
    sizes = {"num_layers": 2, "hidden_size": 12, "num_heads": 4, "vocab_size": 100, "sequence_length": 4}
    config = tiny_config(**sizes, vocab_multiple=1, tie_embeddings=False)
    assert abstract_size(config) == parameters(anatomy_of(config.model)) == 6240
