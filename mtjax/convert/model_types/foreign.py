"""Keys of config.json that change a network, in files of types whose code in transformers does not read them."""

from collections.abc import Mapping, Set
from typing import Any

STRUCTURE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts"),
            *("num_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size"),
            *("kv_lora_rank", "q_lora_rank", "sliding_window", "local_attention", "attention_chunk_size"),
            *("qk_norm", "use_qk_norm", "qk_layernorm", "use_post_norm", "clip_qkv", "qkv_clip", "swiglu_limit"),
            *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
            *("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qkv_bias", "attention_out_bias"),
            *("lm_head_bias", "alibi", "no_rope_layers", "no_rope_layer_interval", "layer_rope_theta", "rotary_dim"),
            *("rope_scaling", "use_parallel_residual", "parallel_attn", "num_kv_shared_layers", "use_cla"),
        ),
        (),
    ),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
            *("scale_emb", "scale_depth", "partial_rotary_factor", "rotary_pct"),
        ),
        (1,),
    ),
}
"""Keys that change what is computed -> values, besides those that are false, with which they change nothing."""


def foreign(config: Mapping[str, Any], known: Set[str]) -> list[str]:
    """Returns what a config.json says of the network that its type does not have.

    transformers ignores such a key. Either it means nothing, or the weights are of a network with other code.

    Args:
      config: the config.json.
      known: keys that the type has.
    """
    return [
        f"{key} is {config[key]!r}, which this type does not have: remove it if the weights need none"
        for key, neutral in STRUCTURE.items()
        if key not in known and config.get(key) and config[key] not in neutral
    ]
