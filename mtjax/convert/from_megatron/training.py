"""Translates batches, learning rates, precision and data of a Megatron-LM run."""

import re
from pathlib import Path
from typing import Any

from mtjax.config import Config
from mtjax.config.data import DOCUMENT_SETTINGS
from mtjax.convert.from_megatron.translated import Translation
from mtjax.errors import UserError
from mtjax.migrate.argument import option_of
from mtjax.migrate.megatron import OF_MODEL, TABLE, by_dest

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_KINDS = ("GPT2BPETokenizer", "HuggingFaceTokenizer", *_SENTENCEPIECE)


def translate_plain(to: Translation) -> None:
    """Copies arguments outside the model that have the same value in mtjax."""
    for row in TABLE:
        value = to.get(row.dest)
        # A switch that is off has no setting: mtjax's defaults are off, too.
        if row.setting and row.dest not in OF_MODEL and value is not None and value is not False:
            to.set(row.dest, {row.setting: value})
    if to.settings.get("valid_batches") == 0:  # disables validation in Megatron
        to.set("eval_iters", {"valid_batches": 1, "valid_every": 0})


def translate_batches_and_rates(to: Translation) -> None:
    """Adds batch sizes, steps, learning rates and weight decay to a translation.

    Raises:
      UserError: sizes of batches are missing, or both steps and samples are given.
    """
    batch = to.settings["global_batch_size"]
    if to.has("train_iters") and to.has("train_samples"):
        raise UserError(f"{to.given.source} has both --train-iters and --train-samples: remove one of them")
    if to.has("rampup_batch_size"):
        to.set("rampup_batch_size", {"rampup_batch_size": list(to.get("rampup_batch_size"))})
        to.differences.append(
            "--rampup-batch-size: learning rate schedules count steps in mtjax, and samples in Megatron: while batches"
            " are small, mtjax's learning rate schedule advances faster per sample"
        )
    for dest, setting in (
        ("lr_decay_samples", "decay_steps"),
        ("lr_warmup_samples", "warmup_steps"),
        ("lr_wsd_decay_samples", "wsd_decay_steps"),
    ):
        if to.get(dest):
            to.set(dest, {setting: max(1, round(to.get(dest) / batch))})
            if to.get(dest) % batch:
                steps = to.settings[setting]
                to.differences.append(f"{option_of(setting)} {steps}: {to.get(dest)} samples, rounded to steps")
    if to.has("lr_warmup_fraction"):
        # Megatron's warmup is a fraction of the decay, whose default length is that of the run.
        steps = to.settings.get("decay_steps") or to.get("train_iters") or (to.get("train_samples") or 0) / batch
        to.set("lr_warmup_fraction", {"warmup_steps": round(to.get("lr_warmup_fraction") * steps)})
    # It has no effect with other styles.
    if to.settings.get("decay_style") != "WSD":
        to.settings.pop("wsd_decay_style", None)
    if to.has("end_weight_decay"):
        to.set("end_weight_decay", {"weight_decay": to.get("end_weight_decay")})
    if (to.has("eod_mask_loss") or to.given.family == "bert") and not to.has("calculate_per_token_loss"):
        to.differences.append(
            "loss: the mean over all tokens of the global batch that count, as with --calculate-per-token-loss; without"
            " it Megatron averages the means of microbatches, so tokens of a microbatch with fewer of them weigh more"
        )
    run = Config()
    for dest, description, value in (
        ("lr", "learning rate", run.optimizer.learning_rate),
        ("train_iters", "number of steps", run.training.steps),
    ):
        if not to.has(dest) and not (dest == "train_iters" and to.has("train_samples")):
            name = by_dest()[dest].names[0]
            to.differences.append(f"{name} is missing or could not be read: {value}, mtjax's default {description}")


def translate_precision(to: Translation) -> None:
    """Adds dtypes, recompute and the attention kernel to a translation."""
    dtype = next(
        (to_dtype for dest, to_dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if to.has(dest)), "float32"
    )
    # Megatron computes in float32 without either, mtjax in bfloat16: the type is always written.
    to.set(next((dest for dest in ("bf16", "fp16") if to.has(dest)), "bf16"), {"compute_dtype": dtype})
    # Without float16 these have Megatron's defaults, or change no result; mtjax refuses a loss scale then.
    if dtype != "float16":
        for setting in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            to.settings.pop(setting, None)
    for kind in ("e4m3", "hybrid"):
        if to.has(f"fp8_{kind}"):  # of 2023
            to.given.values["fp8_format"], to.given.typed["fp8_format"] = kind, f"--fp8-{kind}"
    if to.has("fp8_format"):
        _translate_float8(to)
    if to.has("grad_reduce_in_bf16"):
        to.set("grad_reduce_in_bf16", {"grad_reduce_dtype": "bfloat16"})
    if to.has("recompute_activations"):
        to.set("recompute_activations", {"recompute": "selective"})
    # Older names of recompute.
    if to.has("checkpoint_activations") or to.has("activations_checkpoint_method"):
        method = to.get("activations_checkpoint_method") or "uniform"
        layers = to.get("activations_checkpoint_num_layers")
        to.settings |= {"recompute": "full", "recompute_method": method, "recompute_num_layers": layers}
        to.implied |= {"recompute_method", "recompute_num_layers"} if (method, layers) == ("uniform", 1) else set()
    if to.settings.get("recompute") != "full":
        for setting in ("recompute_method", "recompute_num_layers"):
            to.settings.pop(setting, None)
    if to.settings.get("fp8") and to.has("first_last_layers_bf16"):
        _translate_ends(to)
    _attention(to)
    for row in TABLE:
        # Those of the model are checked by `unsupported`.
        if row.same is not None and row.dest not in OF_MODEL and row.dest in to.given.values:
            if to.get(row.dest) in row.same:
                to.unneeded.setdefault(row.dest, "the same in mtjax")
            else:
                to.drop(row.dest)


def _translate_float8(to: Translation) -> None:
    """Adds products in 8 bits, with the recipes that mtjax has."""
    recipe, kind = to.get("fp8_recipe"), to.get("fp8_format")
    if to.given.family != "gpt":
        to.drop("fp8_format", f"FP8 does not support the family {to.given.family}")
        return
    if recipe not in ("delayed", "tensorwise") or kind not in ("hybrid", "e4m3"):
        why = "of Megatron's recipes mtjax has delayed and tensorwise, and of its formats hybrid and e4m3"
        to.drop("fp8_format", f"{why}: no {recipe} with {kind}")
        return
    to.set("fp8_format", {"fp8": recipe, "fp8_format": kind})
    if recipe == "delayed":
        # With most_recent only the last step's largest value counts.
        steps = to.get("fp8_amax_history_len") if to.get("fp8_amax_compute_algo") == "max" else 1
        to.set("fp8_amax_history_len", {"fp8_amax_history": steps})


def _translate_ends(to: Translation) -> None:
    """Adds the numbers of first and last layers in 16 bits."""
    if (stages := to.get("pipeline_model_parallel_size")) > 1:
        to.drop("first_last_layers_bf16", f"it does not support pipeline parallelism, and there are {stages} stages")
        return
    if to.settings.get("first_dense_layers") or (to.settings.get("moe_every") or 1) > 1:
        to.drop("first_last_layers_bf16", "it does not support dense layers beside layers with experts")
        return
    first, last = (to.get(f"num_layers_at_{end}_in_bf16") for end in ("start", "end"))
    method, group = (to.settings.get(f"recompute_{name}") for name in ("method", "num_layers"))
    if method == "block" or (group or 1) > 1:
        to.drop("first_last_layers_bf16", "it does not support recompute by blocks or by groups of layers")
        return
    if first + last >= (layers := to.settings["num_layers"]):
        to.drop("first_last_layers_bf16", f"it would leave none of the {layers} layers in 8 bits")
        return
    to.set("first_last_layers_bf16", {"fp8_bf16_first_layers": first, "fp8_bf16_last_layers": last})


def translate_optimizer_memory(to: Translation) -> None:
    """Adds the types of Adam's moments, and whether they are in host memory, to a translation."""
    for dest, setting in (("exp_avg_dtype", "adam_mu_dtype"), ("exp_avg_sq_dtype", "adam_nu_dtype")):
        dtype = to.given.values.get(dest, "fp32")
        if dtype == "fp32":
            continue
        if not to.has("use_precision_aware_optimizer"):
            to.unneeded[dest] = "without --use-precision-aware-optimizer, Megatron keeps float32"
        elif dtype == "bf16":
            to.set(dest, {setting: "bfloat16"})
        else:
            to.drop(dest, "the moment is float32")
    if to.has("optimizer_cpu_offload"):
        against = [
            name
            for name in ("adam_mu_dtype", "adam_nu_dtype", "router_bias", "check_replicas")
            if to.settings.get(name)
        ]
        if against:
            to.drop("optimizer_cpu_offload", f"moments stay on the devices: --offload does not support {against[0]}")
        else:
            to.set("optimizer_cpu_offload", {"offload": "optimizer"})


def translate_qk_clip(to: Translation) -> None:
    """Adds the bound of attention scores to a translation."""
    details = ("qk_clip_threshold", "qk_clip_alpha")
    if not to.has("qk_clip"):
        to.unneeded |= {dest: "without --qk-clip" for dest in details if dest in to.given.values}
        return
    against = [name for name in ("qk_norm", "mtp_num_layers", "offload") if to.settings.get(name)]
    against += [f"the family {to.given.family}"] if to.given.family != "gpt" else []
    against += ["context parallelism"] if to.get("context_parallel_size") > 1 else []
    reason = f"--qk-clip does not support {against[0]}" if against else "--qk-clip-threshold is 0"
    if against or not to.get("qk_clip_threshold"):
        to.drop("qk_clip", f"scores are not bounded: {reason}")
        to.unneeded |= {dest: "without --qk-clip" for dest in details if dest in to.given.values}
        return
    to.set("qk_clip", {"qk_clip": to.get("qk_clip_threshold")})
    if to.get("qk_clip_alpha") != by_dest()["qk_clip_alpha"].default:
        to.set("qk_clip_alpha", {"qk_clip_alpha": to.get("qk_clip_alpha")})
    # mtjax refuses the two together.
    if to.settings.get("attention") == "cudnn":
        del to.settings["attention"]
    to.differences.append(
        "--qk-clip needs the largest scores, which cuDNN's flash attention does not keep: XLA's attention is used, "
        "for long samples with the scores of a few queries at a time"
    )


def _attention(to: Translation) -> None:
    """Adds the attention kernel: mtjax uses flash attention with separate documents only where it is asked for."""
    if to.given.values.get("attention_backend") in ("unfused", "local"):
        to.set("attention_backend", {"attention": "xla"})
    elif to.has("reset_attention_mask") and to.asks_for_flash:
        to.settings["attention"] = "cudnn"
        to.differences.append(
            "--attention cudnn: flash attention that keeps documents apart (--reset-attention-mask), "
            "on Hopper and Blackwell"
        )


def translate_data(to: Translation) -> None:
    """Adds corpora and the tokenizer to a translation."""
    if to.given.family == "bert":
        for name in (name for name in DOCUMENT_SETTINGS if to.has(name)):
            del to.settings[name]
            to.unneeded[name] = "the samples of BERT are not divided at ends of documents: Megatron ignores it"
    for dest, setting in (
        ("data_path", "data"),
        ("train_data_path", "train_data"),
        ("valid_data_path", "valid_data"),
        ("test_data_path", "test_data"),
    ):
        if to.has(dest):
            value = to.get(dest)
            to.set(dest, {setting: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)})
    shares = to.given.values.get("split")
    if shares is None:
        to.settings.pop("split", None)  # Megatron's default is mtjax's
    elif isinstance(shares, tuple):
        # `--split 969, 30, 1` comes as three words.
        to.settings["split"] = ",".join(str(share).strip(",") for share in shares)
    else:
        to.settings["split"] = str(shares).replace(" ", "")
    tokenizer = _tokenizer(to)
    if tokenizer is not None:
        to.set("tokenizer_type", {"tokenizer": tokenizer})
        to.implied.discard("tokenizer")


def _tokenizer(to: Translation) -> str | None:
    """Returns KIND:PATH of the tokenizer; None, with a note, if it is not supported."""
    kind, model = to.given.values.get("tokenizer_type"), to.given.values.get("tokenizer_model")
    vocabulary = to.given.values.get("vocab_file")
    if kind == "GPT2BPETokenizer" or (kind is None and to.has("merge_file")):
        return _gpt2(to, vocabulary)
    if kind in _SENTENCEPIECE and model is not None:
        return f"sentencepiece:{model}"
    if kind == "HuggingFaceTokenizer" and model is not None:
        path = str(model) if str(model).endswith(".json") else f"{model}/tokenizer.json"
        # A name on the hub looks like a relative folder.
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(model)) and path != str(model):
            to.differences.append(
                f"--tokenizer hf:{path}: must be a local file; if {model} is a name on the hub: hf download {model}"
                f" --local-dir {model}"
            )
        return f"hf:{path}"
    if str(kind).startswith("BertWordPiece") and vocabulary is not None:
        return f"bert:{vocabulary}"
    if kind == "NullTokenizer":
        to.drop("tokenizer_type", "mtjax always has a tokenizer, by default one trained on the text")
    elif kind is not None and kind not in _KINDS and not str(kind).startswith("BertWordPiece"):
        to.drop("tokenizer_type", "add --tokenizer KIND:PATH; the kinds are gpt2, bert, hf and sentencepiece")
    elif kind is None and vocabulary is not None:
        to.drop("vocab_file", "--tokenizer-type is missing: add --tokenizer gpt2:FOLDER or --tokenizer bert:FILE")
    return None


def _gpt2(to: Translation, vocabulary: Any) -> str | None:
    """Returns gpt2:FOLDER, which contains the two files of GPT-2's tokenizer, with a note if their names differ."""
    if vocabulary is None:
        return None
    folder = Path(str(vocabulary)).parent
    names = [Path(str(name)).name for name in (vocabulary, to.given.values.get("merge_file") or "merges.txt")]
    if names not in (["vocab.json", "merges.txt"], ["encoder.json", "vocab.bpe"]):
        to.differences.append(
            f"--tokenizer gpt2:{folder}: rename the files there to vocab.json and merges.txt, from"
            f" {' and '.join(names)}"
        )
    return f"gpt2:{folder}"
