"""transformers' `zamba2`: Mamba-2 layers, some of which read one or two shared blocks of attention and MLP."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.layer_pattern import SHARED, shortened_pattern
from mtjax.config.shared_blocks import FIRST, SECOND, num_blocks
from mtjax.config.ssm import letters_of, numbers_of, ssm_heads
from mtjax.convert.model_types.decoder import ROPE, decoder, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames, attention_rows, mlp_rows, outside_rows
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, always, check_factor, fields, unused
from mtjax.convert.model_types.rows import linear, norm
from mtjax.convert.table import Row, Tensor, dims
from mtjax.errors import UserError
from mtjax.families.hybrid.hugging_face.hybrid import FLOOR, INITIAL, rms_norm
from mtjax.families.hybrid.hugging_face.hybrid_rows import mamba_rows

HYBRID, PLAIN = "hybrid", ("linear_attention", "mamba")
"""transformers' kinds of layers: with a shared block; without one, by its names in versions 5 and 4."""
DEFAULT = (1, 6, 6, 6, 6, 6, 6, 6, 5, 4, 2)
"""Layers up to each with a shared block, and after the last, of a config.json that does not list them: 2.7B's."""


def _read_pattern(values: Json) -> Settings:
    """Reads the layers; of two blocks, those that read one take turns."""
    blocks, kinds = values["num_mem_blocks"], values["layers_block_type"]
    if blocks not in (1, 2):
        raise UserError(f"num_mem_blocks is {blocks}, and must be 1 or 2")
    if kinds is None:
        first, *others = DEFAULT
        kinds = [PLAIN[0]] * first
        for number, count in enumerate(others, 1):
            kinds += [PLAIN[0]] * (count - 1) + [HYBRID if number < len(others) else PLAIN[0]]
    if wrong := sorted({str(kind) for kind in kinds} - {HYBRID, *PLAIN}):
        raise UserError(f"layers_block_type has {', '.join(wrong)}, but must have {', '.join((HYBRID, *PLAIN))}")
    with_block = [number for number, kind in enumerate(kinds) if kind == HYBRID]
    if values["hybrid_layer_ids"] not in (None, with_block):
        raise UserError(
            f"hybrid_layer_ids is {values['hybrid_layer_ids']}, but must have the layers that are {HYBRID} in "
            f"layers_block_type, in order: {with_block}"
        )
    letters, used = "", 0
    for kind in kinds:
        letters += (FIRST, SECOND)[used % blocks] if kind == HYBRID else "M"
        used += kind == HYBRID
    return {"layer_pattern": shortened_pattern(letters)}


def _write_pattern(model: Model) -> Json:
    letters = letters_of(model)
    return {
        "layers_block_type": [HYBRID if letter in SHARED else PLAIN[0] for letter in letters],
        "num_hidden_layers": len(letters),
        "num_mem_blocks": max(num_blocks(model), 1),
    }


def _read_state_space(values: Json) -> Settings:
    check_factor(values, "mamba_expand")
    inner, count = values["mamba_expand"] * values["hidden_size"], values["n_mamba_heads"]
    if inner % count:
        raise UserError(
            f"mamba_expand {values['mamba_expand']} x hidden_size {values['hidden_size']} is not a multiple of "
            f"n_mamba_heads {count}"
        )
    return {"ssm_heads": count, "ssm_head_dim": inner // count}


def _write_state_space(model: Model) -> Json:
    count = ssm_heads(model)
    # Rounded, so that a model with another ratio fails the round trip in `ModelType.misfits`.
    return {"n_mamba_heads": count, "mamba_expand": max(1, count * model.ssm_head_dim // model.hidden_size)}


def _read_attention(values: Json) -> Settings:
    """Reads the heads of attention, which together are as wide as its input, and the factor of the scores."""
    width, heads = 2 * values["hidden_size"], values["num_attention_heads"]
    if width % heads:
        raise UserError(f"2 x hidden_size {values['hidden_size']} is not a multiple of num_attention_heads {heads}")
    # Attention reads hidden states and embeddings side by side, but divides its scores as if heads were half as wide.
    return {"num_heads": heads, "head_dim": width // heads, "attention_scale": (width // heads / 2) ** -0.5}


def _read_position(values: Json) -> Settings:
    return {"position": "rope", **ROPE.read(values)} if values["use_mem_rope"] else {"position": "none"}


def _write_position(model: Model) -> Json:
    is_rotated = model.position == "rope"
    return {"use_mem_rope": is_rotated, **(ROPE.write(model) if is_rotated else {})}


NAMES = ModuleNames(
    final_norm="final_layernorm", mlp="feed_forward", mlp_norm="pre_ff_layernorm", gate_up="gate_up_proj"
)


def _first_layers(model: Model) -> Iterator[tuple[int, str, str]]:
    """Yields the number of the first layer that reads each block, whose modules it is in, with the name of the block's
    parameters and the stack of the layers that read it."""
    for number, (letter, stack) in enumerate(SHARED.items(), 1):
        if found := numbers_of(model, letter):
            yield found[0], f"block_{number}", stack


def _rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    rows = [*outside_rows(names), *_mamba("mamba", f"{names.block}", model)]
    for first, block, stack in _first_layers(model):
        own = replace(names, layer=f"layers.{first}.shared_transformer")
        of_block = (*attention_rows(own, model), *mlp_rows(own))
        rows += [replace(row, ours=row.ours.replace(LAYERS, block, 1)) for row in of_block]
        rows += _mamba(stack, f"{names.block}mamba_decoder.", model)
        rows += linear(f"{stack}.layers.projection", f"{names.block}linear", "embed", "features")
        rows += _adapters(stack, own.block, model)
    return tuple(rows)


def _mamba(stack: str, prefix: str, model: Model) -> tuple[Row, ...]:
    norms = norm(f"{stack}.layers.mamba_norm", f"{prefix}input_layernorm")
    return *norms, *mamba_rows(model, f"{prefix}mamba", stack=stack)


def _adapters(stack: str, block: str, model: Model) -> list[Row]:
    """Returns the rows of the adapters, which are lists in the module of a block, counted over both."""
    # The lists of both blocks have an entry for each use of any block, an empty one for those of the other block.
    every = numbers_of(model, "".join(SHARED))
    letter = next(letter for letter, own in SHARED.items() if own == stack)
    uses = tuple(every.index(number) for number in numbers_of(model, letter))

    def tensor(name: str, factor: int, shape: str, part: tuple[str, int] | None = None) -> Tensor:
        return Tensor(f"{block}{name}_adapter_list.{{use}}.{factor}.weight", dims(shape), part, uses=uses)

    attention = [(f"self_attn.linear_{name}", ("qkv", i)) for i, name in enumerate("qkv")]
    ours, up = f"{stack}.layers", "feed_forward.gate_up_proj"
    return [
        Row(f"{ours}.attention_adapter.a", tuple(tensor(name, 0, "rank embed", part) for name, part in attention)),
        Row(
            f"{ours}.attention_adapter.b",
            tuple(tensor(name, 1, "heads*head_dim rank", part) for name, part in attention),
        ),
        Row(f"{ours}.mlp_adapter.a", (tensor(up, 0, "rank embed"),)),
        Row(f"{ours}.mlp_adapter.b", (tensor(up, 1, "gate*mlp rank"),)),
    ]


def _copies(model: Model) -> dict[str, str]:
    """Returns the names of copies of the blocks in all layers but the first that reads each -> the block in that one;
    transformers ties them."""
    block, found = "model.layers.{}.shared_transformer", {}
    for letter in SHARED:
        numbers = numbers_of(model, letter)
        found |= {block.format(number): block.format(numbers[0]) for number in numbers[1:]}
    return found


DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "layers_block_type": None,
    "hybrid_layer_ids": None,
    "num_mem_blocks": 1,
    "n_mamba_heads": 8,
    "mamba_expand": 2,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_ngroups": 1,
    "time_step_min": 0.001,
    "adapter_rank": 128,
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
}

ZAMBA2 = decoder(
    "zamba2",
    "Zamba2",
    sizes(2560, None, 54, 32, None, 32_000, 4096) | DEFAULTS,
    size_fields(num_layers="", num_heads=""),
    rms_norm("rms_norm_eps"),
    always(bias=False),
    activation(),
    ConfigKeys(
        ("layers_block_type", "num_mem_blocks", "num_hidden_layers", "hybrid_layer_ids"),
        _read_pattern,
        _write_pattern,
        {"layer_pattern": "layers_block_type"},
    ),
    ConfigKeys(
        ("n_mamba_heads", "mamba_expand"), _read_state_space, _write_state_space, {"ssm_heads": "n_mamba_heads"}
    ),
    fields(ssm_state="mamba_d_state", ssm_groups="mamba_ngroups", ssm_conv="mamba_d_conv"),
    FLOOR,
    INITIAL,
    ConfigKeys(
        ("num_attention_heads",),
        _read_attention,
        lambda model: {"num_attention_heads": model.num_heads},
        {"num_heads": "num_attention_heads"},
    ),
    ConfigKeys(("use_mem_rope", *ROPE.keys), _read_position, _write_position, ROPE.named),
    fields(block_rank="adapter_rank", block_attention_adapters="use_shared_attention_adapter"),
    # What follows from others, and transformers computes anew.
    unused("attention_hidden_size", "attention_head_dim", "mamba_headdim", "kv_channels", "num_query_groups"),
    unused("use_mamba_kernels", "use_mem_eff_path", "num_logits_to_keep"),
    names=NAMES,
    rows=_rows,
    shared=_copies,
    only={
        # The epsilon of the gated norm is always this, and mtjax has one for all norms.
        "rms_norm_eps": (1e-5,),
        # transformers ties the blocks of different layers only together with the output.
        "tie_word_embeddings": (True,),
        "add_bias_linear": (False,),
        "use_conv_bias": (True,),
        "use_long_context": (False,),
        "use_shared_mlp_adapter": (True,),  # of old configs; transformers does not read it
    },
    classifies=False,
)
