"""Checks of the config that do not need a mesh; `layout.divisibility` checks what mesh axes must divide."""

import dataclasses
from pathlib import Path
from typing import Any

from mtjax.config.attention import check_attention
from mtjax.config.data import DOCUMENT_SETTINGS
from mtjax.config.experts import check_experts
from mtjax.config.families import check_decoder_settings, family_of, kind_of
from mtjax.config.field_metadata import SAMPLES, setting_of
from mtjax.config.float8 import check_float8
from mtjax.config.latent_checks import check_latent_attention
from mtjax.config.model import Model
from mtjax.config.optimizer import Optimizer
from mtjax.config.optimizer_checks import check_optimizer
from mtjax.config.positions import check_positions
from mtjax.config.prediction_checks import check_prediction
from mtjax.config.run import Config
from mtjax.config.shared_blocks import block_letters
from mtjax.config.sizes import (
    GATED,
    decoder_layers,
    decoder_length,
    expert_size,
    head_dim,
    mlp_size,
    nearest_divisors,
    num_kv_heads,
)
from mtjax.config.ssm import has_attention
from mtjax.config.training import Training
from mtjax.errors import UserError, listed, shortened
from mtjax.families.registry import FAMILIES
from mtjax.storage import shown, url_of


def validate(config: Config) -> None:
    """Checks each setting, then the combinations of settings.

    Raises:
      UserError: a setting is out of bounds, or settings are inconsistent; names the first.
    """
    # Bounds first: the checks after these divide by settings, and build lists as long as others say.
    for section in vars(config).values():
        check_bounds(section)
    check_sizes(config)
    check_heads(config.model)
    check_family(config.model)
    check_latent_attention(config.model)
    check_positions(config.model)
    check_attention(config.model)
    check_experts(config)
    check_prediction(config)
    family_of(config.model.family).check_run(config)
    check_losses(config)
    check_document_settings(config)
    if config.model.mlp_gate_scale != 1 and config.model.activation not in GATED:
        raise UserError(
            f"mlp_gate_scale is {config.model.mlp_gate_scale:g}, and activation {config.model.activation} has no gate: "
            f"use one of {', '.join(GATED)}, or remove mlp_gate_scale"
        )
    if block_letters(config.model) and config.model.activation not in GATED:
        raise UserError(
            f"layer_pattern {config.model.layer_pattern!r} has shared blocks, whose MLP has a gate, and activation "
            f"{config.model.activation} has none: use one of {', '.join(GATED)}"
        )
    check_recompute(config.model, config.training)
    check_adapters(config.model)
    check_loss_scale(config.training)
    check_float8(config)
    check_deterministic(config)
    check_learning_rate_schedule(config.optimizer)
    check_optimizer(config)
    check_on_this_machine(config)


def check_on_this_machine(config: Config) -> None:
    """Checks that folders with random-access writes are on this machine, not in an object store.

    Raises:
      UserError: a folder is an address in an object store.
    """
    for name, path in (("cache_dir", config.data.cache_dir), ("local_checkpoints", config.output.local_checkpoints)):
        if path is not None and url_of(path):
            raise UserError(
                f"{name} is {shown(path)}, and must be a folder on this machine; only --out and data may be in an "
                "object store"
            )


def check_bounds(section: Any) -> None:
    """Checks each setting of a section against the bound in its field's metadata; None is always allowed.

    Raises:
      UserError: a setting is out of bounds; names the first.
    """
    for field in dataclasses.fields(section):
        bound, value = setting_of(field).bound, getattr(section, field.name)
        if bound and value is not None and (expected := bound.why_not(value)):
            raise UserError(f"{field.name} is {shortened(value)}, and must be {expected}")
        if isinstance(value, str | Path):
            _check_text(field.name, value)


LONGEST = {str: 2**16, Path: 4096}
"""Maximum number of characters of a setting, by its type: text (which may list files), or a path on Linux."""


def _check_text(name: str, value: str | Path) -> None:
    """Checks that a text is short enough, and valid in file names and UTF-8."""
    text, longest = str(value), LONGEST[Path if isinstance(value, Path) else str]
    if len(text) > longest:
        raise UserError(f"{name} has {len(text)} characters ({shortened(text)}), and the maximum is {longest}")
    # Line breaks and tabs are not printable either, and are allowed: a text may list files.
    if not text.isprintable() and ("\0" in text or not _is_unicode(text)):
        raise UserError(f"{name} is {text!r}, which contains a character that is not valid in file names and text")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that are not UTF-8
        return False
    return True


ELEMENTS = 2**60
"""Maximum number of elements of a tensor: XLA counts bytes in 64 bits."""


def check_sizes(config: Config) -> None:
    """Checks that no tensor is too large for XLA, and that the run's samples can be numbered.

    Raises:
      UserError: names the settings whose product is too large.
    """
    model, training = config.model, config.training
    if training.train_samples is None and training.steps * training.global_batch_size > SAMPLES:
        raise UserError(
            f"steps {training.steps} of global_batch_size {training.global_batch_size} read "
            f"{training.steps * training.global_batch_size} samples, and a run has at most {SAMPLES}"
        )
    heads, length = model.num_heads, max(model.sequence_length, decoder_length(model))
    layers, vocabulary = max(model.num_layers, decoder_layers(model)), model.vocab_size or 1
    inner = max(mlp_size(model), (model.num_experts or 1) * expert_size(model), model.shared_expert_size)
    widest = max(model.hidden_size, inner, heads * head_dim(model))
    # Tokens of the global batch, as XLA sees arrays before they are sharded.
    tokens = training.global_batch_size * length
    for elements, tensor in (
        (4 * layers * model.hidden_size * widest, f"{layers} layers of weights {model.hidden_size} x {widest}"),
        (2 * layers * tokens * widest, f"{layers} layers of activations {tokens} x {widest}"),
        (2 * layers * tokens * heads * length, f"{layers} layers of scores {tokens} x {heads} x {length}"),
        (tokens * vocabulary, f"logits of {tokens} tokens over {vocabulary}"),
    ):
        if elements > ELEMENTS:
            raise UserError(
                f"{tensor} have {elements:.1e} elements, and a tensor has at most 2^60 ({ELEMENTS:.1e}): make the "
                "model or its batch smaller"
            )


def check_heads(model: Model) -> None:
    """Checks that num_heads divides hidden_size, and num_kv_heads divides num_heads.

    Raises:
      UserError: they do not divide; names the nearest numbers that do.
    """
    if not has_attention(model):
        return
    if model.head_dim is None and not model.kv_lora_rank and model.hidden_size % model.num_heads:
        fits = nearest_divisors(model.hidden_size, model.num_heads)
        raise UserError(
            f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}; "
            f"the nearest num_heads that fit are {fits}"
        )
    if model.num_heads % num_kv_heads(model):
        fits = nearest_divisors(model.num_heads, num_kv_heads(model))
        raise UserError(
            f"num_heads {model.num_heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            f"the nearest num_kv_heads that fit are {fits}"
        )


def check_family(model: Model) -> None:
    """Checks that the family supports the chosen values.

    Raises:
      UserError: the family does not support a value, or a setting; names the values or families that it works with.
    """
    family = family_of(model.family)
    heads = {} if FAMILIES[model.family].with_head else {"head": ("language",)}
    for name, choices in {**family.choices, **heads}.items():
        value = getattr(model, name)
        if value not in choices:
            known = " or ".join(choices) + (" only" if len(choices) == 1 else "")
            raise UserError(f"{name} is {value!r}, and the family {model.family} supports {known}")
    check_decoder_settings(model)
    family.check(model)


def check_losses(config: Config) -> None:
    """Checks that the family has the network with the losses of a teacher's student, or of multi-token prediction.

    Raises:
      UserError: it has not; names the families that have.
    """
    # A task's head, which a run gets after its options were read, has losses of its own.
    is_language = config.model.head == "language" and config.finetuning.task in ("none", "chat")
    needed = {
        "teacher with head language": ("distilled", config.finetuning.teacher is not None and is_language),
        "mtp_num_layers": ("predicting", config.model.mtp_num_layers > 0),
    }
    for setting, (part, is_set) in needed.items():
        known = [family for family, parts in FAMILIES.items() if getattr(parts, part)]
        if is_set and config.model.family not in known:
            raise UserError(
                f"{setting} only works with the families {listed(known)}, and family is {config.model.family}: remove "
                f"{setting.partition(' ')[0]}"
            )


def check_document_settings(config: Config) -> None:
    """Checks that BERT and T5, whose samples are not divided where a document ends, have no settings of such samples.

    Raises:
      UserError: one is set.
    """
    data, family = config.data, config.model.family
    for name in DOCUMENT_SETTINGS:
        if getattr(data, name) and kind_of(config.model) in ("encoder", "encoder-decoder"):
            raise UserError(
                f"{name} has no effect with the family {family}, whose samples are not divided at ends of documents: "
                f"remove {name}"
            )


def check_deterministic(config: Config) -> None:
    """Checks that `deterministic` is not combined with an operation that is never deterministic.

    Raises:
      UserError: it is combined with cuDNN's attention.
    """
    if config.training.deterministic and config.model.attention == "cudnn":
        raise UserError(
            "deterministic cannot be combined with attention cudnn, whose backward pass is not deterministic: use "
            "attention xla or auto"
        )


def check_adapters(model: Model) -> None:
    """Checks that LoRA settings are only used with adapters, in a family that supports them.

    Raises:
      UserError: lora_dropout is set without adapters, or the family does not support adapters.
    """
    if model.lora_dropout and not model.lora_rank:
        raise UserError(
            f"lora_dropout is {model.lora_dropout}, and lora_rank is 0: add --lora-rank, or remove lora_dropout"
        )
    if model.lora_rank and model.family == "t5":
        raise UserError(f"lora_rank is {model.lora_rank}, and the family t5 has no adapters: remove lora_rank")


def check_recompute(model: Model, training: Training) -> None:
    """Checks that recompute groups have equal sizes, and that there are enough layers to recompute.

    Raises:
      UserError: they have not, or recompute_offload is set without full recompute.
    """
    number, layers = training.recompute_num_layers, model.num_layers
    if training.recompute_offload and training.recompute != "full":
        raise UserError(
            f"recompute_offload needs recompute full, and recompute is {training.recompute}: use --recompute full"
        )
    if training.recompute != "full":
        return
    if training.recompute_method == "block" and number > layers:
        raise UserError(f"recompute_num_layers {number} is above num_layers {layers}, with recompute_method block")
    if training.recompute_method == "block" and model.first_dense_layers:
        raise UserError(
            f"recompute_method block needs identical layers, and first_dense_layers is "
            f"{model.first_dense_layers}: use uniform"
        )
    # Layers with and without experts alternate, so that no loop has groups of equal ones.
    if model.moe_every > 1 and (training.recompute_method == "block" or number > 1):
        named = [f"recompute_method {training.recompute_method}"] if training.recompute_method == "block" else []
        named += [f"recompute_num_layers {number}"] if number > 1 else []
        raise UserError(
            f"moe_every is {model.moe_every}, and each layer is then recomputed separately: remove "
            f"{' and '.join(named)}"
        )
    stacks = {"num_layers": layers}
    if dense := model.first_dense_layers:
        stacks = {"first_dense_layers": dense, "num_layers - first_dense_layers": layers - dense}
    if "num_decoder_layers" in family_of(model.family).settings:
        stacks["num_decoder_layers"] = decoder_layers(model)
    for name, count in stacks.items():
        if training.recompute_method == "uniform" and count % number:
            raise UserError(
                f"{name} {count} is not a multiple of recompute_num_layers {number}, the size of uniform groups; "
                f"the nearest that divide it are {nearest_divisors(count, number)}"
            )


def check_loss_scale(training: Training) -> None:
    """Checks that float16's loss scales are consistent with each other and with the type.

    Raises:
      UserError: they are not, or a static scale is set for a type that needs none.
    """
    if training.initial_loss_scale < training.min_loss_scale:
        raise UserError(
            f"initial_loss_scale {training.initial_loss_scale:g} is below min_loss_scale {training.min_loss_scale:g}"
        )
    if training.loss_scale is not None and training.compute_dtype != "float16":
        raise UserError(
            f"loss_scale only works with compute_dtype float16, and compute_dtype is {training.compute_dtype}: remove "
            "loss_scale"
        )


def check_learning_rate_schedule(optimizer: Optimizer) -> None:
    """Checks that learning rates and weight decays are in order, and that each style has the settings it needs and no
    others.

    Raises:
      UserError: a setting is out of order, missing or unused.
    """
    peak, initial, style = optimizer.learning_rate, optimizer.initial_learning_rate, optimizer.decay_style
    for name in ("min_learning_rate", "initial_learning_rate"):
        if getattr(optimizer, name) > peak:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{name} {getattr(optimizer, name)} is above learning_rate {peak}: add {option} {peak / 10:g}, or "
                f"another value up to {peak:g}"
            )
    if initial and not optimizer.warmup_steps:
        raise UserError(f"initial_learning_rate {initial} is for warmup, and warmup_steps is 0: set warmup_steps")
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(f"decay_steps {optimizer.decay_steps} must be above warmup_steps {optimizer.warmup_steps}")
    if style == "inverse-square-root" and not optimizer.warmup_steps:
        raise UserError("decay_style inverse-square-root is peak x sqrt(warmup_steps / step): set warmup_steps above 0")
    if style == "WSD" and optimizer.wsd_decay_steps is None:
        raise UserError("decay_style WSD needs wsd_decay_steps, the number of steps of the final decay")
    if style != "WSD" and (optimizer.wsd_decay_steps, optimizer.wsd_decay_style) != (None, "exponential"):
        raise UserError(f"wsd_decay_steps and wsd_decay_style are for decay_style WSD, and decay_style is {style}")
    start, end, growth = optimizer.start_weight_decay, optimizer.weight_decay, optimizer.weight_decay_style
    if start is None and growth != "constant":
        raise UserError(f"weight_decay_style {growth} needs start_weight_decay, from which it grows to {end}")
    if start is not None and growth == "constant":
        raise UserError(f"start_weight_decay {start} needs weight_decay_style linear or cosine, and it is constant")
    if start is not None and not 0 <= start <= end:
        raise UserError(f"start_weight_decay {start} must be between 0 and weight_decay {end}, to which it grows")
