"""Rows that tables of several families share."""

from mtjax.convert.table import Row, Tensor, dims


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


def attention(ours: str, query: str, key: str, value: str) -> tuple[Row, ...]:
    """Query, key and value: one parameter of ours with as many heads of each, two with fewer key and value heads."""
    return (
        *stacked(f"{ours}.qkv", "qkv", (query, key, value), "embed", "heads*head_dim"),
        *linear(f"{ours}.qkv.query", query, "embed", "heads*head_dim"),
        *stacked(f"{ours}.qkv.key_value", "kv", (key, value), "embed", "kv_heads*head_dim"),
    )
