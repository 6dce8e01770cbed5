"""transformers' types with latent attention: `deepseek_v2`, `deepseek_v3` (arXiv 2405.04434, 2412.19437), `sarvam_mla`,
and without experts `youtu` and `minicpm3`."""

from dataclasses import replace

from mtjax.config import Model
from mtjax.convert.model_types.decoder import LIKE_LLAMA, NO_BIASES, ROPE, Only, decoder, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames, Order, in_dense_layers, mlp_rows, outside_rows
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, always, check_factor, fields, inverse, unused
from mtjax.convert.model_types.rope import rope_object, yarn_scale
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Row, Table, Tensor, dims
from mtjax.families.gpt.hugging_face.experts import (
    AFTER_FIRST,
    DEEPSEEK,
    FIXED,
    NORMALIZED,
    SIGMOID,
    SIGMOID_KEYS,
    groups,
    shared_experts,
)

LATENT = fields(
    q_lora_rank="q_lora_rank",
    kv_lora_rank="kv_lora_rank",
    qk_nope_head_dim="qk_nope_head_dim",
    qk_rope_head_dim="qk_rope_head_dim",
    v_head_dim="v_head_dim",
)
NEIGHBOURS = ModuleNames(interleaved=True)
MSCALE, MSCALE_ALL = "mscale", "mscale_all_dim"


def _read_scale(values: Json) -> Settings:
    """Reads RoPE, and the factor of the scores, which is larger with YaRN."""
    found, given = ROPE.read(values), rope_object(values)
    weight = given.get(MSCALE_ALL)
    if found["rope_scaling"] == "none" or not weight:
        return found
    return {**found, "attention_scale": _scale(values, found["rope_factor"], weight)}


def _scale(values: Json, factor: float, weight: float) -> float:
    # YaRN's factor (0.1 mscale ln(factor) + 1) squared, as in transformers: once for queries and once for keys.
    return (values["qk_nope_head_dim"] + values["qk_rope_head_dim"]) ** -0.5 * yarn_scale(factor, weight) ** 2


def _write_scale(model: Model) -> Json:
    found = dict(ROPE.write(model))
    scale, factor = model.attention_scale, model.rope_factor
    if scale is None or model.rope_scaling == "none" or factor <= 1:
        return found
    widths = {name: getattr(model, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")}
    per_weight = yarn_scale(factor) - 1
    # yarn_scale is linear in the weight: this is the inverse but for rounding, which `inverse` corrects.
    near = ((scale / _scale(widths, factor, 0.0)) ** 0.5 - 1) / per_weight
    keys = {MSCALE_ALL: inverse(lambda weight: _scale(widths, factor, weight), scale, near)}
    # YaRN's factor of queries and keys is 1 in all published models, which transformers computes from two equal keys.
    is_one = model.rope_attention_factor == 1
    keys |= {MSCALE: keys[MSCALE_ALL]} if is_one else {}
    dropped = {"attention_factor"} if is_one else set()
    written = {
        name: {key: value for key, value in found[name].items() if key not in dropped} | keys
        for name in ("rope_parameters", "rope_scaling")
    }
    return found | written


def latent_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder with latent attention and experts."""
    attention = _attention(names, model)
    return (
        *outside_rows(names),
        *attention,
        *DEEPSEEK.mixture_rows(names),
        *in_dense_layers((*attention, *mlp_rows(names))),
    )


def _rows_with_predictions(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder whose layers of multi-token prediction follow the others."""
    rows = latent_rows(names, model)
    for number in range(1, model.mtp_num_layers + 1):
        # transformers' names count them on as layers of the model.
        at, ours = model.num_layers + number - 1, f"mtp_{number}"
        block = names.block.format(layer=at)
        rows += tuple(_of_one_layer(of, f"{ours}.layer", at) for of in rows if of.ours.startswith(f"{LAYERS}."))
        rows += (
            *norm(f"{ours}.embedding_norm", f"{block}enorm"),
            *norm(f"{ours}.hidden_norm", f"{block}hnorm"),
            row(f"{ours}.projection.weight", f"{block}eh_proj.weight", "features sources*embed"),
            *norm(f"{ours}.final_norm", f"{block}shared_head.norm"),
        )
    return rows


def _of_one_layer(of: Row, ours: str, number: int) -> Row:
    """Returns the row of one layer that is in no stack, from that of a stack."""
    each = (replace(tensor, name=tensor.name.replace("{layer}", str(number))) for tensor in of.tensors)
    return Row(of.ours.replace(LAYERS, ours, 1), tuple(each))


def _shared_tables(model: Model) -> dict[str, str]:
    """Returns the copies of the embedding and of the output in layers of multi-token prediction."""
    output = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    numbers = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    return {
        copy: of
        for number in numbers
        for copy, of in (
            (f"model.layers.{number}.embed_tokens.weight", "model.embed_tokens.weight"),
            (f"model.layers.{number}.shared_head.head.weight", output),
        )
    }


def _read(config: Json, tensors: frozenset[str]) -> Settings:
    """Reads a config.json; layers of multi-token prediction only with the language head, and where the folder has them:
    transformers drops them when it saves a model, but not from its config.json."""
    settings = _WITHOUT_COPIES.read(config, tensors)
    first = f"model.layers.{settings['num_layers']}.eh_proj.weight"
    # Without names of tensors, a config.json alone is read.
    are_there = settings["head"] == "language" and (not tensors or first in tensors)
    return settings if are_there else {**settings, "mtp_num_layers": 0}


def _table(table: Table, model: Model) -> Table:
    """Returns the table with the copies of the embedding and of the output, which are written but need not be there."""
    copies = _shared_tables(model)
    table = _WITHOUT_COPIES.fit(table, model)
    return replace(table, copies={**table.copies, **copies}, duplicates=copies)


def _attention(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    ours = f"{LAYERS}.attention"
    rotated = model.qk_rope_head_dim

    def order(axis: str, still: int) -> Order:
        """Returns the order of channels of which the last rotate, as neighbours if names.interleaved."""
        if not names.interleaved:
            return None
        # Neighbouring channels are rotated there, and halves here: the first of all pairs, then the second.
        pairs = (*range(0, rotated, 2), *range(1, rotated, 2))
        return axis, (*range(still), *(still + i for i in pairs))

    def matrix(parameter: str, theirs: str, shape: str, order: Order = None) -> Row:
        name = f"{names.in_attention(theirs)}.weight"
        return Row(f"{ours}.{parameter}.weight", (Tensor(name, dims(shape), order=order),))

    of_query = order("head_dim", model.qk_nope_head_dim)
    return (
        *norm(f"{LAYERS}.attention_norm", names.block + names.attention_norm),
        matrix("query", "q_proj", "heads*head_dim embed", of_query),
        matrix("query_down", "q_a_proj", "latent embed"),
        row(f"{ours}.query_norm.scale", f"{names.in_attention('q_a_layernorm')}.weight", "latent"),
        matrix("query_up", "q_b_proj", "heads*head_dim latent", of_query),
        matrix("key_value_down", "kv_a_proj_with_mqa", "latent embed", order("latent", model.kv_lora_rank)),
        row(f"{ours}.key_value_norm.scale", f"{names.in_attention('kv_a_layernorm')}.weight", "latent"),
        matrix("key_value_up", "kv_b_proj", "heads*head_dim latent"),
        *linear(f"{ours}.output", names.in_attention("o_proj"), "heads*head_dim", "embed"),
    )


def _read_ranks(values: Json) -> Settings:
    return {**LATENT.read(values), "q_lora_rank": values["q_lora_rank"] or 0}


def _write_ranks(model: Model) -> Json:
    return {
        **LATENT.write(model),
        "q_lora_rank": model.q_lora_rank or None,
        # transformers' RoPE is as wide as head_dim says.
        "head_dim": model.qk_rope_head_dim,
        "qk_head_dim": model.qk_nope_head_dim + model.qk_rope_head_dim,
    }


WITHOUT_EXPERTS = (
    *LIKE_LLAMA,
    NO_BIASES,
    # They follow from the other widths; every head has keys and values of its own.
    unused("head_dim", "qk_head_dim", "num_key_value_heads"),
    always(num_kv_heads=None),
    ConfigKeys(LATENT.keys, _read_ranks, _write_ranks),
    ConfigKeys(ROPE.keys, _read_scale, _write_scale, ROPE.named),
)
COMMON = (*WITHOUT_EXPERTS, fields(num_experts="n_routed_experts"), AFTER_FIRST)
WIDTHS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
ONLY: Only = {"attention_bias": (False,), **FIXED}


def _read_method(values: Json) -> Settings:
    """Reads the groups of experts, which only one method of choice has; weights are never normalized."""
    is_grouped = values["topk_method"] == "group_limited_greedy"
    # With "greedy" the keys of groups have no effect.
    found = groups().read(values) if is_grouped else {"expert_groups": 1, "expert_groups_top_k": 1}
    # transformers' code of V2 does not read norm_topk_prob.
    return {**found, "router_score": "softmax", "router_normalize": False}


DEEPSEEK_V2 = decoder(
    "deepseek_v2",
    "DeepseekV2",
    sizes(4096, 11_008, 32, 32, None, 102_400, 2048)
    | WIDTHS
    | {"first_k_dense_replace": 0, "n_group": None, "topk_group": None, "topk_method": "greedy"}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0},
    *COMMON,
    shared_experts("n_shared_experts", least=0),
    ConfigKeys(
        ("n_group", "topk_group", "topk_method", "norm_topk_prob"),
        _read_method,
        lambda model: {
            **groups().write(model),
            "topk_method": "greedy" if model.expert_groups == 1 else "group_limited_greedy",
            # Read as false in any case: a model that normalizes fails the round trip in `ModelType.misfits`.
            "norm_topk_prob": model.router_normalize,
        },
        groups().named,
    ),
    names=NEIGHBOURS,
    rows=latent_rows,
    only={**ONLY, "mlp_bias": (False,), "topk_method": ("greedy", "group_limited_greedy")},
    aliases={"num_experts": "n_routed_experts"},
)
NO_MORE_TOKENS = ConfigKeys(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    lambda values: {},
    lambda model: {"num_nextn_predict_layers": 0},
)
"""Layers of multi-token prediction, which are not read, follow the others."""


def after_last(model: Model) -> tuple[str, ...]:
    """Returns the names of the tensors of a layer after the last."""
    return (rf"model\.layers\.{model.num_layers}\..*",)


V3_SIZES = (
    sizes(7168, 18_432, 61, 128, 128, 129_280, 4096)
    | WIDTHS
    | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
    | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5}
    | {"num_experts_per_tok": 8}
)
V3_PARTS = (*COMMON, shared_experts("n_shared_experts", least=0), groups(), SIGMOID, NORMALIZED)
V3_ONLY: Only = {**ONLY, **SIGMOID_KEYS, "rope_interleave": (True,)}
_WITHOUT_COPIES = decoder(
    "deepseek_v3",
    "DeepseekV3",
    V3_SIZES | {"num_nextn_predict_layers": 1},
    *V3_PARTS,
    ConfigKeys(
        ("num_nextn_predict_layers",),
        lambda values: {"mtp_num_layers": values["num_nextn_predict_layers"] or 0},
        lambda model: {"num_nextn_predict_layers": model.mtp_num_layers},
    ),
    names=NEIGHBOURS,
    rows=_rows_with_predictions,
    # Read with the language head only.
    ignored=lambda model: (rf"model\.layers\.{model.num_layers + model.mtp_num_layers}\..*",),
    only=V3_ONLY,
    aliases={"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"},
)
DEEPSEEK_V3 = replace(_WITHOUT_COPIES, read=_read, fit=_table)
SARVAM_MLA = decoder(
    "sarvam_mla",
    "DeepseekV3",
    V3_SIZES
    | sizes(4096, 16_384, 32, 64, None, 262_144, 4096)
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 128}
    | {"initializer_range": 0.006},
    *V3_PARTS,
    NO_MORE_TOKENS,
    names=NEIGHBOURS,
    rows=latent_rows,
    only=V3_ONLY,
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    },
    classifies=False,
)


def _dense_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of a decoder with latent attention and without experts."""
    return (*outside_rows(names), *_attention(names, model), *mlp_rows(names))


def _first_std(values: Json) -> Settings:
    std = values["initializer_range"]
    # transformers' formula for a null initializer_range.
    return {"init_std": 2.0 / (5.0 * values["hidden_size"]) ** 0.5 if std is None else std}


YOUTU = decoder(
    "youtu",
    "Youtu",
    sizes(2048, 6144, 32, 16, 16, 128_256, 131_072) | WIDTHS | {"tie_word_embeddings": True, "initializer_range": None},
    *WITHOUT_EXPERTS,
    ConfigKeys((), _first_std, lambda model: {}),
    unused("embedding_initializer_range"),
    names=NEIGHBOURS,
    rows=_dense_rows,
    only={"attention_bias": (False,), "rope_interleave": (True,)},
    classifies=False,
)


def _read_minicpm(values: Json) -> Settings:
    """Reads the factors of the embeddings, of sublayers and of the logits; null is none."""
    for key in ("scale_emb", "scale_depth", "dim_model_base"):
        check_factor(values, key)
    depth, base, hidden = values["scale_depth"], values["dim_model_base"], values["hidden_size"]
    return {
        "v_head_dim": values["v_head_dim"] or hidden // values["num_attention_heads"],
        "embedding_scale": float(values["scale_emb"]),
        # muP: transformers multiplies each branch by scale_depth / sqrt(layers), and divides hidden states before the
        # logits by hidden_size / dim_model_base.
        "residual_scale": 1.0 if depth is None else depth / values["num_hidden_layers"] ** 0.5,
        "output_scale": 1.0 if base is None else base / hidden,
    }


def _write_minicpm(model: Model) -> Json:
    layers, scale = model.num_layers, model.residual_scale
    return {
        "scale_emb": model.embedding_scale,
        "scale_depth": inverse(lambda depth: depth / layers**0.5, scale, scale * layers**0.5),
        "dim_model_base": round(model.output_scale * model.hidden_size),
    }


MINICPM3 = decoder(
    "minicpm3",
    "MiniCPM3",
    sizes(2560, 6400, 62, 40, 40, 73_448, 32_768)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.1}
    | {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None}
    | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    *WITHOUT_EXPERTS,
    ConfigKeys(("scale_emb", "scale_depth", "dim_model_base"), _read_minicpm, _write_minicpm),
    rows=_dense_rows,
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
