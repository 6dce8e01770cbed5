"""Hybrid models: Mamba-2 (arXiv 2405.21060), gated delta nets, attention, MLPs and experts, by a pattern of layers."""

from typing import TYPE_CHECKING

from mtjax.config.families import EXPERTS, LATENT, Family
from mtjax.config.layer_loops import one_kind_only
from mtjax.config.shared_blocks import check_shared_blocks
from mtjax.config.ssm import (
    ATTENTION,
    READ_BY,
    RECURRENT,
    SCALED,
    STATE_SPACE,
    has_state_space,
    letters_of,
    numbers_of,
    ssm_groups,
    ssm_heads,
)
from mtjax.errors import UserError
from mtjax.families.gpt.config import DECODER, LLAMA

if TYPE_CHECKING:
    from mtjax.config.model import Model
    from mtjax.config.run import Config

HYBRID = frozenset(
    {
        *("layer_pattern", "ssm_heads", "ssm_head_dim", "ssm_state", "ssm_groups", "ssm_conv", "ssm_rate_floor"),
        *("ssm_chunk", "ssm_norm", "ssm_scales", "ssm_output_scale", "attention_output_gate"),
        *("attention_output_scale", "mlp_gate_scale", "mlp_output_scale", "block_rank", "block_attention_adapters"),
    }
)
"""Settings of hybrid models, which others refuse likewise."""

UNSUPPORTED = LATENT | {
    *("embedding_size", "first_attention_norm", "parallel_residual", "mtp_num_layers", "mtp_loss_scaling_factor"),
}
"""Settings of decoders that layers with one sublayer do not have."""


def check_hybrid(model: "Model") -> None:
    """Checks the pattern of a hybrid model, and the sizes of its state-space layers.

    Raises:
      UserError: they are inconsistent; names the settings and what fits.
    """
    letters = letters_of(model)
    if not letters:
        raise UserError(
            "layer_pattern is empty, and the family hybrid needs the kind of each layer: add --layer-pattern, for "
            "example '(M-M*-)x4'"
        )
    if len(letters) != model.num_layers:
        raise UserError(
            f"num_layers is {model.num_layers}, and layer_pattern {model.layer_pattern!r} has {len(letters)} layers: "
            "remove num_layers, which follows from the pattern"
        )
    # Either alone would be ignored silently.
    if ("E" in letters) != bool(model.num_experts):
        has = "has" if "E" in letters else "has no"
        raise UserError(
            f"layer_pattern {model.layer_pattern!r} {has} layers with experts (E), and num_experts is "
            f"{model.num_experts}: change one of the two"
        )
    for name in ("first_dense_layers", "moe_every"):
        if (value := getattr(model, name)) != getattr(type(model)(), name):
            raise UserError(f"{name} is {value}, and layer_pattern says which layers have experts: remove {name}")
    check_shared_blocks(model)
    # Shared blocks (Z, z) have an MLP, too.
    adapted = {"attention": ATTENTION, "mlp": "-EZz", "mixers": ATTENTION + RECURRENT}.get(model.lora_targets, letters)
    if model.lora_rank and not set(adapted) & set(letters):
        raise UserError(
            f"lora_targets is {model.lora_targets}, and layer_pattern {model.layer_pattern!r} has none of these "
            "layers: remove lora_targets"
        )
    if has_state_space(model):
        _check_state_space(model)


def _check_state_space(model: "Model") -> None:
    for name in () if numbers_of(model, STATE_SPACE) else READ_BY[STATE_SPACE]:
        if (value := getattr(model, name)) != getattr(type(model)(), name):
            raise UserError(
                f"{name} is {value}, and layer_pattern {model.layer_pattern!r} has no Mamba-2, which alone has it: "
                f"remove {name}"
            )
    if model.ssm_scales is not None and len(model.ssm_scales) != len(SCALED):
        raise UserError(
            f"ssm_scales has {len(model.ssm_scales)} numbers, and needs {len(SCALED)}: of {', '.join(SCALED)}"
        )
    width, heads = model.ssm_head_dim, ssm_heads(model)
    # Mamba-2's default is an inner width of twice the hidden size.
    if model.ssm_heads is None and 2 * model.hidden_size % width:
        raise UserError(
            f"2 x hidden_size {model.hidden_size} is not a multiple of ssm_head_dim {width}, the width of a head of "
            "the layers with a recurrent state: set ssm_heads"
        )
    if heads % ssm_groups(model):
        raise UserError(
            f"ssm_heads {heads} is not divisible by ssm_groups {model.ssm_groups}: use a number of groups that divides "
            f"{heads}"
        )
    if model.ssm_chunk is not None and model.ssm_chunk > model.sequence_length:
        raise UserError(
            f"ssm_chunk {model.ssm_chunk} is longer than sequence_length {model.sequence_length}: use "
            f"{model.sequence_length} or less"
        )


def check_hybrid_run(config: "Config") -> None:
    """Checks that a run of a hybrid model has no settings that its loop over layers does not support.

    Raises:
      UserError: it has one.
    """
    for setting in (name for name, is_set in one_kind_only(config).items() if is_set):
        raise UserError(f"{setting} does not support the family hybrid, whose layers differ: remove it")


HYBRID_FAMILY = Family(
    kind="decoder",
    # The defaults are those of Nemotron-H: recurrent layers know the order of tokens without positions.
    defaults={**LLAMA.defaults, "position": "none", "activation": "relu2"},
    choices={"position": ("none", "rope"), "norm_placement": ("pre",)},
    settings=(DECODER | EXPERTS | HYBRID) - UNSUPPORTED,
    refused_elsewhere=HYBRID,
    check=check_hybrid,
    check_run=check_hybrid_run,
)
