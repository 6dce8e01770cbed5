"""Rows that several types have in common, and the table of a decoder."""

import re
from dataclasses import replace

from mtjax.convert.table import Row, Table, Tensor, dims


def with_prefix(table: Table, prefix: str) -> Table:
    """Returns the table of a type whose modules have another prefix."""

    def renamed(text: str) -> str:
        return prefix + text.removeprefix(table.prefix) if text.startswith(table.prefix) else text

    def tensors(of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, name=renamed(tensor.name)) for tensor in of)

    return replace(
        table,
        prefix=prefix,
        rows=tuple(replace(each, tensors=tensors(each.tensors), untied=tensors(each.untied)) for each in table.rows),
        ignored=tuple(pattern.replace(re.escape(table.prefix), re.escape(prefix)) for pattern in table.ignored),
        copies={renamed(copy): renamed(name) for copy, name in table.copies.items()},
    )


def row(ours: str, theirs: str, shape: str) -> Row:
    """Maps a parameter to one tensor."""
    return Row(ours, (Tensor(theirs, dims(shape)),))


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    """Maps a norm's weight, and its bias if it has one."""
    return row(f"{ours}.scale", f"{theirs}.weight", "embed"), row(f"{ours}.bias", f"{theirs}.bias", "embed")


def linear(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, Row]:
    """Maps a linear layer to torch's [outputs, inputs], and its bias if it has one."""
    weight = row(f"{ours}.weight", f"{theirs}.weight", f"{outputs} {inputs}")
    return weight, row(f"{ours}.bias", f"{theirs}.bias", outputs)


def stacked(ours: str, axis: str, theirs: tuple[str, ...], inputs: str, outputs: str) -> tuple[Row, Row]:
    """Maps a parameter that stacks several linear layers along `axis` to their separate tensors."""
    weights = tuple(Tensor(f"{t}.weight", dims(f"{outputs} {inputs}"), (axis, i)) for i, t in enumerate(theirs))
    biases = tuple(Tensor(f"{t}.bias", dims(outputs), (axis, i)) for i, t in enumerate(theirs))
    return Row(f"{ours}.weight", weights), Row(f"{ours}.bias", biases)


def experts(ours: str, theirs: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Maps gated experts to three tensors per expert; `{expert}` in `theirs` is replaced by its number."""
    inputs = tuple(
        Tensor(f"{theirs}.{name}.weight", dims("mlp embed"), ("gate", i), each=True)
        for i, name in enumerate((gate, up))
    )
    output = Tensor(f"{theirs}.{down}.weight", dims("embed mlp"), each=True)
    return Row(f"{ours}.up.weight", inputs), Row(f"{ours}.down.weight", (output,))


def attention(ours: str, query: str, key: str, value: str) -> tuple[Row, ...]:
    """Maps query, key and value; mtjax has one parameter for all three, or query and key_value with grouped queries."""
    return (
        # A model has the first two rows or the others: `Table.select`.
        *stacked(f"{ours}.qkv", "qkv", (query, key, value), "embed", "heads*head_dim"),
        *linear(f"{ours}.qkv.query", query, "embed", "heads*head_dim"),
        *stacked(f"{ours}.qkv.key_value", "kv", (key, value), "embed", "kv_heads*head_dim"),
    )


def decoder(
    name: str, prefix: str, words: str, layer: tuple[Row, ...], final_norm: str, *others: Row, ignored: str
) -> Table:
    """Returns the table of a decoder: embedding, layers, final norm and output, which may be tied to the embedding.

    Args:
      name: transformers' name of the type.
      prefix: prefix of all modules except the output.
      words: the embedding's name, after the prefix.
      layer: rows of a layer.
      final_norm: the final norm's name, after the prefix.
      others: rows outside the layers.
      ignored: regular expression, after the prefix, of tensors that are not weights.
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
        # A tied output may be saved as well: it must be equal then, and is not read.
        copies={output: f"{prefix}{words}"},
    )
