"""Kinds of values of keys of config.json, which are the same in all types: a value of another kind is refused by name.

Without it, a word such as "false" would count as true, and `{}` as false.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mtjax.errors import UserError, shortened

Json = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, and whether it is."""

FLAGS = frozenset(
    (
        *("alibi", "apply_residual_connection_post_layernorm", "attention_bias", "attention_out_bias", "bias"),
        *("classifier_bias", "decoder_bias", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"),
        *("learned_pos_emb", "mamba_conv_bias", "mamba_norm_before_gate", "mamba_proj_bias", "mamba_rms_norm"),
        *("mlp_bias", "multi_query", "new_decoder_architecture", "no_bias", "norm_bias", "norm_topk_prob"),
        *("parallel_attn", "qk_layernorm", "qk_norm", "qkv_bias", "rope_interleave", "scale_attn_weights"),
        *("scale_attn_by_inverse_layer_idx", "scale_decoder_outputs", "scale_embedding", "tie_word_embeddings"),
        *("use_bias", "use_bidirectional_attention", "use_conv_bias", "use_mem_rope", "use_parallel_residual"),
        *("use_post_norm", "use_qk_norm", "use_qkv_bias", "use_routing_bias", "use_shared_attention_adapter"),
        *("use_shared_mlp_adapter", "use_sliding_window", "is_causal", "is_encoder_decoder", "add_cross_attention"),
        *("is_gated_act", "truncate"),
    )
)
WORDS = frozenset(
    (
        *("activation", "activation_function", "afn", "hidden_act", "hidden_activation", "mamba_hidden_act"),
        *("mlp_hidden_act", "dense_act_fn", "feed_forward_proj", "norm_type", "normalization_function"),
        *("position_embedding_type", "scoring_func", "topk_method", "rope_type", "type", "hybrid_override_pattern"),
    )
)
COUNTS = frozenset(
    (
        *("adapter_rank", "attention_head_dim", "attention_hidden_size", "conv_kernel", "d_ff", "d_kv", "d_model"),
        *("decoder_sparse_step", "dim", "expand", "ffn_dim", "ffn_hidden_size", "first_k_dense_replace", "head_dim"),
        *("full_attention_interval", "global_attn_every_n_layers", "hidden_dim", "hidden_size", "intermediate_size"),
        *("kv_channels", "kv_lora_rank", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_value_head_dim", "local_attention", "mamba_d_conv"),
        *("mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_head_dim", "mamba_headdim", "mamba_n_groups"),
        *("mamba_n_heads", "mamba_ngroups", "mamba_num_heads", "max_position_embeddings", "max_seq_len"),
        *("max_window_layers", "moe_intermediate_size", "moe_k", "moe_layer_end_index", "moe_layer_interval"),
        *("moe_layer_start_index", "moe_num_experts", "moe_num_shared_experts", "moe_topk", "n_embd", "n_group"),
        *("moe_shared_expert_intermediate_size", "n_groups", "n_head", "n_heads", "n_inner", "n_layer", "n_layers"),
        *("n_mamba_heads", "n_positions", "n_routed_experts", "n_shared_experts", "no_rope_layer_interval"),
        *("num_attention_heads", "num_decoder_layers", "num_experts", "num_experts_per_tok", "num_heads"),
        *("num_hidden_layers", "num_key_value_heads", "num_kv_heads", "num_layers", "num_local_experts"),
        *("num_ln_in_parallel_attn", "num_mem_blocks", "num_nextn_predict_layers", "num_shared_experts"),
        *("original_max_position_embeddings", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("relative_attention_max_distance", "relative_attention_num_buckets", "rotary_dim", "seq_length"),
        *("shared_expert_intermediate_size", "shared_intermediate_size", "sliding_window", "ssm_state_size"),
        *("sliding_window_pattern", "_sliding_window_pattern", "state_size", "topk_group", "type_vocab_size"),
        *("v_head_dim", "vocab_size", "window_size", "word_embed_proj_dim"),
    )
)
NUMBERS = frozenset(
    (
        *("attention_dropout", "attention_in_multiplier", "attention_multiplier", "attention_out_multiplier"),
        *("attention_probs_dropout_prob", "attn_logit_softcapping", "attn_pdrop", "clip_qkv", "dim_model_base"),
        *("dropout", "dropout_rate", "embedding_multiplier", "expansion_ratio", "final_logit_softcapping"),
        *("hidden_dropout", "hidden_dropout_prob", "init_std", "initializer_factor", "initializer_range"),
        *("key_multiplier", "layer_norm_eps", "layer_norm_epsilon", "lm_head_multiplier", "logit_scale"),
        *("logits_scaling", "norm_eps", "norm_epsilon", "partial_rotary_factor", "query_pre_attn_scalar"),
        *("resid_dropout", "resid_pdrop", "residual_dropout", "residual_multiplier", "rms_norm_eps"),
        *("routed_scaling_factor", "router_scaling_factor", "scale_depth", "scale_emb", "ssm_in_multiplier"),
        *("ssm_out_multiplier", "swiglu_alpha", "swiglu_limit", "time_step_min", "time_step_max", "time_step_floor"),
        *("rope_theta", "rope_local_base_freq", "rotary_pct"),
        *("rotary_emb_base", "global_rope_theta", "local_rope_theta", "factor", "low_freq_factor", "alpha"),
        *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    )
)
OBJECTS = frozenset(("attn_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention"))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value in (0, 1)


def _is_count(value: Any) -> bool:
    # True is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


COUNT_OR_LETTERS: Kind = (
    "an integer or a string of L and G",
    lambda value: _is_count(value) or (isinstance(value, str) and value != "" and set(value) <= {"L", "G"}),
)
COUNT_OR_LIST: Kind = (
    "an integer, or a list of one for each layer",
    lambda value: _is_count(value) or (isinstance(value, list) and value != [] and all(map(_is_count, value))),
)
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(FLAGS, ("true or false", _is_flag)),
    **dict.fromkeys(WORDS, ("a string", _is_word)),
    **dict.fromkeys(COUNTS, ("an integer", _is_count)),
    "mamba_d_head": ("an integer or 'auto'", lambda value: value == "auto" or _is_count(value)),
    **dict.fromkeys(NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(OBJECTS, ("an object", _is_object)),
}
"""Keys, also of objects within config.json -> what their values must be, if they are not null."""
LISTS: Mapping[str, Kind] = {
    **dict.fromkeys(("architectures", "layer_types", "layers_block_type"), ("strings", _is_word)),
    **dict.fromkeys(("attention_layers", "mlp_layer_types"), ("strings", _is_word)),
    **dict.fromkeys(("attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers"), ("integers", _is_count)),
    "no_rope_layers": ("0 and 1", _is_flag),
    **dict.fromkeys(("layer_rope_theta", "mlp_multipliers", "ssm_multipliers"), ("numbers", _is_number)),
    **dict.fromkeys(("short_factor", "long_factor"), ("numbers", _is_number)),
    # transformers 5 writes infinity as an object.
    "time_step_limit": ("numbers", lambda value: _is_number(value) or value == {"__float__": "Infinity"}),
}
"""Keys of lists -> what their values must be."""


def of_another_kind(
    config: Json, keys: Collection[str], aliases: Mapping[str, str], kinds: Mapping[str, Kind]
) -> list[str]:
    """Returns what is wrong with values of a config.json, by the names of keys that it has.

    Args:
      config: the config.json.
      keys: that the type reads.
      aliases: other names of keys -> those in `keys`.
      kinds: keys whose values are of other kinds in this type -> these.
    """
    read = {typed: aliases.get(typed, typed) for typed in config}
    return [
        said
        for typed, key in read.items()
        if key in keys or typed in keys
        for said in _wrong(typed, key, config[typed], kinds)
    ]


def _wrong(typed: str, key: str, value: Any, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """Yields what is wrong with a value; an object's own keys stand after a dot."""
    if value is None:
        return
    if key in LISTS:
        what, is_right = LISTS[key]
        if not (isinstance(value, list | tuple) and all(map(is_right, value))):
            yield f"{typed} is {shortened(repr(value))}, but must be a list of {what}"
    elif key in KINDS:
        what, is_right = kinds.get(key, KINDS[key])
        if not is_right(value):
            yield f"{typed} is {shortened(repr(value))}, but must be {what}"
        # Objects within config.json, such as rope_parameters, have kinds by the same names.
        elif isinstance(value, dict):
            for inside, each in value.items():
                yield from _wrong(f"{typed}.{inside}", inside, each, kinds)


MISREAD = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What code raises that reads a value of a kind which it does not expect."""


def culprit(config: Json, read: Callable[[Json], Any], error: Exception) -> str | None:
    """Returns the key whose removal makes `read` succeed (for a null: also one whose removal changes the error), nulls
    first; None if there is none."""
    # Nulls first: a null where a number is needed is the usual fault, and removing another key may hide it.
    for key in sorted(config, key=lambda key: config[key] is not None):
        try:
            read({name: value for name, value in config.items() if name != key})
        except (UserError, *MISREAD) as e:
            if config[key] is not None or repr(e) == repr(error):
                continue
        return key
    return None
