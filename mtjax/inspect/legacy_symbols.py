"""Symbols of sizes in earlier versions, for contract files and readers of the JSON."""

from mtjax.analysis.contract import Symbols
from mtjax.config.sizes import (
    decoder_layers,
    decoder_length,
    head_dim,
    mlp_size,
    most_masked,
    num_kv_heads,
    padded_vocab_size,
)
from mtjax.inspect.compiled import CompiledStep


def letters(step: CompiledStep, words: Symbols) -> dict[str, int]:
    """Returns a step's one-letter symbols, and those whose names have changed; `words` are its contract's symbols."""
    model, plan = step.config.model, step.plan
    decoder = decoder_layers(model)
    return {
        "b": plan.microbatch_size,
        "s": model.sequence_length,
        "h": model.hidden_size,
        "f": mlp_size(model),
        "l": model.num_layers,
        "V": padded_vocab_size(model),
        "m": plan.microbatches,
        "data": plan.data_degree,
        "model": plan.tensor_degree,
        "again": plan.recomputed_layers(model.num_layers),
        "nested": plan.grouped_layers(model.num_layers),
        "smoothing": int(plan.label_smoothing),
        "P": words["parameters"],
        "U": words["unsplit_parameters"],
        "W": words["layer_matrices"],
        "S": words["layer_vectors"],
        "E": words["outside_matrices"],
        "N": words["outside_vectors"],
        "k": num_kv_heads(model) * head_dim(model),
        "r": int(not step.program.layout.rules.mesh_axes("kv_heads")),
        "n": 2 if model.norm == "layernorm" else 1,
        "c": int(model.bias),
        "p": int(model.position == "learned"),
        "d": decoder_length(model),
        "L": decoder,
        "M": most_masked(model.sequence_length),
        "decoder_again": plan.recomputed_layers(decoder),
        "decoder_nested": plan.grouped_layers(decoder),
        **{name.replace("_degree", "_ways"): value for name, value in words.items() if name.endswith("_degree")},
    }
