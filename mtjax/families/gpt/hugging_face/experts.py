"""transformers' types with experts."""

from dataclasses import dataclass

from mtjax.config import Model
from mtjax.config.sizes import dense_layers, dense_settings, expert_size
from mtjax.convert.model_types.decoder import (
    HEAD_DIM,
    LIKE_LLAMA,
    NO_BIASES,
    RMS_NORM,
    ROPE,
    ROTARY,
    SIZES,
    decoder,
    sizes,
)
from mtjax.convert.model_types.decoder_rows import (
    LAYERS,
    ModuleNames,
    attention_rows,
    in_dense_layers,
    mlp_rows,
    outside_rows,
)
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    FULL,
    ConfigKeys,
    Settings,
    always,
    biases,
    fields,
    given,
    unused,
    window,
    windows,
)
from mtjax.convert.model_types.rope import ORIGINAL
from mtjax.convert.model_types.rows import experts, linear, norm, row, stacked
from mtjax.convert.table import Dims, Row, Tensor
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.llama import GRANITE_SIZES, MULTIPLIERS


@dataclass(frozen=True)
class ExpertNames:
    """transformers' names of a router and its experts, in a layer."""

    mixture: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    up_tensor: str = ""
    """One tensor of the gates and up projections of all experts, instead of one tensor for each."""
    up_shape: str = ""
    """Its dimensions; those of the tensor of all down projections are `down_shape`."""
    down_shape: str = ""
    selection_bias: str = "gate.e_score_correction_bias"
    selection_dims: Dims = (("routes",),)

    def rows(self, names: ModuleNames, model: Model) -> tuple[Row, ...]:
        """Returns the rows of a decoder with experts."""
        attention = attention_rows(names, model)
        return (
            *outside_rows(names),
            *attention,
            *self.mixture_rows(names),
            *in_dense_layers((*attention, *mlp_rows(names))),
        )

    def mixture_rows(self, names: ModuleNames) -> tuple[Row, ...]:
        """Returns the rows of a router and its experts, with their norms."""
        ours, theirs = f"{LAYERS}.experts", f"{names.block}{self.mixture}"
        shared = f"{theirs}.{self.shared}"
        return (
            *norm(f"{ours}_norm", names.block + names.mlp_norm),
            *norm(f"{ours}_output_norm", names.block + names.mlp_output_norm),
            row(f"{ours}.router.weight", f"{theirs}.{self.router}.weight", "routes embed"),
            row(f"{ours}.router.linear_bias", f"{theirs}.{self.router}.bias", "routes"),
            Row(f"{ours}.router.bias", (Tensor(f"{theirs}.{self.selection_bias}", self.selection_dims),)),
            *self._expert_rows(ours, theirs),
            *stacked(f"{ours}.shared.up", "gate", (f"{shared}.{self.gate}", f"{shared}.{self.up}"), "embed", "mlp"),
            *linear(f"{ours}.shared.down", f"{shared}.{self.down}", "mlp", "embed"),
            row(f"{ours}.shared_gate.weight", f"{theirs}.{self.shared}_gate.weight", "routes embed"),
        )

    def _expert_rows(self, ours: str, theirs: str) -> tuple[Row, ...]:
        if not self.up_tensor:
            return experts(ours, f"{theirs}.experts.{{expert}}", self.gate, self.up, self.down)
        up, down = f"{theirs}.{self.up_tensor}", f"{theirs}.{self.down}"
        return (
            row(f"{ours}.up.weight", up, self.up_shape),
            row(f"{ours}.up.bias", f"{up}_bias", self.up_shape.replace(" embed", "")),
            row(f"{ours}.down.weight", down, self.down_shape),
            row(f"{ours}.down.bias", f"{down}_bias", "every_expert embed"),
        )


QWEN_ROWS = ExpertNames(shared="shared_expert").rows
DEEPSEEK = ExpertNames()
SPARSE = "block_sparse_moe"


def _same_size(values: Json) -> Settings:
    return {"expert_size": values["intermediate_size"]}


SAME_SIZE = ConfigKeys(
    (), _same_size, lambda model: {"intermediate_size": expert_size(model)}, {"expert_size": "intermediate_size"}
)
"""The part of types whose experts are as wide as intermediate_size says."""
TOP_K = fields(num_experts="num_local_experts", experts_top_k="num_experts_per_tok")

# w1 is the gate and w3 the up projection. The weights of the experts that a token chooses always add up to 1.
MIXTRAL = decoder(
    "mixtral",
    "Mixtral",
    sizes(4096, 14336, 32, 32, 8, 32000, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    NO_BIASES,
    window(),
    TOP_K,
    SAME_SIZE,
    rows=ExpertNames(SPARSE, gate="w1", up="w3", down="w2").rows,
    aliases={"num_experts": "num_local_experts"},
)


def _read_dense(values: Json) -> Settings:
    """Reads which layers are dense.

    Every `decoder_sparse_step`-th layer, counted from 1, has experts, except for `mlp_only_layers`.

    Raises:
      UserError: the pattern is not supported.
    """
    layers, step = values["num_hidden_layers"], values["decoder_sparse_step"]
    without = values["mlp_only_layers"] or []
    dense = [i for i in range(layers) if i in without or (i + 1) % step]
    settings = dense_settings(dense, layers) if len(dense) < layers else None
    if settings is None:
        raise UserError(
            f"decoder_sparse_step {step} and mlp_only_layers {without} put experts in {layers - len(dense)} of {layers}"
            " layers, a pattern that mtjax does not support; supported: all layers, all after the first k, every N-th"
        )
    return settings


SPARSE_STEP = ConfigKeys(
    ("decoder_sparse_step", "mlp_only_layers"),
    _read_dense,
    # The list can express any pattern of layers, the step only some.
    lambda model: {"decoder_sparse_step": 1, "mlp_only_layers": list(dense_layers(model))},
)
QWEN_EXPERTS = (
    SPARSE_STEP,
    fields(experts_top_k="num_experts_per_tok", expert_size="moe_intermediate_size", router_normalize="norm_topk_prob"),
)
NO_WINDOW = {"use_sliding_window": (False,)}
"""With a window, versions of transformers differ in the layers that have it."""
UNUSED = unused("sliding_window", "max_window_layers", "layer_types")
STEPS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}


def counted(*keys: str, default: int | None = None) -> ConfigKeys:
    """Returns the part of the number of experts, which versions of transformers read from different keys."""

    def read(values: Json) -> Settings:
        given = {key: values[key] for key in keys if values.get(key) is not None}
        if len(set(given.values())) > 1:
            raise UserError(
                f"{' and '.join(given)} are the same setting, but are {' and '.join(map(str, given.values()))}"
            )
        return {"num_experts": next(iter(given.values()), default)}

    return ConfigKeys(keys, read, lambda model: dict.fromkeys(keys, model.num_experts), {"num_experts": keys})


def _check_layers(values: Json) -> Settings:
    """Checks that no layer slides: a list of kinds has an effect without use_sliding_window, too."""
    if other := sorted({str(kind) for kind in values.get("layer_types") or ()} - {FULL}):
        raise UserError(f"layer_types has {', '.join(other)}, but must have {FULL} alone")
    return {}


QWEN3_MOE = decoder(
    "qwen3_moe",
    "Qwen3Moe",
    sizes(2048, 6144, 24, 32, 4, 151_936, 32_768) | STEPS | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    biases("attention_bias"),
    always(qk_norm=True),
    # transformers 5 renamed num_experts.
    counted("num_local_experts", "num_experts", default=128),
    *QWEN_EXPERTS,
    UNUSED,
    rows=QWEN_ROWS,
    only=NO_WINDOW,
)
QWEN2_MOE = decoder(
    "qwen2_moe",
    "Qwen2Moe",
    sizes(2048, 5632, 24, 16, 16, 151_936, 32_768)
    | STEPS
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "qkv_bias": True}
    | {"shared_expert_intermediate_size": 5632},
    *LIKE_LLAMA,
    ROPE,
    biases("qkv_bias", with_attention="qkv"),
    # A sigmoid of its own product multiplies the shared expert's output.
    always(shared_expert_gate=True),
    fields(num_experts="num_experts", shared_expert_size="shared_expert_intermediate_size"),
    *QWEN_EXPERTS,
    UNUSED,
    ConfigKeys(("layer_types",), _check_layers, lambda model: {}),
    rows=QWEN_ROWS,
    only=NO_WINDOW,
)
OLMOE = decoder(
    "olmoe",
    "Olmoe",
    sizes(2048, 2048, 16, 16, None, 50_304, 4096)
    | {"rms_norm_eps": 1e-5, "clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    *LIKE_LLAMA,
    ROPE,
    biases("attention_bias"),
    # The norms of queries and keys are over all heads together.
    always(qk_norm=True, qk_norm_scope="width"),
    fields(
        qkv_clip="clip_qkv",
        num_experts="num_experts",
        experts_top_k="num_experts_per_tok",
        router_normalize="norm_topk_prob",
    ),
    SAME_SIZE,
    rows=QWEN_ROWS,
    aliases={"num_local_experts": "num_experts"},
    classifies=False,
)


def shared_experts(key: str, least: int = 1) -> ConfigKeys:
    """Returns the part of several shared experts, which are one MLP of their total width.

    Args:
      key: of their number.
      least: their smallest number.
    """

    def read(values: Json) -> Settings:
        count = values[key] or 0
        if count < least:
            raise UserError(f"{key} is {values[key]}, but must be {least} or more")
        return {"shared_expert_size": count * (values["moe_intermediate_size"] or 0)}

    def write(model: Model) -> Json:
        # At least `least`, so that a model without shared experts fails the round trip in `ModelType.misfits`.
        return {key: max(model.shared_expert_size // expert_size(model), least)}

    return ConfigKeys((key, "moe_intermediate_size"), read, write)


def groups() -> ConfigKeys:
    """Returns the part of groups of experts; null is one group."""
    return ConfigKeys(
        ("n_group", "topk_group"),
        lambda values: {
            "expert_groups": 1 if values["n_group"] is None else values["n_group"],
            "expert_groups_top_k": 1 if values["topk_group"] is None else values["topk_group"],
        },
        lambda model: {"n_group": model.expert_groups, "topk_group": model.expert_groups_top_k},
        {"expert_groups": "n_group", "expert_groups_top_k": "topk_group"},
    )


# DeepSeek-V3's router (arXiv 2412.19437): sigmoids in place of a softmax, and a bias that selects experts but does not
# weigh them.
SIGMOID = always(router_score="sigmoid", router_bias=True)
AFTER_FIRST = fields(
    first_dense_layers="first_k_dense_replace",
    experts_top_k="num_experts_per_tok",
    expert_size="moe_intermediate_size",
    router_scale="routed_scaling_factor",
)
NORMALIZED = fields(router_normalize="norm_topk_prob")
FIXED = {"mlp_only_layers": ([], None), "moe_layer_freq": (1, None)}
SIGMOID_KEYS = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
"""Keys of the code of the first versions, which have the same values in all published models."""

DOTS1 = decoder(
    "dots1",
    "Dots1",
    sizes(4608, 10_944, 62, 32, 32, 152_064, 2048)
    | {"sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0, "norm_topk_prob": False}
    | {"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    | {"n_shared_experts": None},
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    biases("attention_bias"),
    always(qk_norm=True),
    windows(lambda values, layer: layer >= values["max_window_layers"], "max_window_layers"),
    counted("n_routed_experts", "num_local_experts"),
    shared_experts("n_shared_experts"),
    groups(),
    SIGMOID,
    AFTER_FIRST,
    NORMALIZED,
    rows=DEEPSEEK.rows,
    only={**FIXED, **SIGMOID_KEYS},
    classifies=False,
)

GRANITE_NAMES = ExpertNames(
    SPARSE,
    router="router.layer",
    up_tensor="input_linear.weight",
    up_shape="expert gate*mlp embed",
    down="output_linear.weight",
    down_shape="expert embed mlp",
)
GRANITEMOE = decoder(
    "granitemoe",
    "GraniteMoe",
    GRANITE_SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2},
    *LIKE_LLAMA,
    ROPE,
    biases("attention_bias"),
    *MULTIPLIERS,
    TOP_K,
    SAME_SIZE,
    rows=GRANITE_NAMES.rows,
    classifies=False,
)


GPT_OSS = decoder(
    "gpt_oss",
    "GptOss",
    sizes(2880, 2880, 36, 64, 8, 201_088, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "attention_bias": True, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            ORIGINAL: 4096,
        }
    },
    SIZES,
    RMS_NORM,
    ROTARY,
    given(hidden_act="silu"),
    HEAD_DIM,
    ROPE,
    biases("attention_bias"),
    # OpenAI's variant of SwiGLU: clamped, with (up + 1) in place of up.
    always(activation="swiglu_clamped", attention_sinks=True, expert_bias=True, router_linear_bias=True),
    windows(lambda values, layer: layer % 2 == 0),
    TOP_K,
    SAME_SIZE,
    rows=ExpertNames(
        router="router",
        up_tensor="experts.gate_up_proj",
        # Inputs first, unlike torch's linear layers; gates and up projections alternate.
        up_shape="expert embed mlp*gate",
        down="experts.down_proj",
        down_shape="expert mlp embed",
    ).rows,
    only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,), "hidden_act": ("silu",)},
    aliases={"num_experts": "num_local_experts"},
    # Published files have the experts in 4 bits with a scale for each 32.
    packed="mxfp4",
)
