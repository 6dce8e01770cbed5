"""Training in 8-bit floats: its settings' checks, and which products of a layer it quantizes."""

from collections.abc import Mapping

from mtjax.config.model import Model
from mtjax.config.run import Config
from mtjax.config.sizes import GATED, dense_layers, head_dim, mlp_size, num_kv_heads
from mtjax.config.training import Training
from mtjax.errors import UserError

ATTENTION, LATENT, MLP, SHARED = (
    ("attention.qkv", "attention.output"),
    ("attention.key_value_down", "attention.key_value_up", "attention.output"),
    ("mlp.up", "mlp.down"),
    ("experts.shared.up", "experts.shared.down"),
)
"""Products of layers that run in 8 bits, by the paths of their weights. Others do not: attention's own, routers', the
grouped ones of experts, embedding and head."""
STATE = "rule"
"""Name of the scales of a product among a training step's parameters, beside its weight; they are not weights."""
ENDS = ("fp8_bf16_first_layers", "fp8_bf16_last_layers")
"""Settings: how many layers at both ends of the model remain in the compute type."""
FLOAT8_SETTINGS = ("fp8_format", "fp8_scales", "fp8_amax_history", *ENDS)
"""Settings that nothing reads without `fp8`."""
UNQUANTIZED = "unquantized"
"""Scope of these layers in a compiled program."""
PREDICTION = "prediction"
"""Scope of layers of multi-token prediction, none of which is in 8 bits."""
EXPONENTS = 96
"""Powers of two that a scale may be."""
EXACT_DIGITS = 8
"""Binary digits of the inverses of exact scales: as many as bfloat16 has."""
COUNTED_DIGITS = 4
"""The same of delayed scaling, which has a count for each scale: as many as E4M3 has."""
MULTIPLE = 16
"""cuBLASLt multiplies 8-bit matrices of which all sizes are multiples of this."""


def check_float8(config: Config) -> None:
    """Checks that settings of 8-bit training are only set with it, and what it is not combined with.

    Raises:
      UserError: names the setting.
    """
    training, default = config.training, Training()
    if training.fp8 == "none":
        for name in FLOAT8_SETTINGS:
            if (value := getattr(training, name)) != getattr(default, name):
                raise UserError(f"{name} is {value}, and fp8 is none: add --fp8 delayed, or remove {name}")
        return
    if training.fp8 != "delayed" and training.fp8_amax_history != default.fp8_amax_history:
        raise UserError(
            f"fp8_amax_history is {training.fp8_amax_history}, and fp8 {training.fp8} has no history: use --fp8 "
            "delayed, or remove fp8_amax_history"
        )
    for found, instead in _unsupported(config).items():
        raise UserError(f"fp8 {training.fp8} does not support {found}: {instead}")
    _check_ends(config)


def _check_ends(config: Config) -> None:
    """Checks that some layers are left between those in 16 bits, and that they may run in loops of their own."""
    training, layers = config.training, config.model.num_layers
    # Layers in 16 bits run in separate loops before and after the others, which these settings do not divide.
    for name in (name for name in ENDS if getattr(training, name)):
        typed = f"{name} {getattr(training, name)}"
        if sum(getattr(training, end) for end in ENDS) >= layers:
            raise UserError(
                f"{ENDS[0]} {training.fp8_bf16_first_layers} and {ENDS[1]} {training.fp8_bf16_last_layers} leave none "
                f"of the {layers} layers in 8 bits: decrease one of them, or remove fp8"
            )
        if config.model.num_experts and dense_layers(config.model):
            raise UserError(
                f"{typed} does not support dense layers beside layers with experts, which run in separate loops: "
                f"remove {name}"
            )
        if config.model.lora_rank:
            raise UserError(f"{typed} does not support LoRA, and lora_rank is {config.model.lora_rank}: remove {name}")
        if training.recompute == "full" and training.recompute_method == "block":
            raise UserError(f"{typed} does not support recompute_method block: use uniform, or remove one of the two")
        if training.recompute == "full" and training.recompute_num_layers > 1:
            raise UserError(
                f"{typed} does not support groups of layers, and recompute_num_layers is "
                f"{training.recompute_num_layers}: remove one of the two"
            )


def _unsupported(config: Config) -> Mapping[str, str]:
    """Returns what the config has that 8-bit training does not support, each with what to do."""
    model, training = config.model, config.training
    found = {
        "compute_dtype float16": (training.compute_dtype == "float16", "use bfloat16"),
        f"the family {model.family}": (model.family not in ("gpt", "llama"), "remove fp8"),
        f"LoRA of experts, and num_experts is {model.num_experts}": (
            model.lora_rank > 0 and model.num_experts > 0,
            "experts' matmuls would remain in 16 bits, and the step would gain less than 1%; remove fp8",
        ),
        f"LoRA of latent attention, and kv_lora_rank is {model.kv_lora_rank}": (
            model.lora_rank > 0 and model.kv_lora_rank > 0,
            "remove fp8",
        ),
    }
    return {name: instead for name, (holds, instead) in found.items() if holds}


def scale_digits(fp8: str, scales: str) -> int:
    """Returns the binary digits of inverse scales; with one they are powers of two."""
    if scales == "power-of-two":
        return 1
    return COUNTED_DIGITS if fp8 == "delayed" else EXACT_DIGITS


def num_scales(digits: int) -> int:
    """Returns how many scales there are, whose inverses have so many binary digits."""
    # Each binary digit after the first doubles the numbers of an exponent.
    return EXPONENTS << (digits - 1)


def quantizes_once(fp8: str, ends: tuple[int, int], lora_rank: int) -> bool:
    """Returns whether weights are quantized once a step, for all microbatches and passes, and not by each product.

    That needs their scales before, weights that no layer reads in 16 bits, and gradients of them.
    """
    return fp8 == "delayed" and not any(ends) and not lora_rank


def float8_sizes(model: Model, tensor_degree: int) -> dict[str, tuple[int, int]]:
    """Returns the sizes (inputs, outputs) of a rank's matrix in each product of layers that may run in 8 bits."""
    hidden = model.hidden_size
    sizes = (_latent_sizes if model.kv_lora_rank else _attention_sizes)(model, model.num_heads // tensor_degree)
    has_dense = not model.num_experts or bool(dense_layers(model))
    for names, width in ((MLP, mlp_size(model) if has_dense else 0), (SHARED, model.shared_expert_size)):
        inner = width // tensor_degree
        up = 2 * inner if model.activation in GATED else inner
        sizes |= dict(zip(names, ((hidden, up), (inner, hidden)), strict=True)) if width else {}
    return sizes


def _attention_sizes(model: Model, heads: int) -> dict[str, tuple[int, int]]:
    """Returns the sizes of attention's matrices for so many heads."""
    # Ranks with the same key head have a copy each.
    keys = max(num_kv_heads(model) * heads // model.num_heads, 1)
    columns = (heads + 2 * keys) * head_dim(model)
    return dict(
        zip(ATTENTION, ((model.hidden_size, columns), (heads * head_dim(model), model.hidden_size)), strict=True)
    )


def _latent_sizes(model: Model, heads: int) -> dict[str, tuple[int, int]]:
    """Returns the sizes of latent attention's matrices for so many heads; those to the latents are replicated."""
    hidden, latent, query = model.hidden_size, model.kv_lora_rank, heads * head_dim(model)
    of_values = (
        (hidden, latent + model.qk_rope_head_dim),
        (latent, heads * (model.qk_nope_head_dim + model.v_head_dim)),
        (heads * model.v_head_dim, hidden),
    )
    queries = {"attention.query": (hidden, query)}
    if model.q_lora_rank:
        queries = {
            "attention.query_down": (hidden, model.q_lora_rank),
            "attention.query_up": (model.q_lora_rank, query),
        }
    return queries | dict(zip(LATENT, of_values, strict=True))


def unfit_products(model: Model, tensor_degree: int) -> dict[str, tuple[int, int]]:
    """Returns those of `float8_sizes` that are not multiples of 16: these products remain in the compute type."""
    sizes = float8_sizes(model, tensor_degree)
    return {name: size for name, size in sizes.items() if any(n % MULTIPLE for n in size)}


def float8_products(model: Model, tensor_degree: int) -> tuple[str, ...]:
    """Returns the products of layers that run in 8 bits, by the paths of their weights in a layer that has them."""
    left = unfit_products(model, tensor_degree)
    return tuple(name for name in float8_sizes(model, tensor_degree) if name not in left)
