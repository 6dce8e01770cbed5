"""Megatron-LM's names of tensors, and the arguments that say what model they are."""

from collections.abc import Mapping
from typing import Any

from mtjax.config import Model, head_dim, mlp_size, num_kv_heads
from mtjax.convert.families.rows import linear, norm, row
from mtjax.convert.table import Row, Table
from mtjax.errors import UserError

LANGUAGE, LAYERS = "language_model", "stack.layers"
BLOCK = f"{LANGUAGE}.encoder.layers.{{layer}}"
EMBEDDING = f"{LANGUAGE}.embedding.word_embeddings.weight"
HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of the embedding, for the output."""

QKV_ORDERS: Mapping[float, str] = {
    0.0: "qkv*heads*head_dim",
    1.0: "heads*head_dim*qkv",
    2.0: "heads*qkv*head_dim",
    3.0: "heads*qkv*head_dim",
}
"""checkpoint_version -> the order of the rows of query_key_value (`fix_query_key_value_ordering` in Megatron)."""


def table(version: float) -> Table:
    """The tensors of GPT and BERT in a version of the format.

    Raises:
      UserError: there is no such version.
    """
    if version not in QKV_ORDERS:
        raise UserError(f"checkpoint_version is {version:g}, and the known ones are 0, 1, 2 and 3")
    rows: tuple[Row, ...] = (
        row("embedding", EMBEDDING, "vocab embed"),
        row("positions", f"{LANGUAGE}.embedding.position_embeddings.weight", "seq embed"),
        row("token_types", f"{LANGUAGE}.embedding.tokentype_embeddings.weight", "token_types embed"),
        *norm(f"{LAYERS}.attention_norm", f"{BLOCK}.input_layernorm"),
        *linear(f"{LAYERS}.attention.qkv", f"{BLOCK}.self_attention.query_key_value", "embed", QKV_ORDERS[version]),
        *linear(f"{LAYERS}.attention.output", f"{BLOCK}.self_attention.dense", "heads*head_dim", "embed"),
        *norm(f"{LAYERS}.mlp_norm", f"{BLOCK}.post_attention_layernorm"),
        *linear(f"{LAYERS}.mlp.up", f"{BLOCK}.mlp.dense_h_to_4h", "embed", "mlp"),
        *linear(f"{LAYERS}.mlp.down", f"{BLOCK}.mlp.dense_4h_to_h", "mlp", "embed"),
        *norm("final_norm", f"{LANGUAGE}.encoder.final_layernorm"),
        row("output", f"{LANGUAGE}.output_layer.weight", "vocab embed"),
        *linear("head.dense", "lm_head.dense", "features", "embed"),
        *norm("head.norm", "lm_head.layernorm"),
        row("head.bias", "lm_head.bias", "vocab"),
        *linear("order.pooler", f"{LANGUAGE}.pooler.dense", "embed", "features"),
        *linear("order.classifier", "binary_head", "embed", "classes"),
    )
    return Table(
        f"a GPT or BERT of Megatron-LM (checkpoint_version {version:g})",
        rows,
        ignored=(r".*_extra_state",),
        copies={HEAD_COPY: EMBEDDING},
        optional=("head", "order.pooler", "order.classifier"),
    )


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False, None),
    "num_experts": (None, 1),
    "group_query_attention": (False, None),
    "multi_latent_attention": (False, None),
    "normalization": ("LayerNorm", None),
    "apply_layernorm_1p": (False, None),
    "swiglu": (False, None),
    "squared_relu": (False, None),
    "add_bias_linear": (True, None),
    "add_position_embedding": (True, None),
    "use_rotary_position_embeddings": (False, None),
    "position_embedding_type": ("learned_absolute", None),
}
"""Arguments, and the values with which a model is one of the tables above."""


def model_settings(arguments: Mapping[str, Any], names: frozenset[str], source: str) -> dict[str, Any]:
    """Our settings of a model from Megatron's arguments and the names of its tensors.

    Raises:
      UserError: the arguments are not there, or describe a model that is not supported: lists all of it.
    """
    wrong = [
        f"{key} is {arguments[key]!r}"
        for key, values in UNSUPPORTED.items()
        if key in arguments and _plain(arguments[key]) and arguments[key] not in values
    ]
    if wrong:
        raise UserError(f"{source} is a model that can't be converted: {', '.join(wrong)}")
    needed = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in needed if arguments.get(name) is None]
    if missing:
        raise UserError(f"{source} does not say its {', '.join(missing)}: describe the model with --config FILE")
    is_bert = any(name.startswith(("lm_head.", "binary_head.")) or ".pooler." in name for name in names)
    tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu", False)
    found = {
        "family": "bert" if is_bert else "gpt",
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": arguments["num_attention_heads"],
        "head_dim": arguments.get("kv_channels"),
        "mlp_size": arguments.get("ffn_hidden_size"),
        "sequence_length": arguments["max_position_embeddings"],
        "norm_epsilon": float(arguments.get("layernorm_epsilon", arguments.get("norm_epsilon", 1e-5))),
        "activation": "gelu" if tanh else "gelu_exact",
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
        "hidden_dropout": float(arguments.get("hidden_dropout", 0.1)),
        "attention_dropout": float(arguments.get("attention_dropout", 0.1)),
        "init_std": float(arguments.get("init_method_std", 0.02)),
    }
    return found | ({**_bert_settings(names)} if is_bert else {})


def _bert_settings(names: frozenset[str]) -> dict[str, Any]:
    return {
        "norm_placement": "pre",
        "num_token_types": 2 if any("tokentype_embeddings" in name for name in names) else 0,
        "sentence_order": any(name.startswith("binary_head.") or ".pooler." in name for name in names),
    }


def _plain(value: Any) -> bool:
    """Whether a value is what it was: objects of Megatron's own classes are not loaded."""
    return value is None or isinstance(value, bool | int | float | str)


def arguments_of(model: Model, tensor: int, pipeline: int, dtype: str, vocab_rows: int) -> dict[str, Any]:
    """Megatron's arguments for a model of ours.

    Raises:
      UserError: Megatron's GPT and BERT can't be that model: lists why.
    """
    wrong = {
        f"norm {model.norm}": model.norm != "layernorm",
        f"position {model.position}": model.position != "learned",
        f"activation {model.activation}": model.activation not in ("gelu", "gelu_exact"),
        f"{num_kv_heads(model)} key and value heads for {model.num_heads} queries": (
            num_kv_heads(model) != model.num_heads
        ),
        "no biases": not model.bias,
        f"norm_placement {getattr(model, 'norm_placement', 'pre')}": getattr(model, "norm_placement", "pre") != "pre",
        f"family {model.family}": model.family not in ("gpt", "bert"),
    }
    if any(wrong.values()):
        listed = ", ".join(what for what, holds in wrong.items() if holds)
        raise UserError(f"Megatron-LM's checkpoints of GPT and BERT have no place for {listed}")
    tanh = model.activation == "gelu"
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": mlp_size(model),
        "num_attention_heads": model.num_heads,
        "kv_channels": head_dim(model),
        "seq_length": model.sequence_length,
        "encoder_seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "add_position_embedding": True,
        "position_embedding_type": "learned_absolute",
        "vocab_size": model.vocab_size,
        "padded_vocab_size": vocab_rows,
        "make_vocab_size_divisible_by": 128,
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "normalization": "LayerNorm",
        "bias_gelu_fusion": tanh,
        "openai_gelu": False,
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "bert_binary_head": model.family == "bert" and model.sentence_order,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "model_parallel_size": tensor,  # as versions before 3 call it
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "fp16": dtype == "float16",
        "bf16": dtype == "bfloat16",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "data_parallel_random_init": False,
    }
