"""transformers' `phi` and `phi3`: Phi 1 to 4."""

from mtjax.config import Model
from mtjax.convert.model_types.decoder import LIKE_LLAMA, NO_BIASES, ROTARY, SIZES, decoder, layer_norm, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, always, biases, fields, given, window
from mtjax.convert.model_types.rope import ORIGINAL, rope, rope_key, rope_object

FRACTION = rope(fraction="partial_rotary_factor")


def _read_rope(values: Json) -> Settings:
    """Reads RoPE; longrope had other names in the first versions."""
    given = rope_object(values)
    kind = given.get("rope_type", given.get("type", "default"))
    # transformers reads the two older names as longrope.
    kind = "longrope" if kind in ("su", "yarn") else kind
    return FRACTION.read({**values, rope_key(values): given | {"rope_type": kind}})


def _write_rope(model: Model) -> Json:
    found = dict(FRACTION.write(model))
    if model.rope_scaling != "longrope":
        return found
    written = found["rope_parameters"]
    # transformers computes this ratio itself where there is no factor.
    if model.rope_factor == model.sequence_length / model.rope_original_length:
        written.pop("factor")
    # transformers 4 accepts these keys alone, unless it has to know the factor.
    old = {"type": "longrope"} | {k: written[k] for k in ("short_factor", "long_factor", "factor") if k in written}
    return found | {"rope_scaling": old, ORIGINAL: model.rope_original_length}


PHI3 = decoder(
    "phi3",
    "Phi3",
    sizes(3072, 8192, 32, 32, None, 32_064, 4096)
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    *LIKE_LLAMA,
    ConfigKeys(FRACTION.keys, _read_rope, _write_rope, FRACTION.named),
    NO_BIASES,
    given(embd_pdrop=0.0, resid_pdrop=0.0),
    window(),
    names=ModuleNames(qkv="qkv_proj", gate_up="gate_up_proj"),
)


def _read_norm(values: Json) -> Settings:
    norm = {"qk_norm_scope": "head", "qk_norm_kind": "layernorm", "qk_norm_bias": True}
    return {"qk_norm": True, **norm} if values["qk_layernorm"] else {"qk_norm": False}


HEAD_NORM = ConfigKeys(("qk_layernorm",), _read_norm, lambda model: {"qk_layernorm": model.qk_norm})
PHI = decoder(
    "phi",
    "Phi",
    sizes(2048, 8192, 24, 32, None, 51_200, 2048)
    | {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": False}
    | {"resid_pdrop": 0.0},
    SIZES,
    layer_norm(),
    activation(gate=False, usual="gelu_new"),
    ROTARY,
    FRACTION,
    biases(always="all", with_mlp=True),
    always(parallel_residual="one_norm", output_bias=True),
    HEAD_NORM,
    fields(hidden_dropout="resid_pdrop"),
    names=ModuleNames(
        attention_output="dense",
        up="fc1",
        down="fc2",
        final_norm="final_layernorm",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
    ),
)
