"""Checks of the config that need no mesh; `theory.divisibility` checks what must be divisible by mesh axes."""

import dataclasses
from typing import Any

from mtjax.config.families import FAMILIES
from mtjax.config.model import Model
from mtjax.config.optimizer import Optimizer
from mtjax.config.run import Config
from mtjax.config.setting import setting_of
from mtjax.config.sizes import decoder_layers, head_dim, nearest_divisors, num_kv_heads
from mtjax.config.training import Training
from mtjax.errors import UserError
from mtjax.storage import shown, url_of


def validate(config: Config) -> None:
    """Checks every setting alone, then those that must fit each other.

    Raises:
      UserError: the first setting that is out of bounds, or pair of settings that don't fit.
    """
    for section in vars(config).values():
        check_bounds(section)
    check_heads(config.model)
    check_family(config.model)
    check_positions(config.model)
    check_recompute(config.model, config.training)
    check_loss_scale(config.training)
    check_schedule(config.optimizer)
    check_on_this_machine(config)


def check_on_this_machine(config: Config) -> None:
    """Checks that folders which processes write to at random are no addresses in a store.

    Raises:
      UserError: one is.
    """
    for name, path in (("cache_dir", config.data.cache_dir), ("local_checkpoints", config.output.local_checkpoints)):
        if path is not None and url_of(path):
            raise UserError(
                f"{name} is {shown(path)}, and must be a folder on this machine; only --out and data may be there"
            )


def check_bounds(section: Any) -> None:
    """Checks each setting of a section against the bound in its field's metadata; None is within any.

    Raises:
      UserError: the first that is out of bounds.
    """
    for field in dataclasses.fields(section):
        bound, value = setting_of(field).bound, getattr(section, field.name)
        if bound and value is not None and not bound.admits(value):
            raise UserError(f"{field.name} is {value}, and must be {bound.words}")


def check_heads(model: Model) -> None:
    """Checks that heads divide the model's width, and that key and value heads divide the query heads.

    Raises:
      UserError: they don't; names the nearest numbers that do.
    """
    if model.head_dim is None and model.hidden_size % model.num_heads:
        fits = nearest_divisors(model.hidden_size, model.num_heads)
        raise UserError(
            f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}; "
            f"the nearest num_heads that fit are {fits}"
        )
    if model.num_heads % num_kv_heads(model):
        fits = nearest_divisors(model.num_heads, num_kv_heads(model))
        raise UserError(
            f"num_heads {model.num_heads} do not divide into groups for num_kv_heads {model.num_kv_heads}; "
            f"the nearest num_kv_heads that fit are {fits}"
        )


def check_family(model: Model) -> None:
    """Checks that the family has implemented the chosen values.

    Raises:
      UserError: it does not; names what it has.
    """
    family = FAMILIES[model.family]
    for name, choices in family.choices.items():
        value = getattr(model, name)
        if value not in choices:
            known = " or ".join(choices) + (" only" if len(choices) == 1 else "")
            raise UserError(f"{name} is {value!r}, and the family {model.family} has {known}")
    family.check(model)


def check_positions(model: Model) -> None:
    """Checks that the settings of rotary and relative positions fit each other.

    Raises:
      UserError: the first that don't.
    """
    if model.relative_max_distance <= model.relative_buckets:
        distance, buckets = model.relative_max_distance, model.relative_buckets
        raise UserError(f"relative_max_distance {distance} must be above relative_buckets {buckets}")
    if model.position != "rope":
        return
    if head_dim(model) % 2:
        raise UserError(f"rope rotates pairs, and a head is {head_dim(model)} wide; take an even head_dim")
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if model.rope_scaling == "llama3" and low >= high:
        raise UserError(f"rope_low_frequency_factor {low} must be below rope_high_frequency_factor {high}")


def check_recompute(model: Model, training: Training) -> None:
    """Checks that groups of layers are of equal size, and that there are as many layers as are to be recomputed.

    Raises:
      UserError: they are not, or layer inputs are to be offloaded that are not kept.
    """
    number, layers = training.recompute_num_layers, model.num_layers
    if training.recompute_offload and training.recompute != "full":
        raise UserError(f"recompute_offload keeps layer inputs, and recompute is {training.recompute}: use full")
    if training.recompute != "full":
        return
    if training.recompute_method == "block" and number > layers:
        raise UserError(f"recompute_num_layers {number} is above num_layers {layers}, with recompute_method block")
    stacks = {"num_layers": layers}
    if "num_decoder_layers" in FAMILIES[model.family].own:
        stacks["num_decoder_layers"] = decoder_layers(model)
    for name, count in stacks.items():
        if training.recompute_method == "uniform" and count % number:
            raise UserError(
                f"{name} {count} is not a multiple of recompute_num_layers {number}, the size of uniform groups; "
                f"the nearest that divide it are {nearest_divisors(count, number)}"
            )


def check_loss_scale(training: Training) -> None:
    """Checks that float16's loss scales fit each other and the type.

    Raises:
      UserError: they don't, or a fixed scale is given for a type that needs none.
    """
    if training.initial_loss_scale < training.min_loss_scale:
        raise UserError(
            f"initial_loss_scale {training.initial_loss_scale:g} is below min_loss_scale {training.min_loss_scale:g}"
        )
    if training.loss_scale is not None and training.compute_dtype != "float16":
        raise UserError(
            f"loss_scale is for compute_dtype float16, and compute_dtype is {training.compute_dtype}: leave it out"
        )


def check_schedule(optimizer: Optimizer) -> None:
    """Checks that learning rates and weight decays are in order, and that nothing is set that their styles don't read.

    Raises:
      UserError: the first that is not.
    """
    peak, initial, style = optimizer.learning_rate, optimizer.initial_learning_rate, optimizer.decay_style
    for name in ("min_learning_rate", "initial_learning_rate"):
        if getattr(optimizer, name) > peak:
            raise UserError(f"{name} {getattr(optimizer, name)} is above learning_rate {peak}")
    if initial and not optimizer.warmup_steps:
        raise UserError(f"initial_learning_rate {initial} is where a warmup begins, and warmup_steps is 0")
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(f"decay_steps {optimizer.decay_steps} must be above warmup_steps {optimizer.warmup_steps}")
    if style == "inverse-square-root" and not optimizer.warmup_steps:
        raise UserError("decay_style inverse-square-root is peak x sqrt(warmup_steps / step): set warmup_steps above 0")
    if style == "WSD" and optimizer.wsd_decay_steps is None:
        raise UserError("decay_style WSD needs wsd_decay_steps, how many steps the decay at the end takes")
    if style != "WSD" and (optimizer.wsd_decay_steps, optimizer.wsd_decay_style) != (None, "exponential"):
        raise UserError(f"wsd_decay_steps and wsd_decay_style are for decay_style WSD, and decay_style is {style}")
    start, end, growth = optimizer.start_weight_decay, optimizer.weight_decay, optimizer.weight_decay_style
    if start is None and growth != "constant":
        raise UserError(f"weight_decay_style {growth} needs start_weight_decay, from which it grows to {end}")
    if start is not None and growth == "constant":
        raise UserError(f"start_weight_decay {start} needs weight_decay_style linear or cosine, and this is constant")
    if start is not None and not 0 <= start <= end:
        raise UserError(f"start_weight_decay {start} must be between 0 and weight_decay {end}, to which it grows")
