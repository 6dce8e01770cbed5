"""Rows that tables of several families share, and the form of a decoder's table."""

import re

from mtjax.convert.table import Row, Table, Tensor, dims


def row(ours: str, theirs: str, shape: str) -> Row:
    """A parameter that is one tensor."""
    return Row(ours, (Tensor(theirs, dims(shape)),))


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    """A norm's weight, and its bias if it has one."""
    return row(f"{ours}.scale", f"{theirs}.weight", "embed"), row(f"{ours}.bias", f"{theirs}.bias", "embed")


def linear(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, Row]:
    """A linear layer as torch keeps it, [outputs, inputs], and its bias if it has one."""
    weight = row(f"{ours}.weight", f"{theirs}.weight", f"{outputs} {inputs}")
    return weight, row(f"{ours}.bias", f"{theirs}.bias", outputs)


def stacked(ours: str, axis: str, theirs: tuple[str, ...], inputs: str, outputs: str) -> tuple[Row, Row]:
    """Several linear layers, each a tensor of its own, that are one parameter of ours, stacked along `axis`."""
    weights = tuple(Tensor(f"{t}.weight", dims(f"{outputs} {inputs}"), (axis, i)) for i, t in enumerate(theirs))
    biases = tuple(Tensor(f"{t}.bias", dims(outputs), (axis, i)) for i, t in enumerate(theirs))
    return Row(f"{ours}.weight", weights), Row(f"{ours}.bias", biases)


def experts(ours: str, theirs: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Gated experts, each with three tensors of its own: `{expert}` in `theirs` is its number."""
    inputs = tuple(
        Tensor(f"{theirs}.{name}.weight", dims("mlp embed"), ("gate", i), each=True)
        for i, name in enumerate((gate, up))
    )
    output = Tensor(f"{theirs}.{down}.weight", dims("embed mlp"), each=True)
    return Row(f"{ours}.up.weight", inputs), Row(f"{ours}.down.weight", (output,))


def attention(ours: str, query: str, key: str, value: str) -> tuple[Row, ...]:
    """Query, key and value: one parameter of ours with as many heads of each, two with fewer key and value heads."""
    return (
        *stacked(f"{ours}.qkv", "qkv", (query, key, value), "embed", "heads*head_dim"),
        *linear(f"{ours}.qkv.query", query, "embed", "heads*head_dim"),
        *stacked(f"{ours}.qkv.key_value", "kv", (key, value), "embed", "kv_heads*head_dim"),
    )


def decoder(
    name: str, prefix: str, words: str, layer: tuple[Row, ...], final_norm: str, *others: Row, ignored: str
) -> Table:
    """The table of one stack of layers between two tables of words, which may be one.

    Args:
      name: transformers' of the family.
      prefix: of all modules but the output.
      words: the embedding's name behind the prefix.
      layer: what a layer has.
      final_norm: the last norm's name behind the prefix.
      others: rows outside the stack and its tables.
      ignored: regular expression, behind the prefix, of tensors that hold no weights.
    """
    output = "lm_head.weight"
    return Table(
        format=f"Hugging Face's {name}",
        prefix=prefix,
        rows=(
            row("embedding", f"{prefix}{words}", "vocab embed"),
            *others,
            *layer,
            *norm("final_norm", f"{prefix}{final_norm}"),
            row("output", output, "vocab embed"),
            row("head.classifier.weight", "score.weight", "classes embed"),
        ),
        ignored=(re.escape(prefix) + ignored,),
        copies={output: f"{prefix}{words}"},
    )
