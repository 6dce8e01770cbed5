"""The theory's book against the models: every parameter by name, logical names and shape; T5's and BERT's plans."""

import jax
import pytest

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.communication import contract_of, symbols_of
from mtjax.analysis.counts import parameters, peak_stage_counts, trainable_counts
from mtjax.analysis.flops import model_flops
from mtjax.analysis.memory import stage_memory
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from tests.tiny import LATENT, MODERNBERT, program_of

MODELS = {
    "gpt": {},
    "gpt, grouped": {"num_kv_heads": 2, "position": "rope", "activation": "geglu"},
    "gpt, post-LN, narrow tables": {"norm_placement": "post", "embedding_size": 24, "tie_embeddings": False},
    "llama": {"family": "llama", "num_kv_heads": 4, "qk_norm": True},
    "llama, norms of each head, sinks": {
        "family": "llama",
        "num_kv_heads": 4,
        "qk_norm": True,
        "qk_norm_scope": "each_head",
        "qk_norm_kind": "layernorm",
        "qk_norm_bias": True,
        "attention_sinks": True,
        "attention_bias": "qkv",
    },
    "llama, experts": {"family": "llama", "num_experts": 4, "expert_size": 24, "shared_expert_size": 16},
    "gpt, experts, biases of routers": {"num_experts": 4, "router_score": "sigmoid", "router_bias": True},
    "gpt, experts with biases and a gate": {
        "num_experts": 4,
        "expert_bias": True,
        "router_linear_bias": True,
        "activation": "swiglu_clamped",
        "shared_expert_size": 16,
        "shared_expert_gate": True,
    },
    "llama, experts but in the first layer": {"family": "llama", "num_experts": 4, "first_dense_layers": 1},
    "llama, experts, tokens ahead": {
        "family": "llama",
        "num_experts": 4,
        "first_dense_layers": 1,
        "mtp_num_layers": 2,
        "router_bias": True,
        "attention_bias": "qkv",
    },
    "llama, experts in every third layer": {"family": "llama", "num_experts": 4, "moe_every": 3, "num_layers": 6},
    "hybrid": {"family": "hybrid", "layer_pattern": "M-M*", "num_layers": 4, "ssm_heads": 8, "ssm_state": 10},
    "hybrid, gated delta nets, gated attention": {
        "family": "hybrid",
        "layer_pattern": "G-*-",
        "num_layers": 4,
        "ssm_heads": 8,
        "ssm_state": 10,
        "ssm_groups": 4,
        "attention_output_gate": True,
        "bias": True,
    },
    "hybrid, shared blocks": {
        "family": "hybrid",
        "layer_pattern": "MZz",
        "num_layers": 3,
        "ssm_heads": 8,
        "activation": "geglu_exact",
        "head_dim": 10,
        "block_rank": 6,
        "block_attention_adapters": True,
    },
    "hybrid, adapters": {"family": "hybrid", "layer_pattern": "MH-*", "num_layers": 4, "ssm_heads": 8, "lora_rank": 2},
    "hybrid, adapters of a delta net and gated attention": {
        "family": "hybrid",
        "layer_pattern": "G-*",
        "num_layers": 3,
        "ssm_heads": 8,
        "attention_output_gate": True,
        "lora_rank": 2,
        "lora_targets": "mixers",
    },
    "hybrid, adapters of shared blocks": {
        "family": "hybrid",
        "layer_pattern": "MZ",
        "num_layers": 2,
        "ssm_heads": 8,
        "activation": "geglu_exact",
        "head_dim": 10,
        "block_rank": 6,
        "block_attention_adapters": True,
        "lora_rank": 2,
    },
    "hybrid, adapters of experts": {
        "family": "hybrid",
        "layer_pattern": "ME",
        "num_layers": 2,
        "ssm_heads": 8,
        "num_experts": 4,
        "lora_rank": 2,
    },
    "hybrid, mixers side by side": {
        "family": "hybrid",
        "layer_pattern": "H-M*",
        "num_layers": 4,
        "ssm_heads": 8,
        "ssm_norm": False,
        "activation": "swiglu",
    },
    "hybrid, experts, heads of state spaces that share groups": {
        "family": "hybrid",
        "layer_pattern": "ME*E",
        "num_layers": 4,
        "num_experts": 4,
        "ssm_head_dim": 4,
        "ssm_groups": 1,
        "num_kv_heads": 4,
    },
    "bert": {"family": "bert"},
    "bert, post-LN, one head": {"family": "bert", "norm_placement": "post", "sentence_order": False},
    "bert, untied": {"family": "bert", "tie_embeddings": False, "num_token_types": 0},
    "bert, ModernBERT": MODERNBERT,
    "gpt, adapters": {"lora_rank": 4},
    "llama, adapters of attention": {"family": "llama", "num_kv_heads": 4, "lora_rank": 2, "lora_targets": "attention"},
    "llama, latent attention, adapters": {"family": "llama", "q_lora_rank": 14, "lora_rank": 2, **LATENT},
    "llama, experts, adapters": {
        "family": "llama",
        "num_experts": 4,
        "shared_expert_size": 16,
        "first_dense_layers": 1,
        "lora_rank": 2,
    },
    "bert, adapters and a head": {"family": "bert", "head": "classification", "lora_rank": 2, "lora_targets": "mlp"},
    "gpt, finetuned": {"head": "classification", "num_labels": 3},
    "bert, finetuned": {"family": "bert", "head": "regression"},
    "bert, answers in a text": {"family": "bert", "head": "spans"},
    "t5": {"family": "t5", "decoder_sequence_length": 8, "num_decoder_layers": 3},
    "t5, Megatron's": {"family": "t5", "position": "learned", "norm": "layernorm", "bias": True},
    "t5 1.1": {"family": "t5", "activation": "geglu", "tie_embeddings": False, "head_dim": 8},
    "retro": {"family": "retro", "num_layers": 4, "retro_chunk": 4, "retro_first": 2, "retro_every": 2},
    "retro, one layer of each, no final norm": {
        "family": "retro",
        "retro_chunk": 8,
        "retro_first": 1,
        "retro_encoder_layers": 1,
        "retro_final_norm": False,
        "retro_frozen": "encoder",
        "norm": "rmsnorm",
    },
    "umt5": {"family": "t5", "relative_bias_layers": "all", "num_decoder_layers": 3},
}


UNREAD = MODELS["retro"] | {"retro_frozen": "retrieval", "retro_reads": False}


@pytest.mark.parametrize("fields", [*MODELS.values(), UNREAD], ids=[*MODELS, "retro, the decoder alone"])
def test_every_parameter_of_a_model_stands_in_the_book(fields):
    program = program_of("1x1", **fields)
    axes = jax.tree.leaves(program.logical_axes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract_parameters)
    real = {
        jax.tree_util.keystr(path, simple=True, separator="."): (names, leaf.shape)
        for (path, leaf), names in zip(leaves, axes, strict=True)
    }
    assert {w.name: (w.names, w.shape) for w in anatomy_of(program.config.model).weights} == real


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_a_device_holds_and_gathers_is_what_the_layout_says(fields, zero):
    mesh = "2x4" if "heads" not in str(fields) else "4x2"
    program = program_of("data=2,expert=2,model=2" if "num_experts" in fields else mesh, zero=zero, **fields)
    plan = Plan.of(program.config, program.mesh_shape)
    held = peak_stage_counts(anatomy_of(program.config.model), plan)
    shards = zip(
        jax.tree.leaves(program.state_sharding.parameters), jax.tree.leaves(program.abstract_parameters), strict=True
    )
    sizes = [jax.numpy.prod(jax.numpy.array(place.shard_shape(leaf.shape))).item() for place, leaf in shards]
    in_parts = held if zero == 3 else trainable_counts(anatomy_of(program.config.model), plan)  # what ZeRO splits
    experts = in_parts.experts - in_parts.replicated_experts
    split, ways = in_parts.all - in_parts.replicated - experts, plan.mesh.data
    left = split - split // (ways * plan.mesh.expert) + experts - experts // ways
    assert sum(sizes) == held.all - (left if zero else 0)


def test_a_t5_is_planned_by_its_parts_alone():
    """An encoder and a decoder of 24 layers; the decoder's layers have three sublayers."""
    run = config.load("t5-3b")
    anatomy, plan = anatomy_of(run.model), Plan.of(run, parse_mesh("16x4"))
    layer = next(line for line in contract_of(anatomy, plan).lines if line.phase == "layer forward")
    assert (layer.count, layer.elements) == ("2*layers*microbatches", "batch*sequence*hidden")
    decoder = [line for line in contract_of(anatomy, plan).lines if "decoder_sequence" in line.elements]
    assert "3*decoder_layers*microbatches" in {line.count for line in decoder}
    assert symbols_of(anatomy, plan)["decoder_layers"] == 24
    assert parameters(anatomy) == 2_851_598_336
    assert stage_memory(anatomy, plan).weights == 4 * peak_stage_counts(anatomy, plan).all
    # 2 FLOPs a parameter and token, three passes, but for what is looked up; attention and logits beside them.
    assert model_flops(anatomy) > 6 * 512 * parameters(anatomy) * 0.4
