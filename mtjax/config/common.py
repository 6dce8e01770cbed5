"""The settings that `--help` shows, by topic; `--help-all` shows all settings."""

from collections.abc import Mapping

_MODEL = (
    *("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size", "sequence_length", "vocab_size"),
    *("hidden_dropout", "attention_dropout", "num_experts"),
)
_DATA = ("data", "valid_data", "tokenizer")
_PARALLELISM = ("mesh", "zero", "sequence_parallel")
_OUTPUT = ("out", "resume", "log_every", "valid_every", "checkpoint_every")

COMMON: Mapping[str, tuple[str, ...]] = {
    "model": _MODEL,
    "data": _DATA,
    "batch and learning rate": (
        *("steps", "global_batch_size", "microbatch_size", "learning_rate", "min_learning_rate", "warmup_steps"),
        *("decay_style", "weight_decay", "compute_dtype", "recompute", "seed", "init_from"),
    ),
    "parallelism": _PARALLELISM,
    "output": _OUTPUT,
}
"""Settings that `--help` of `mtjax train`, and of the commands that read its config, shows."""

COMMON_FINETUNING: Mapping[str, tuple[str, ...]] = {
    "task": (
        *("task", "epochs", "warmup_fraction", "patience", "class_weights", "text_fields", "label_field", "labels"),
        *("teacher", "chat_template"),
    ),
    "model": (
        "init_from",
        "sequence_length",
        "lora_rank",
        "lora_alpha",
        "lora_targets",
        "retro_frozen",
        "attention_dropout",
    ),
    "data": (*_DATA, "split"),
    "batch and learning rate": (
        *("global_batch_size", "microbatch_size", "learning_rate", "min_learning_rate", "decay_style"),
        *("weight_decay", "compute_dtype", "recompute", "seed"),
    ),
    "parallelism": _PARALLELISM,
    "output": _OUTPUT,
}
"""Settings that `mtjax finetune --help` shows."""
