"""transformers' `t5` (T5; T5 1.1 and Flan-T5 with an untied output and a gated GELU), `mt5` and `umt5`."""

from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import decoder_layers, head_dim, mlp_size
from mtjax.convert.model_types.family import Field, Json, ModelType
from mtjax.convert.model_types.rows import attention, linear, norm, row, stacked
from mtjax.convert.table import Row, Table
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.families.t5.samples import t5_ids


def _half(name: str, mlp: int) -> tuple[Row, ...]:
    """Returns the rows that encoder and decoder have in common; the MLP is sublayer number `mlp`."""
    layers, block = f"{name}.stack.layers", f"{name}.block.{{layer}}.layer"
    dense = f"{block}.{mlp}.DenseReluDense"
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        # T5 stores the table of a stack in its first layer; UMT5 has one in each layer, of the row below.
        row(f"{name}.relative.table", f"{name}.block.0.{bias}", "buckets heads"),
        row(f"{layers}.attention.relative.table", f"{name}.block.{{layer}}.{bias}", "buckets heads"),
        *norm(f"{layers}.attention_norm", f"{block}.0.layer_norm"),
        *attention(f"{layers}.attention", *(f"{block}.0.SelfAttention.{x}" for x in "qkv")),
        *linear(f"{layers}.attention.output", f"{block}.0.SelfAttention.o", "heads*head_dim", "embed"),
        *norm(f"{layers}.mlp_norm", f"{block}.{mlp}.layer_norm"),
        *linear(f"{layers}.mlp.up", f"{dense}.wi", "embed", "mlp"),
        *stacked(f"{layers}.mlp.up", "gate", (f"{dense}.wi_0", f"{dense}.wi_1"), "embed", "mlp"),
        *linear(f"{layers}.mlp.down", f"{dense}.wo", "mlp", "embed"),
        *norm(f"{name}.final_norm", f"{name}.final_layer_norm"),
    )


def _cross() -> tuple[Row, ...]:
    """Returns the rows of cross-attention."""
    layers, block = "decoder.stack.layers", "decoder.block.{layer}.layer.1"
    query, key, value, output = (f"{block}.EncDecAttention.{x}" for x in "qkvo")
    return (
        *norm(f"{layers}.cross_norm", f"{block}.layer_norm"),
        *linear(f"{layers}.cross.query", query, "embed", "heads*head_dim"),
        *stacked(f"{layers}.cross.key_value", "kv", (key, value), "embed", "heads*head_dim"),
        *linear(f"{layers}.cross.output", output, "heads*head_dim", "embed"),
    )


TABLE = Table(
    format="Hugging Face's t5",
    rows=(
        row("embedding", "shared.weight", "vocab embed"),
        *_half("encoder", 1),
        *_half("decoder", 2),
        *_cross(),
        row("output", "lm_head.weight", "vocab embed"),
    ),
    # The first T5 checkpoints contain this one, which is unused.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    copies=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight")
    | {"lm_head.weight": "shared.weight"},
)

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    # transformers takes this name for the tanh approximation, which T5 1.1 was trained with.
    "gated-gelu": "geglu",
    "gated-gelu_new": "geglu",
    "gated-silu": "swiglu",
}
FIELDS = (
    Field("hidden_size", "d_model", 512),
    Field("sequence_length", "n_positions", 512),
    Field("norm_epsilon", "layer_norm_epsilon", 1e-6),
    Field("hidden_dropout", "dropout_rate", 0.1),
    Field("relative_buckets", "relative_attention_num_buckets", 32),
    Field("relative_max_distance", "relative_attention_max_distance", 128),
)

MORE_KEYS = (
    *("num_decoder_layers", "d_kv", "d_ff", "dense_act_fn", "is_gated_act", "is_encoder_decoder"),
    *("tie_word_embeddings", "scale_decoder_outputs"),
)


def is_scaled(config: Json, model_type: str) -> bool:
    """Returns whether the decoder's outputs are multiplied by d_model^-0.5 before the output table."""
    # Of mT5, only models that transformers 4 wrote as tied are scaled.
    if model_type == "mt5":
        is_of_4 = str(config.get("transformers_version", "")).startswith("4.")
        return is_of_4 and config.get("tie_word_embeddings") is True
    # transformers 5 writes scale_decoder_outputs, and tie_word_embeddings true whatever is tied. Before, outputs were
    # scaled unless tie_word_embeddings was false.
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def is_tied(config: Json, model_type: str, names: frozenset[str]) -> bool:
    """Returns whether the output table is the embedding.

    Args:
      config: the config.json.
      model_type: its type.
      names: names of the tensors; none if they are not known.

    Raises:
      UserError: the config.json says that they are not tied, and there is no output table.
    """
    # If outputs are scaled, the tables are tied, even if the files have two, which must then be equal.
    if is_scaled(config, model_type):
        return True
    says_untied = config.get("tie_word_embeddings") is False
    if names and says_untied and "lm_head.weight" not in names:
        raise UserError(
            f"tie_word_embeddings of this {model_type} is false, but there is no lm_head.weight: save the model with "
            "its output, or set tie_word_embeddings true and scale_decoder_outputs false if it is the embedding"
        )
    # Otherwise transformers 5 ties the two if the files have only one table.
    return not says_untied and "lm_head.weight" not in names


def _output_scale(hidden: int, *, scaled: bool, tied: bool) -> float:
    """Returns mtjax's factor of the logits, which multiplies that of a tied T5, hidden^-0.5."""
    return hidden**0.5 if tied and not scaled else 1.0


def _activation(config: Json, projection: str) -> str:
    """Returns the activation of `feed_forward_proj`, which transformers saves in two other keys, too.

    Raises:
      UserError: these say something else; transformers follows them.
    """
    name = config.get("feed_forward_proj", projection)
    function = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    for key, value in (("dense_act_fn", function), ("is_gated_act", name.startswith("gated-"))):
        if config.get(key, value) != value:
            raise UserError(f"{key} is {config[key]!r}, but feed_forward_proj is {name!r}: remove {key} or correct it")
    return ACTIVATIONS[name]


def _ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the ids of special tokens: T5's original ones, or those in its samples (`samples.py`)."""
    if tokenizer is None:
        return {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    ids = t5_ids(tokenizer)
    return {"decoder_start_token_id": ids.bos, "pad_token_id": ids.pad, "eos_token_id": ids.eos}


def _family(model_type: str, model_class: str, layers: int, heads: int, vocab: int, inner: int) -> ModelType:
    """Returns one of the families, which differ in defaults, scaled outputs and tables of positions."""
    projection = "relu" if model_type == "t5" else "gated-gelu"
    tables = "all" if model_type == "umt5" else "first"

    def read(config: Json, names: frozenset[str]) -> dict[str, Any]:
        scaled, tied = is_scaled(config, model_type), is_tied(config, model_type, names)
        return {
            "family": "t5",
            "num_decoder_layers": config.get("num_decoder_layers"),
            "head_dim": config.get("d_kv", 64),
            "mlp_size": config.get("d_ff", inner),
            "activation": _activation(config, projection),
            # T5 has one rate for all dropouts.
            "attention_dropout": config.get("dropout_rate", 0.1),
            "tie_embeddings": tied,
            "output_scale": _output_scale(config.get("d_model", 512), scaled=scaled, tied=tied),
            "relative_bias_layers": tables,
        }

    def write(model: Model) -> dict[str, Any]:
        names = (theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
        return {
            "num_decoder_layers": decoder_layers(model),
            "d_kv": head_dim(model),
            "d_ff": mlp_size(model),
            "feed_forward_proj": next(names, "relu"),
            # Versions before 5 read the first, later ones the second.
            "tie_word_embeddings": model.tie_embeddings,
            "scale_decoder_outputs": model.tie_embeddings and model.output_scale == 1.0,
            "is_encoder_decoder": True,
        }

    sizes = (Field("num_layers", "num_layers", layers), Field("num_heads", "num_heads", heads))
    return ModelType(
        model_type=model_type,
        architecture=f"{model_class}ForConditionalGeneration",
        table=TABLE,
        fields=(*sizes, Field("vocab_size", "vocab_size", vocab), *FIELDS),
        read=read,
        write=write,
        only={"feed_forward_proj": tuple(ACTIVATIONS)},
        more_keys=MORE_KEYS,
        ids=_ids,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        unties=False,
    )


T5 = _family("t5", "T5", layers=6, heads=8, vocab=32128, inner=2048)
MT5 = _family("mt5", "MT5", layers=8, heads=6, vocab=250112, inner=1024)
UMT5 = _family("umt5", "UMT5", layers=8, heads=6, vocab=250112, inner=1024)

TYPES = (T5, MT5, UMT5)
"""In the order in which an export prefers types that can represent a model equally well."""
