"""transformers' further types with layer norm and biases: `gpt_bigcode`, `codegen`, `persimmon` and `biogpt`."""

from dataclasses import replace

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.convert.model_types.decoder import ROTARY, decoder, layer_norm, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import (
    LAYERS,
    ModuleNames,
    decoder_rows,
    mlp_rows,
    outside_rows,
    rotation_order,
)
from mtjax.convert.model_types.family import GPT2_ALIASES, Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, always, biases, unused
from mtjax.convert.model_types.rope import rope
from mtjax.convert.model_types.rows import linear, norm
from mtjax.convert.table import Row, Slots, Tensor, dims
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.early_gpt import GPT2_NAMES
from mtjax.families.gpt.hugging_face.neox import GPT_SIZE_FIELDS, GPTJ_NAMES, GPTJ_PARTS, GPTJ_SIZES
from mtjax.families.gpt.hugging_face.phi import HEAD_NORM

ALL_BIASES = biases(always="all", with_mlp=True)
FRACTION = "partial_rotary_factor"

PERSIMMON = decoder(
    "persimmon",
    "Persimmon",
    sizes(4096, 16_384, 36, 64, None, 262_144, 16_384)
    | {"layer_norm_eps": 1e-5, "hidden_act": "relu2", FRACTION: 0.5, "qk_layernorm": True, "hidden_dropout": 0.0},
    *(layer_norm(), size_fields(num_kv_heads="", hidden_dropout="hidden_dropout")),
    *(activation(gate=False, usual="relu2"), ROTARY, rope(fraction=FRACTION), ALL_BIASES, HEAD_NORM),
    names=ModuleNames(
        final_norm="final_layernorm",
        qkv="query_key_value",
        qkv_order="groups",
        attention_output="dense",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
)


def _read_scaling(values: Json) -> Settings:
    return {"embedding_scale": values["hidden_size"] ** 0.5 if values["scale_embedding"] else 1.0}


BIOGPT = decoder(
    "biogpt",
    "BioGpt",
    sizes(1024, 4096, 24, 16, None, 42_384, 1024)
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "scale_embedding": True}
    | {"tie_word_embeddings": True},
    # transformers' norms have this epsilon whatever layer_norm_eps says.
    *(always(family="gpt", norm="layernorm", norm_epsilon=1e-5, position="learned"), unused("layer_norm_eps")),
    size_fields(
        num_kv_heads="", hidden_dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob"
    ),
    *(activation(gate=False, usual="gelu"), ALL_BIASES),
    ConfigKeys(("scale_embedding",), _read_scaling, lambda model: {"scale_embedding": model.embedding_scale != 1}),
    names=ModuleNames(
        prefix="biogpt.",
        positions="embed_positions",
        # Two rows of the table are before the first position, as in OPT.
        positions_skip=2,
        final_norm="layer_norm",
        output="output_projection",
        attention_norm="self_attn_layer_norm",
        attention_output="out_proj",
        mlp="",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    ),
)


def _bigcode_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder whose fused heads are in another order with a single key head."""
    # With one key head: all queries, the key, the value; else query, key and value of each head.
    is_single = num_kv_heads(model) < model.num_heads
    return decoder_rows(replace(names, qkv_order="parts" if is_single else "groups"), model)


GPT_BIGCODE = decoder(
    "gpt_bigcode",
    "GPTBigCode",
    {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024, "vocab_size": 50_257}
    | {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    | {"initializer_range": 0.02, "tie_word_embeddings": True, "multi_query": True},
    *(layer_norm("layer_norm_epsilon"), GPT_SIZE_FIELDS, activation("activation_function", gate=False), ALL_BIASES),
    always(position="learned"),
    ConfigKeys(
        ("multi_query",),
        lambda values: {"num_kv_heads": 1 if values["multi_query"] else values["n_head"]},
        lambda model: {"multi_query": num_kv_heads(model) == 1},
    ),
    unused("num_key_value_heads"),
    # Precision alone.
    unused("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    ConfigKeys((), lambda values: {}, lambda model: {"embd_pdrop": model.hidden_dropout}),
    names=replace(GPT2_NAMES, qkv="c_attn"),
    rows=_bigcode_rows,
    only={"scale_attn_weights": (True,)},
    aliases=GPT2_ALIASES,
)

# transformers' constant mp_num.
PARTS = 4
"""In how many parts CodeGen's heads are stored, each with the queries, values and keys of its heads."""


def _check_parts(values: Json) -> Settings:
    if values["n_head"] % PARTS:
        raise UserError(f"n_head is {values['n_head']}, but must be a multiple of {PARTS}")
    return {}


def _codegen_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a GPT-J whose queries, values and keys are one tensor."""
    order, heads = rotation_order(names, model), model.num_heads // PARTS
    qkv = tuple(
        Tensor(
            f"{names.in_attention('qkv_proj')}.weight",
            dims("heads*head_dim embed"),
            ("qkv", index),
            Slots(at * heads, heads, 3 * heads),
            order=order if rotates else None,
        )
        # transformers splits a part into query, value and key, in this order.
        for index, at, rotates in ((0, 0, True), (1, 2, True), (2, 1, False))
    )
    return (
        *outside_rows(names),
        *norm(f"{LAYERS}.attention_norm", names.block + names.attention_norm),
        Row(f"{LAYERS}.attention.qkv.weight", qkv),
        *linear(f"{LAYERS}.attention.output", names.in_attention(names.attention_output), "heads*head_dim", "embed"),
        *mlp_rows(names),
    )


CODEGEN = decoder(
    "codegen",
    "CodeGen",
    GPTJ_SIZES,
    *GPTJ_PARTS,
    ConfigKeys((), _check_parts, lambda model: {}),
    names=GPTJ_NAMES,
    rows=_codegen_rows,
    ignored=lambda model: (r".*\.attn\.causal_mask",),
    aliases=GPT2_ALIASES,
    classifies=False,
)
