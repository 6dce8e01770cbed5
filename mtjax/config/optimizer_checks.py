"""Checks of the optimizer's settings."""

from mtjax.config.optimizer import Optimizer
from mtjax.config.run import Config
from mtjax.errors import UserError

MOMENTUM = {"muon_momentum": "muon", "sgd_momentum": "sgd"}
"""Setting -> the optimizer that reads it."""


def check_optimizer(config: Config) -> None:
    """Checks that the optimizer can be used with the other settings, and that it reads those that were set.

    Raises:
      UserError: it can not, or does not.
    """
    options, defaults = config.optimizer, Optimizer()
    # A setting that nothing reads is an error, so that no run is thought to have used it.
    for name, owner in MOMENTUM.items():
        value = getattr(options, name)
        if value != getattr(defaults, name) and options.optimizer != owner:
            raise UserError(
                f"{name} {value:g} is for optimizer {owner}, and optimizer is {options.optimizer}: remove {name}, or "
                f"set optimizer {owner}"
            )
    for name in ("adam_mu_dtype", "adam_nu_dtype"):
        if getattr(options, name) != "float32" and options.optimizer != "adamw":
            raise UserError(
                f"{name} {getattr(options, name)} is for optimizer adamw, and optimizer is {options.optimizer}, whose "
                f"states are float32: remove {name}"
            )
    check_master_dtype(config)
    check_offload(config)
    check_qk_clip(config)
    if options.optimizer != "schedule-free":
        return
    if options.decay_style != "constant":
        raise UserError(
            f"optimizer schedule-free averages weights instead of decaying the learning rate, and decay_style is "
            f"{options.decay_style}: add --decay-style constant"
        )
    if config.finetuning.layer_decay != 1.0:
        raise UserError(
            f"optimizer schedule-free has one learning rate for all layers, and layer_decay is "
            f"{config.finetuning.layer_decay:g}: set layer_decay 1, or optimizer adamw"
        )


def check_master_dtype(config: Config) -> None:
    """Checks that master weights can be stored in the type that is set.

    Raises:
      UserError: they can not.
    """
    kind = config.optimizer.master_dtype
    if kind == "float32":
        return
    if config.training.compute_dtype != kind:
        raise UserError(
            f"master_dtype {kind} stores weights in the type in which products read them, and compute_dtype is "
            f"{config.training.compute_dtype}: set compute_dtype {kind}, or master_dtype float32"
        )
    if config.optimizer.optimizer == "schedule-free":
        raise UserError(
            f"optimizer schedule-free stores an average of weights whose changes become smaller with every step, and "
            f"master_dtype is {kind}: set master_dtype float32"
        )


def check_offload(config: Config) -> None:
    """Checks that the optimizer's states, and master weights, can be offloaded.

    Raises:
      UserError: a setting is not supported together with it.
    """
    kind = config.parallel.offload
    if kind == "none":
        return
    needed: list[tuple[str, object, object]] = [
        ("optimizer", config.optimizer.optimizer, "adamw"),
        ("adam_mu_dtype", config.optimizer.adam_mu_dtype, "float32"),
        ("adam_nu_dtype", config.optimizer.adam_nu_dtype, "float32"),
        ("layer_decay", config.finetuning.layer_decay, 1.0),
        ("router_bias", config.model.router_bias, False),
        ("check_replicas", config.training.check_replicas, 0),
    ]
    if kind == "optimizer,parameters":
        if config.training.compute_dtype == "float32":
            raise UserError(
                "offload optimizer,parameters keeps copies of the weights in the compute dtype on the device, and "
                "compute_dtype is float32, so that they would be as large: set compute_dtype bfloat16, or offload "
                "optimizer"
            )
        needed += [
            ("master_dtype", config.optimizer.master_dtype, "float32"),
            ("fp8", config.training.fp8, "none"),  # whose scales are found from masters after the update
        ]
    for name, value, only in needed:
        if value != only:
            less = "optimizer" if name in ("master_dtype", "fp8") else "none"
            raise UserError(
                f"offload {kind} works with {name} {str(only).lower()} only, and {name} is {str(value).lower()}: "
                f"change it, or set offload {less}"
            )


def check_qk_clip(config: Config) -> None:
    """Checks that query and key weights can be scaled by the largest attention scores.

    Raises:
      UserError: a setting is not supported together with it.
    """
    options, model = config.optimizer, config.model
    if not options.qk_clip:
        if options.qk_clip_alpha != Optimizer().qk_clip_alpha:
            raise UserError(
                f"qk_clip_alpha is {options.qk_clip_alpha:g}, and qk_clip is 0: add --qk-clip 100, or remove "
                "qk_clip_alpha"
            )
        return
    against = {
        f"the family {model.family}": model.family not in ("gpt", "llama"),
        f"attention {model.attention}, which does not keep the largest scores": model.attention
        not in ("auto", "xla", "blocks"),
        "qk_norm, which normalizes queries and keys whatever their weights": model.qk_norm,
        f"qkv_clip {model.qkv_clip}, which clips queries and keys": model.qkv_clip is not None,
        f"LoRA, which freezes query and key weights, and lora_rank is {model.lora_rank}": model.lora_rank > 0,
        f"multi-token prediction, and mtp_num_layers is {model.mtp_num_layers}": model.mtp_num_layers > 0,
        "optimizer schedule-free, which averages weights": options.optimizer == "schedule-free",
        f"offload {config.parallel.offload}": config.parallel.offload != "none",
    }
    for found in (found for found, holds in against.items() if holds):
        raise UserError(f"qk_clip {options.qk_clip:g} does not support {found}: change it, or remove qk_clip")
