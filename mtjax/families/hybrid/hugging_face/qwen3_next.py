"""transformers' `qwen3_next`: gated delta nets and gated attention, each with experts or an MLP after it."""

from collections.abc import Mapping
from dataclasses import replace

from mtjax.config import Model
from mtjax.config.layer_pattern import shortened_pattern
from mtjax.config.ssm import letters_of, ssm_groups, ssm_heads
from mtjax.convert.model_types.decoder import HEAD_DIM, SWIGLU, decoder, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames, attention_rows, mlp_rows, outside_rows
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, always, biases, fields
from mtjax.convert.model_types.rope import rope
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Dims, Row, Rows, Slots, Tensor, dims
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.experts import STEPS, ExpertNames
from mtjax.families.hybrid.hugging_face.hybrid import ATTENTION, STATE_SPACE, halved, rms_norm
from mtjax.families.hybrid.hugging_face.hybrid_rows import own_stacks

_LETTERS = {ATTENTION: "*", STATE_SPACE: "G"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_INTERVAL = "full_attention_interval"
_PATTERN_KEYS = ("num_hidden_layers", "layer_types", _INTERVAL, "mlp_only_layers", "decoder_sparse_step", "num_experts")
_EXPERTS = fields(
    experts_top_k="num_experts_per_tok",
    expert_size="moe_intermediate_size",
    shared_expert_size="shared_expert_intermediate_size",
    router_normalize="norm_topk_prob",
)


def _read_pattern(values: Json) -> Settings:
    """Reads the mixer of each layer, and whether it has experts or an MLP.

    Raises:
      UserError: a kind of layer is unknown, or their number is not that of the layers.
    """
    count, step, without = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or []
    every = values[_INTERVAL]
    kinds = values["layer_types"] or [STATE_SPACE if (i + 1) % every else ATTENTION for i in range(count)]
    if wrong := sorted({str(kind) for kind in kinds} - set(_LETTERS)):
        raise UserError(f"layer_types has {', '.join(wrong)}, but must have {' or '.join(_LETTERS)}")
    if len(kinds) != count:
        raise UserError(f"layer_types has {len(kinds)} layers, but num_hidden_layers is {count}")
    has_experts = [values["num_experts"] > 0 and i not in without and (i + 1) % step == 0 for i in range(count)]
    letters = "".join(_LETTERS[kind] + ("E" if own else "-") for kind, own in zip(kinds, has_experts, strict=True))
    pattern = {"layer_pattern": shortened_pattern(letters)}
    if "E" not in letters:
        return {**pattern, "num_experts": 0}
    return {**pattern, "num_experts": values["num_experts"], "shared_expert_gate": True, **_EXPERTS.read(values)}


def _write_pattern(model: Model) -> Json:
    letters = letters_of(model)
    # A pattern that is not made of such pairs fails the round trip in `ModelType.misfits`.
    mixers, others = letters[::2], letters[1::2]
    fits = len(mixers) == len(others) and set(mixers) <= set(_KINDS) and set(others) <= set("E-")
    return {
        "num_hidden_layers": max(len(mixers), 1),
        "layer_types": [_KINDS[letter] for letter in mixers] if fits else None,
        "mlp_only_layers": [i for i, letter in enumerate(others) if letter == "-"],
        "decoder_sparse_step": 1,
        "num_experts": model.num_experts,
        **(_EXPERTS.write(model) if model.num_experts else {}),
    }


def _gated_attention_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of attention, whose tensor of queries has each head's query and gate."""
    query = names.in_attention(names.query)

    def own(tensor: Tensor) -> Tensor:
        # transformers splits each head's part of the product into query and gate.
        return replace(tensor, slots=Slots(0, 1, 2)) if tensor.name.startswith(f"{query}.") else tensor

    found = (replace(of, tensors=tuple(own(tensor) for tensor in of.tensors)) for of in attention_rows(names, model))
    gates = (
        Row(f"{LAYERS}.attention.gate.{kind}", (Tensor(f"{query}.{kind}", dims(shape), slots=Slots(1, 1, 2)),))
        for kind, shape in (("weight", "heads*head_dim embed"), ("bias", "heads*head_dim"))
    )
    return (*found, *gates)


def _delta_rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of gated delta nets."""
    ours, theirs = "delta.layers.delta", f"{names.block}linear_attn"
    heads, groups, key = ssm_heads(model), ssm_groups(model), model.ssm_state
    each = heads // groups
    value = each * model.ssm_head_dim
    # Of each group of heads: query, key, values, gates; beta of its heads, then their rates.
    of_group, inner, shared = 2 * (key + value), (("heads", "head_dim"),), (("groups", "state"),)

    def product(shape: Dims, first: int, count: int, part: tuple[str, int]) -> Tensor:
        slots = Slots(first, count, of_group, width=1)
        return Tensor(f"{theirs}.in_proj_qkvz.weight", (*shape, ("embed",)), part, slots)

    def logits(first: int) -> Tensor:
        return Tensor(f"{theirs}.in_proj_ba.weight", dims("heads embed"), slots=Slots(first, each, 2 * each))

    def channels(shape: Dims, first: int, count: int, part: tuple[str, int] | None = None) -> Tensor:
        rows = Rows(first, count, groups * (2 * key + value))  # query, key and value of all groups
        return Tensor(f"{theirs}.conv1d.weight", (*shape, (), ("taps",)), part, rows=rows)

    width = groups * key
    return (
        *norm("delta.layers.delta_norm", names.block + names.attention_norm),
        Row(
            f"{ours}.inputs.gate_value",
            (
                product(inner, 2 * key + value, value, ("gate", 0)),
                product(inner, 2 * key, value, ("gate", 1)),
            ),
        ),
        Row(f"{ours}.inputs.query_key", tuple(product(shared, i * key, key, ("kv", i)) for i in range(2))),
        Row(f"{ours}.inputs.beta", (logits(0),)),
        Row(f"{ours}.inputs.rate", (logits(each),)),
        Row(f"{ours}.conv", (channels(inner, 2 * width, groups * value),)),
        Row(f"{ours}.conv_query_key", tuple(channels(shared, i * width, width, ("kv", i)) for i in range(2))),
        row(f"{ours}.rate_bias", f"{theirs}.dt_bias", "heads"),
        row(f"{ours}.a_log", f"{theirs}.A_log", "heads"),
        row(f"{ours}.norm_scale", f"{theirs}.norm.weight", "head_dim"),
        *linear(f"{ours}.output", f"{theirs}.out_proj", "heads*head_dim", "embed"),
    )


def _rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    mixture = ExpertNames(shared="shared_expert").mixture_rows(names)
    layers = own_stacks((*_gated_attention_rows(names, model), *mlp_rows(names), *mixture))
    return (*outside_rows(names), *layers, *_delta_rows(names, model))


_DELTA: Mapping[str, str] = {
    "ssm_heads": "linear_num_value_heads",
    "ssm_head_dim": "linear_value_head_dim",
    "ssm_state": "linear_key_head_dim",
    "ssm_groups": "linear_num_key_heads",
    "ssm_conv": "linear_conv_kernel_dim",
}

QWEN3_NEXT = halved(
    decoder(
        "qwen3_next",
        "Qwen3Next",
        sizes(2048, 5632, 48, 16, 2, 151_936, 32_768)
        | STEPS
        | {"head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": None, _INTERVAL: 4, "norm_topk_prob": True}
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
        | {"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4},
        size_fields(num_layers=""),
        HEAD_DIM,
        rms_norm("rms_norm_eps"),
        SWIGLU,
        # Norms multiply by 1 + weight, except for the gated norm of delta nets.
        always(position="rope", norm_weight="offset", qk_norm=True, attention_output_gate=True),
        rope(fraction="partial_rotary_factor"),
        biases("attention_bias"),
        ConfigKeys((*_PATTERN_KEYS, *_EXPERTS.keys), _read_pattern, _write_pattern, _EXPERTS.named),
        fields(**_DELTA),
        rows=_rows,
        # It is that of the convolutions, too, which have SiLU.
        only={"hidden_act": ("silu", "swish")},
        # Layers of multi-token prediction, which transformers skips, too.
        ignored=lambda model: (r"mtp\..*",),
        classifies=False,
    )
)
