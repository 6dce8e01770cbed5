"""A tiny network of each decoder type of transformers: odd sizes, and at least one layer more than its pattern has."""

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {"head_dim": 6}
"""Heads that together are wider than the hidden states."""
WINDOW = {"sliding_window": 5}
OF_GPT2 = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Case:
    """A type of transformers, and the settings of its tiny config."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: SIZES)
    length: int = 24
    """Tokens of a sequence."""
    attention: str = "eager"
    """transformers' implementation; its eager one adds Falcon-RW's bias twice."""

    @property
    def config(self) -> dict[str, Any]:
        """The keyword arguments of the config."""
        return {key: value for key, value in (self.base | self.settings).items() if value != "absent"}


def without(*names: str) -> dict[str, Any]:
    """Settings that take names from the sizes."""
    return dict.fromkeys(names, "absent")


def longrope(width: int) -> dict[str, Any]:
    """RoPE with factors for each of the rotated channels of a head."""
    short, long = ([start + 0.25 * i for i in range(width // 2)] for start in (1.0, 1.5))
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


OF_MAMBA2: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 8,
    "state_size": 10,
    "n_groups": 2,
    "chunk_size": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STATE_SPACE = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 7}
NEMOTRON_H = {
    "num_hidden_layers": "absent",
    "head_dim": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 10,
    "n_groups": 2,
    "chunk_size": 7,
    "time_step_min": 0.4,
}

QWEN3_NEXT = {
    "head_dim": 8,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 12,
    "linear_key_head_dim": 10,
    "num_experts": 5,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts_per_tok": 3,
}

ZAMBA2 = {
    "num_key_value_heads": 6,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "adapter_rank": 3,
    "chunk_size": 7,
}

CASES = {
    "mamba2": Case("mamba2", base=OF_MAMBA2),
    "mamba2, three taps, limited, tied": Case(
        "mamba2", {"conv_kernel": 3, "time_step_limit": (0.1, float("inf")), "tie_word_embeddings": True}, OF_MAMBA2
    ),
    "nemotron_h": Case("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M-M*-M-M*"}),
    "nemotron_h with experts": Case(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "ME*EM",
            "n_routed_experts": 8,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": Case("bamba", {**STATE_SPACE, "num_hidden_layers": 4, "attn_layer_indices": [1]}),
    "falcon_h1": Case(
        "falcon_h1",
        {
            **STATE_SPACE,
            "mamba_d_ssm": 48,
            "mamba_d_conv": 3,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.8, 0.6],
            "key_multiplier": 0.39,
            "attention_in_multiplier": 0.5,  # powers of 2, whose products with other factors are exact
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 2.0,
            "ssm_multipliers": [0.9, 1.5, 0.7, 1.2, 0.8],
            "ssm_out_multiplier": 0.7,
        },
    ),
    "falcon_h1, normalized": Case(
        "falcon_h1",
        {**STATE_SPACE, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 10},
    ),
    "zamba2": Case(
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 5,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "time_step_min": 0.4,
        },
    ),
    "zamba2, one block, grouped keys": Case(
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_mem_blocks": 1,
        },
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        {
            **STATE_SPACE,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 5,
            "shared_intermediate_size": 28,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoehybrid without experts, rotated": Case(
        "granitemoehybrid",
        {
            **STATE_SPACE,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 28,
            "position_embedding_type": "rope",
        },
    ),
    "qwen3_next": Case("qwen3_next", {**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_next, three taps, biases, dense layers, a key for each query": Case(
        "qwen3_next",
        {
            **QWEN3_NEXT,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
        length=70,  # transformers' chunks have 64
    ),
    "llama, biases of attention": Case("llama", {**WIDE, "attention_bias": True}),
    "llama, biases of the MLP, tied, llama3": Case(
        "llama", {"mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    ),
    "llama, yarn's mscale": Case("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama, dynamic": Case(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16}
    ),
    "mistral": Case("mistral", {**WIDE, **WINDOW}),
    "mistral without a window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2"),
    "qwen2, windows": Case(
        "qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen3, windows, biases": Case(
        "qwen3",
        {**WIDE, **WINDOW, "use_sliding_window": True, "max_window_layers": 1, "attention_bias": True},
    ),
    "gemma": Case("gemma", WIDE),
    "gemma2": Case(
        "gemma2",
        {**WIDE, **WINDOW, "num_hidden_layers": 3, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3_text": Case(
        "gemma3_text",
        {**WIDE, **WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 3, "query_pre_attn_scalar": 7},
    ),
    "gemma3_text, scaled": Case(
        "gemma3_text",
        {**WIDE, **WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "phi": Case("phi", {"hidden_size": 48}),
    "phi, norms of heads": Case("phi", {"hidden_size": 48, "qk_layernorm": True}),
    "phi3": Case("phi3", WINDOW),
    "phi3, long": Case(
        "phi3",
        {"hidden_size": 96, "partial_rotary_factor": 0.75, "rope_parameters": longrope(12)}
        | {"original_max_position_embeddings": 16},
    ),
    "phi3, short": Case(
        "phi3",
        {"rope_parameters": longrope(4), "original_max_position_embeddings": 32},
    ),
    "olmo": Case("olmo", {"clip_qkv": 0.3}),
    "olmo2": Case("olmo2"),
    "olmo3": Case(
        "olmo3",
        {**WINDOW, "num_hidden_layers": 5}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ),
    "granite": Case(
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.7, "logits_scaling": 7.0}
        | {"attention_bias": True},
    ),
    "starcoder2": Case("starcoder2", WINDOW),
    "gpt_neox": Case("gpt_neox", {"hidden_size": 48, **without("num_key_value_heads")}),
    "gpt_neox, one after the other": Case(
        "gpt_neox",
        {"use_parallel_residual": False, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}
        | {"attention_bias": False, **without("num_key_value_heads")},
    ),
    "gptj": Case("gptj", {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 32, "rotary_dim": 4}, OF_GPT2),
    "opt": Case(
        "opt", {"ffn_dim": 40, "word_embed_proj_dim": 24, **without("intermediate_size", "num_key_value_heads")}
    ),
    "opt 350m": Case(
        "opt",
        {"ffn_dim": 40, "word_embed_proj_dim": 14, "do_layer_norm_before": False}
        | without("intermediate_size", "num_key_value_heads"),
    ),
    "opt without biases and weights of norms": Case(
        "opt",
        {"ffn_dim": 40, "word_embed_proj_dim": 24, "enable_bias": False, "layer_norm_elementwise_affine": False}
        | without("intermediate_size", "num_key_value_heads"),
    ),
    "bloom": Case("bloom", {"hidden_size": 24, "n_head": 6, "n_layer": 2}, OF_GPT2),
    "falcon 7B": Case("falcon", without("intermediate_size", "num_key_value_heads")),
    "falcon 40B": Case(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, **without("intermediate_size", "num_key_value_heads")},
    ),
    "falcon 11B": Case(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 40}
        | {"tie_word_embeddings": False, **without("intermediate_size", "num_key_value_heads")},
    ),
    "falcon rw": Case(
        "falcon",
        {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
        | without("intermediate_size", "num_key_value_heads"),
        attention="sdpa",
    ),
    "mpt": Case(
        "mpt",
        {"d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 32}
        | {"attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.6}},
        OF_GPT2,
    ),
    "cohere": Case("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": Case("cohere2", {**WINDOW, "num_hidden_layers": 5}),
    "stablelm": Case("stablelm", {"hidden_size": 48, "partial_rotary_factor": 0.5}),
    "stablelm, parallel": Case(
        "stablelm",
        {"hidden_size": 48, "partial_rotary_factor": 0.5, "use_qkv_bias": True, "qk_layernorm": True}
        | {"use_parallel_residual": True},
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5}),
    "glm4": Case("glm4", {"head_dim": 12}),
    "exaone4": Case("exaone4", {**WINDOW, "num_hidden_layers": 5}),
    "exaone4 without windows": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": Case("ernie4_5", {**WIDE, "use_bias": True}),
    "hunyuan_v1_dense": Case(
        "hunyuan_v1_dense", {**WIDE, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}
    ),
    "nemotron": Case("nemotron", {"head_dim": 8}),
    "ministral": Case(
        "ministral",
        {**WIDE, **WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"num_hidden_layers": 3},
    ),
    "ministral3": Case(
        "ministral3",
        {**WIDE, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "mixtral": Case("mixtral", {**WINDOW, "num_local_experts": 3}),
    "qwen2_moe": Case(
        "qwen2_moe",
        {
            **MOE,
            "num_experts": 3,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_moe": Case("qwen3_moe", {**MOE, **WIDE, "num_experts": 3, "norm_topk_prob": True}),
    "olmoe": Case("olmoe", {"num_experts": 3, "num_experts_per_tok": 2, "clip_qkv": 0.3}),
    "dots1": Case(
        "dots1",
        {**MOE, **WINDOW, "max_window_layers": 2, "num_hidden_layers": 3, "n_routed_experts": 4, "n_shared_experts": 2}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    ),
    "granitemoe": Case("granitemoe", {"num_local_experts": 3, "logits_scaling": 7.0, "attention_multiplier": 0.7}),
    "deepseek_v2": Case(
        "deepseek_v2",
        {**MOE, **LATENT, "q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        {**MOE, **LATENT, "q_lora_rank": 14, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {**WIDE, **WINDOW, "num_hidden_layers": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "glm": Case("glm", {"head_dim": 12}),
    "arcee": Case("arcee", {**WIDE, "mlp_bias": True}),
    "jais2": Case("jais2", WIDE),
    "helium": Case("helium", {"head_dim": 4, "attention_bias": True}),
    "seed_oss": Case("seed_oss", {**WIDE, "mlp_bias": True}),
    "seed_oss, bias of the output": Case("seed_oss", {**WIDE, "attention_bias": False, "attention_out_bias": True}),
    "cwm": Case("cwm", {**WIDE, **WINDOW, "num_hidden_layers": 5, "rope_parameters": LLAMA3 | {"rope_theta": 1e6}}),
    "hyperclovax": Case(
        "hyperclovax",
        {**WIDE, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 0.2},
    ),
    "exaone": Case("exaone", WIDE),
    "internlm3": Case("internlm3", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": Case("iquestcoder", WIDE),
    "vaultgemma": Case(
        "vaultgemma",
        {**WIDE, **WINDOW, "num_hidden_layers": 3, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
    ),
    "persimmon": Case("persimmon", {"hidden_size": 48, **without("num_key_value_heads")}),
    "biogpt": Case("biogpt", without("num_key_value_heads")),
    "gpt_bigcode": Case("gpt_bigcode", {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 32}, OF_GPT2),
    "gpt_bigcode, all heads": Case(
        "gpt_bigcode", {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 32, "multi_query": False}, OF_GPT2
    ),
    "gpt_neo": Case(
        "gpt_neo",
        {"num_layers": 3, "num_heads": 6, "hidden_size": 24, "max_position_embeddings": 64, "window_size": 5}
        | {"attention_types": [[["global"], 1], [["local"], 2]]},
        OF_GPT2,
    ),
    "openai-gpt": Case("openai-gpt", {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 32}, OF_GPT2),
    "codegen": Case("codegen", {"n_embd": 48, "n_head": 8, "n_layer": 2, "n_positions": 32, "rotary_dim": 4}, OF_GPT2),
    "youtu": Case("youtu", {**LATENT, "q_lora_rank": 14}),
    "minicpm3": Case(
        "minicpm3", {**LATENT, "q_lora_rank": 14, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 9}
    ),
    "sarvam_mla": Case("sarvam_mla", {**MOE, **LATENT, "n_routed_experts": 4}),
    "glm4_moe": Case(
        "glm4_moe",
        {**MOE, "head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3}
        | {"use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_lite": Case("glm4_moe_lite", {**MOE, **LATENT, "q_lora_rank": 14, "n_routed_experts": 4}),
    "solar_open": Case("solar_open", {**MOE, **WIDE, "n_routed_experts": 4, **without("intermediate_size")}),
    "sarvam_moe": Case("sarvam_moe", {**MOE, **WIDE, "n_routed_experts": 4, "attention_bias": True}),
    "minimax_m2": Case(
        "minimax_m2",
        {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "exaone_moe": Case("exaone_moe", {**MOE, **WINDOW, "num_hidden_layers": 5, "num_experts": 4}),
    "mellum": Case(
        "mellum",
        {**MOE, **WIDE, **WINDOW, "num_experts": 3, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "flex_olmo": Case("flex_olmo", {"num_experts": 3, "num_experts_per_tok": 2}),
    "flint": Case("flint", {**MOE, **WIDE, **WINDOW, "num_experts": 3, "num_hidden_layers": 5}),
    "hy_v3": Case("hy_v3", {**MOE, **WIDE, "num_experts": 4, "attention_bias": True}),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", {**WIDE, "num_experts": 3, "moe_topk": 2}),
    "granitemoeshared": Case(
        "granitemoeshared", {"num_local_experts": 3, "logits_scaling": 7.0, "shared_intermediate_size": 28}
    ),
    "granite_swa": Case(
        "granite_swa",
        {**WINDOW, "num_hidden_layers": 5, "attention_multiplier": 0.7, "layer_rope_theta": [5e4, 1e4, 1e4, 1e4, 5e4]},
    ),
    "granitemoe_swa": Case(
        "granitemoe_swa",
        {**WINDOW, "num_hidden_layers": 3, "num_local_experts": 3, "layer_rope_theta": [0, 1e4, 1e4]}
        | {"shared_intermediate_size": 28},
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        {**WIDE, "moe_intermediate_size": 20, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
}
