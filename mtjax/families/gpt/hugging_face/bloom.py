"""transformers' `bloom`, `mpt`, `opt` and `falcon`: with ALiBi, learned positions, or RoPE."""

from dataclasses import replace

from mtjax.config import Model
from mtjax.config.sizes import embedding_width, num_kv_heads
from mtjax.convert.model_types.decoder import NO_BIASES, decoder, layer_norm, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames, decoder_rows
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, always, biases
from mtjax.convert.model_types.rope import rope
from mtjax.convert.model_types.rows import linear
from mtjax.convert.table import Row
from mtjax.errors import UserError

BLOOM_NAMES = ModuleNames(
    prefix="transformer.",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    layer="h.{layer}",
    attention="self_attention",
    qkv="query_key_value",
    qkv_order="groups",
    attention_output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)
ALIBI_BIASES = (biases(always="all", with_mlp=True), always(position="alibi"))


BLOOM = decoder(
    "bloom",
    "Bloom",
    {"hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": 250_880, "layer_norm_epsilon": 1e-5}
    | {"initializer_range": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True}
    | {"seq_length": 2048},
    layer_norm("layer_norm_epsilon"),
    size_fields(
        num_layers="n_layer",
        num_heads="n_head",
        num_kv_heads="",
        mlp_size="",
        sequence_length="seq_length",
        hidden_dropout="hidden_dropout",
    ),
    *ALIBI_BIASES,
    # Bloom's GELU is the tanh approximation; config.json does not name it.
    always(embedding_norm=True, activation="gelu"),
    names=BLOOM_NAMES,
    only={"apply_residual_connection_post_layernorm": (False,)},
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
)

WITHOUT_EFFECT = {
    "expansion_ratio": (4,),
    "no_bias": (True,),
    "logit_scale": (None,),
    "learned_pos_emb": (True,),
    "norm_type": ("low_precision_layernorm",),
    "embedding_fraction": (1.0,),
}
"""Keys that transformers' code of MPT ignores: other values are of models that it computes wrongly."""
IN_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
}
"""The same within attn_config."""


def _read_attention(values: Json) -> Settings:
    found = values.get("attn_config") or {}
    # `only` of the type checks outer keys; these are in an object.
    wrong = [
        f"{key} of attn_config is {found[key]!r}, but must be {allowed[0]!r}"
        for key, allowed in IN_ATTENTION.items()
        if key in found and found[key] not in allowed
    ]
    if wrong:
        raise UserError("; ".join(wrong))
    scale = found.get("softmax_scale")
    settings = {"qkv_clip": found.get("clip_qkv"), "attention_dropout": float(found.get("attn_pdrop") or 0.0)}
    return settings | {"attention_scale": scale or None}


def _write_attention(model: Model) -> Json:
    scale, clip, rate = model.attention_scale, model.qkv_clip, model.attention_dropout
    keys = {"attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False}
    return {"attn_config": {**keys, "clip_qkv": clip, "softmax_scale": scale, "attn_pdrop": rate or 0}}


MPT = decoder(
    "mpt",
    "Mpt",
    {"d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50_368, "max_seq_len": 2048}
    | {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "resid_pdrop": 0.0, "tie_word_embeddings": True},
    layer_norm("layer_norm_epsilon"),
    size_fields(
        num_layers="n_layers",
        hidden_size="d_model",
        num_heads="n_heads",
        num_kv_heads="",
        mlp_size="",
        sequence_length="max_seq_len",
        attention_dropout="",
        hidden_dropout="resid_pdrop",
    ),
    NO_BIASES,
    # transformers sets the biases of MPT's norms to None, so that published weights can be loaded.
    always(position="alibi", norm_bias=False, activation="gelu_exact"),
    ConfigKeys(("attn_config",), _read_attention, _write_attention),
    aliases={"num_hidden_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads"},
    names=ModuleNames(
        prefix="transformer.",
        embedding="wte",
        final_norm="norm_f",
        layer="blocks.{layer}",
        attention="attn",
        qkv="Wqkv",
        attention_output="out_proj",
        attention_norm="norm_1",
        mlp_norm="norm_2",
        mlp="ffn",
        up="up_proj",
        down="down_proj",
    ),
    only=WITHOUT_EFFECT,
)


def _read_width(values: Json) -> Settings:
    width = values.get("word_embed_proj_dim") or values["hidden_size"]
    return {"embedding_size": None if width == values["hidden_size"] else width}


def _opt_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder with matrices between its tables and its hidden states (OPT-350M)."""
    # The matrices have no biases. In models of one width these rows fit no parameter, and are left out.
    ends = ("project_in", "project_out")
    return *decoder_rows(names, model), *(
        linear(end, f"{names.prefix}decoder.{end}", "embed", "features")[0] for end in ends
    )


OPT = decoder(
    "opt",
    "OPT",
    {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50_272}
    | {"max_position_embeddings": 2048, "activation_function": "relu", "dropout": 0.1, "attention_dropout": 0.0}
    | {"init_std": 0.02, "tie_word_embeddings": True, "enable_bias": True}
    | {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
    # torch's default epsilon, which config.json does not have.
    always(family="gpt", norm="layernorm", norm_epsilon=1e-5, position="learned"),
    size_fields(num_kv_heads="", mlp_size="ffn_dim", init_std="init_std", hidden_dropout="dropout"),
    activation("activation_function", gate=False),
    biases("enable_bias", "enable_bias"),
    ConfigKeys(
        ("word_embed_proj_dim",),
        _read_width,
        lambda model: {"word_embed_proj_dim": embedding_width(model)},
        {"embedding_size": "word_embed_proj_dim"},
    ),
    ConfigKeys(
        ("do_layer_norm_before",),
        lambda values: {"norm_placement": "pre" if values["do_layer_norm_before"] else "post"},
        lambda model: {"do_layer_norm_before": model.norm_placement == "pre"},
    ),
    ConfigKeys(
        ("layer_norm_elementwise_affine",),
        lambda values: {"norm_weight": "scale" if values["layer_norm_elementwise_affine"] else "none"},
        lambda model: {"layer_norm_elementwise_affine": model.norm_weight != "none"},
    ),
    names=ModuleNames(
        embedding="decoder.embed_tokens",
        positions="decoder.embed_positions",
        # transformers adds 2 to all positions, so that the table's first two rows are never read.
        positions_skip=2,
        final_norm="decoder.final_layer_norm",
        layer="decoder.layers.{layer}",
        attention_norm="self_attn_layer_norm",
        attention_output="out_proj",
        mlp="",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    ),
    rows=_opt_rows,
    only={"_remove_final_layer_norm": (False,)},
)

FALCON_ROPE = rope()


def _read_falcon(values: Json) -> Settings:
    """Reads the structure of a layer: Falcon 40B and its successors, Falcon 7B, or Falcon-RW."""
    if not values["new_decoder_architecture"]:
        # num_kv_heads is not read without the new architecture.
        kv_heads = 1 if values["multi_query"] else values["num_attention_heads"]
        found = {"num_kv_heads": kv_heads, "parallel_residual": "one_norm" if values["parallel_attn"] else "no"}
    elif not values["parallel_attn"]:
        raise UserError("parallel_attn is False, but must be True with new_decoder_architecture")
    else:
        # transformers takes null as 2; Falcon 11B has 1.
        norms = values.get("num_ln_in_parallel_attn") or 2
        kv_heads = values.get("num_kv_heads") or values["num_attention_heads"]
        found = {"num_kv_heads": kv_heads, "parallel_residual": "one_norm" if norms == 1 else "two_norms"}
    # Falcon divides the sum of scores and ALiBi's biases by the root of the head's width; others divide scores alone.
    position = {"position": "alibi", "alibi_scaled": True} if values["alibi"] else FALCON_ROPE.read(values)
    return {"position": "rope", **found, **position}


def _write_falcon(model: Model) -> Json:
    parallel, kv_heads = model.parallel_residual, num_kv_heads(model)
    # Only the new architecture has two norms or groups of key heads.
    is_new = parallel == "two_norms" or (parallel == "one_norm" and 1 < kv_heads < model.num_heads)
    return {
        **(FALCON_ROPE.write(model) if model.position == "rope" else {}),
        "new_decoder_architecture": is_new,
        "multi_query": not is_new and kv_heads == 1,
        "parallel_attn": parallel != "no",
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": {"one_norm": 1, "two_norms": 2}[parallel] if is_new else None,
        "alibi": model.position == "alibi",
    }


def _falcon_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    two = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if model.parallel_residual == "two_norms" else {}
    return decoder_rows(replace(names, **two), model)


FALCON = decoder(
    "falcon",
    "Falcon",
    sizes(4544, None, 32, 71, None, 65_024, 2048)
    | {"layer_norm_epsilon": 1e-5, "ffn_hidden_size": None, "hidden_dropout": 0.0, "activation": "gelu"}
    | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False, "bias": False}
    | {"tie_word_embeddings": True},
    layer_norm("layer_norm_epsilon"),
    size_fields(num_kv_heads="", mlp_size="ffn_hidden_size", hidden_dropout="hidden_dropout"),
    activation("activation", gate=False),
    biases("bias", "bias"),
    ConfigKeys(
        (
            *FALCON_ROPE.keys,
            *("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn"),
            *("num_kv_heads", "alibi"),
        ),
        _read_falcon,
        _write_falcon,
        {**FALCON_ROPE.named, "num_kv_heads": "num_kv_heads"},
    ),
    names=BLOOM_NAMES,
    rows=_falcon_rows,
)
