"""Translates the model of a Megatron-LM run."""

from typing import Any

from mtjax.config import Config, replace
from mtjax.config.layer_pattern import expanded
from mtjax.convert.from_megatron.training_only import OF_TRAINING, translate_training_only
from mtjax.convert.from_megatron.translated import Translation
from mtjax.convert.megatron_arguments import described, unsupported
from mtjax.convert.megatron_stages import uneven_arguments
from mtjax.errors import UserError
from mtjax.families.hybrid.megatron_arguments import ALLOWED, DELTA_NETS, DELTA_SIZES, VARIANTS, is_hybrid, pattern_of
from mtjax.migrate.megatron import OF_MODEL, TABLE, default_of, supported
from mtjax.migrate.model_arguments import LATENT

_NAMES = {
    "gpt": frozenset({"decoder.layers."}),
    "hybrid": frozenset({"decoder.layers."}),
    "bert": frozenset({"lm_head.", "binary_head.", "tokentype_embeddings"}),
}
"""Prefixes of tensors' names in Megatron's checkpoints of each family, by which `described` recognizes it."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

_DECIDED_BY = {
    "layer_pattern": "hybrid_layer_pattern",
    "norm": "normalization",
    "activation": "swiglu",
    "bias": "add_bias_linear",
    "attention_bias": "add_qkv_bias",
    "position": "position_embedding_type",
    "tie_embeddings": "untie_embeddings_and_output_weights",
    "qk_norm": "qk_layernorm",
    "qk_norm_kind": "qk_layernorm",
    "qk_norm_bias": "qk_layernorm",
    "norm_weight": "apply_layernorm_1p",
    "attention_sinks": "softmax_type",
    "attention_window": "window_size",
    "window_layers": "window_attn_skip_freq",
    "rope_layers": "no_rope_freq",
    "router_aux_loss": "moe_aux_loss_coeff",
    "router_normalize": "moe_router_pre_softmax",
    "router_bias": "moe_router_enable_expert_bias",
    "rope_scaling": "use_rope_scaling",
    "rope_fraction": "rotary_percent",
}
"""Settings -> the argument that determines them, if the two have different values."""


def translate_model(to: Translation) -> None:
    """Adds the settings of the model to a translation.

    Raises:
      UserError: a required argument is missing.
    """
    given = to.given
    # Scripts of BERT, and old ones, may have --max-position-embeddings without --seq-length.
    if given.values.get("seq_length") is None and given.values.get("max_position_embeddings") is not None:
        given.values["seq_length"] = given.values["max_position_embeddings"]
    letters = _letters(to)
    missing = [row.names[0] for row in TABLE if row.dest in _NEEDED and given.values.get(row.dest) is None]
    if missing:
        unread = [f"{typed} ({why})" for typed, why in given.unread if typed.split()[0] in missing]
        raise UserError(f"{given.source}: missing {', '.join(missing)}{': ' if unread else ''}{'; '.join(unread)}")
    arguments = _arguments(to, ALLOWED if letters else frozenset())
    names = _NAMES[given.family]
    if given.family == "bert" and not to.get("bert_binary_head"):
        names -= {"binary_head."}
    # Megatron's norm of queries and keys is of the kind of the other norms. mtjax trains both kinds; the tables of
    # checkpoints, by which `unsupported` decides, have RMS norm alone.
    norms_queries = {"qk_layernorm": False} if arguments.get("normalization") != "RMSNorm" or letters else {}
    for reason in unsupported(arguments | norms_queries, is_core=True, letters=letters):  # trained, but not converted
        to.differences.append(f"the model is not fully supported by mtjax: {reason}")
    settings = described(arguments | ({"qk_layernorm": False} if letters else {}), names, letters)
    if settings["qk_norm"] and norms_queries:
        settings |= {"qk_norm_kind": "layernorm", "qk_norm_bias": True}
    for_training = translate_training_only(to)
    settings |= for_training
    settings["sequence_length"] = to.get("seq_length")
    # None is a kind of positions that mtjax lacks, which `unsupported` has reported.
    settings["position"] = settings["position"] or "learned"
    # A negative factor drops no tokens, as without one.
    if to.get("moe_expert_capacity_factor") not in (None, -1, -1.0):
        settings["capacity_factor"] = float(to.get("moe_expert_capacity_factor"))
        to.differences.append(
            "--capacity-factor: computed per sample, and the last tokens of a sample are dropped first"
        )
    if layers := to.get("mtp_num_layers"):
        settings |= {"mtp_num_layers": layers, "mtp_loss_scaling_factor": to.get("mtp_loss_scaling_factor")}
    if settings.get("router_aux_loss"):
        to.differences.append(
            "--router-aux-loss: computed per sample, as Megatron's seq_aux_loss; its aux_loss is per microbatch"
        )
    _positions(to, settings)
    _vocabulary(to, settings)
    dests = {row.setting: row.dest for row in TABLE if row.setting and row.dest in OF_MODEL} | _DECIDED_BY
    if "G" in letters and "M" not in letters:
        dests |= {ours: theirs for theirs, ours in DELTA_SIZES.items()}
    defaults = replace(Config(), family=settings["family"]).model
    for name, value in settings.items():
        if value is None or (name == "num_layers" and letters):
            continue
        # A setting without an argument of its own follows from those that describe the network; num_layers, which is
        # always given, stands for them.
        to.set(dests.get(name, "num_layers"), {name: value})
        if name not in dests and value == getattr(defaults, name) and name != "family":
            to.implied.add(name)
    # These were given, under names that are not in the table's rows.
    to.implied -= {*for_training, "layer_pattern"}


def _stages_of_pattern(to: Translation) -> None:
    """Adds the layers of each pipeline stage, where a hybrid pattern divides them by |.

    Raises:
      UserError: another argument divides them, too.
    """
    pattern = str(to.get("hybrid_layer_pattern") or "")
    parts, others = pattern.split("|"), uneven_arguments(to.given.values)
    if len(parts) > 1 and others:
        raise UserError(
            f"{to.given.source}: --hybrid-layer-pattern {pattern} and --{others[0].replace('_', '-')} both divide the "
            "layers among pipeline stages: remove one of them, as Megatron takes no such script"
        )
    counts, stages = [len(expanded(part)) for part in parts], to.get("pipeline_model_parallel_size") or 1
    if len(counts) == stages and min(counts):
        to.settings |= {"layers_per_stage": counts} if len(set(counts)) > 1 else {}
    # The layers are the same however they are divided, so the model is translated.
    elif len(counts) > 1:
        why = f"there are {stages} pipeline stages" if stages > 1 else "there is 1 pipeline stage"
        if len(counts) == stages:
            why = "one is empty, and each pipeline stage of mtjax has a layer"
        to.differences.append(
            f"--layer-pattern: its {len(counts)} parts between | are ignored, as {why}; stages have equal numbers of "
            "layers"
        )


def _letters(to: Translation) -> str:
    """Returns the letters of a hybrid model's layers, "" for another model; notes what they replace.

    Raises:
      UserError: mtjax has no such layers.
    """
    given = to.given
    if given.family != "hybrid" and not is_hybrid(given.values):
        return ""
    given.family, letters = "hybrid", pattern_of(given.values)
    if (layers := given.values.get("num_layers")) not in (None, len(letters)):
        to.differences.append(f"--layer-pattern: its {len(letters)} layers, not the {layers} of --num-layers")
    _stages_of_pattern(to)
    given.values["num_layers"] = len(letters)
    to.unneeded |= {
        dest: why
        for dest, why in {
            "moe_layer_freq": "the pattern says which layers have experts",
            "qk_layernorm": "Megatron's hybrid models ignore it",
            "spec": "the pattern says what the layers are",
            "linear_attention_freq": "the pattern says which layers are gated delta nets",
            VARIANTS: "the pattern says which layers are gated delta nets",
        }.items()
        if dest in given.values and (dest != VARIANTS or ("G" in letters and given.values[dest] in DELTA_NETS))
    }
    return letters


def _arguments(to: Translation, allowed: frozenset[str]) -> dict[str, Any]:
    """Returns Megatron's arguments with defaults filled in, and those that are not supported set to defaults, but for
    those that are `allowed` to have other values."""
    defaults = {dest: default for dest in OF_MODEL if (default := default_of(dest)) is not None}
    arguments = defaults | to.given.values
    # Unsupported values are noted, and the model is translated with the default instead.
    for dest, values in supported().items():
        if dest in to.given.values and arguments[dest] not in values and dest not in OF_TRAINING | allowed:
            to.drop(dest)
    # `described` sees the defaults: what was dropped is not in the model, and what only trains is added by
    # `translate_training_only`.
    for dest in [*to.unsupported, *OF_TRAINING]:
        arguments[dest] = defaults.get(dest)
    latent = {row.dest for row in LATENT} & to.given.values.keys()
    if to.has("multi_latent_attention"):
        to.unsupported |= dict.fromkeys(latent, "latent attention is not translated: see --multi-latent-attention")
    else:
        to.unneeded |= dict.fromkeys(latent, "without --multi-latent-attention, Megatron ignores it")
    arguments.setdefault("max_position_embeddings", arguments["seq_length"])
    if arguments.get("add_qkv_bias") and arguments["add_bias_linear"]:
        arguments["add_qkv_bias"] = False
        to.unneeded["add_qkv_bias"] = "all linear layers have biases already"
    if arguments.get("ffn_hidden_size") is None and arguments["swiglu"]:
        # Megatron's default with --swiglu: 2/3 of 4 x hidden size, rounded down to a multiple of 64.
        arguments["ffn_hidden_size"] = int(4 * arguments["hidden_size"] * 2 / 3 / 64) * 64
    return arguments


def _positions(to: Translation, settings: dict[str, Any]) -> None:
    """Notes if there are more learned positions than the sequence length, and if RoPE rotates all of a head."""
    if to.given.values.get("rotary_percent") == 1:
        to.unneeded["rotary_percent"] = "Megatron's default; the same in mtjax"
    longest, length = to.get("max_position_embeddings"), to.get("seq_length")
    if settings["position"] == "learned" and longest not in (None, length):
        to.differences.append(
            f"--max-position-embeddings {longest}: mtjax has as many learned positions as --sequence-length, {length}"
        )


def _vocabulary(to: Translation, settings: dict[str, Any]) -> None:
    """Sets vocab_size and vocab_multiple; Megatron pads to a multiple of a number times the tensor parallel degree."""
    tensor = to.get("tensor_model_parallel_size")
    multiple = to.get("make_vocab_size_divisible_by") * tensor
    to.set("make_vocab_size_divisible_by", {"vocab_multiple": multiple})
    size = to.given.values.get("vocab_size")
    if size is not None:
        # NullTokenizer adds an end-of-document token to --vocab-size.
        is_null = to.given.values.get("tokenizer_type") == "NullTokenizer"
        settings["vocab_size"] = size + is_null
    to.differences.append(
        f"--vocab-multiple {multiple}: padded as in Megatron ({multiple // tensor} x TP {tensor}), but padding is left"
        " out of softmax and loss"
    )
