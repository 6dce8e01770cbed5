"""Two ways to write down the same weights, as a table: reading, writing and the check for completeness follow from it.

A row says of a parameter of ours which tensors hold it elsewhere. A tensor is a part of the parameter - all of it, or
one index of a dimension, like the query in a stacked query, key and value - with its dimensions in another order, some
of them flattened into one; and it may be a part itself of a tensor that several parameters share. Nothing else happens
to a number, which is why every conversion can be undone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from mtjax.convert.parameters import Parameter
from mtjax.errors import UserError

OUTPUT = "output"
"""Our output table, where it is not the embedding."""
VOCAB = "vocab"
EXPERT = "expert"
SPLIT = (VOCAB, "heads", "kv_heads", "mlp")
"""Dimensions that tensor-parallel ranks share; at most one in a tensor."""

Dims = tuple[tuple[str, ...], ...]


def dims(text: str) -> Dims:
    """A tensor's dimensions, outermost first: "embed qkv*heads" -> (("embed",), ("qkv", "heads"))."""
    return tuple(tuple(group.split("*")) for group in text.split())


@dataclass(frozen=True)
class Slots:
    """A place in a tensor that holds several kinds of heads, group by group: Megatron's queries, key and value."""

    first: int
    """Of a group's heads."""
    count: int
    """Heads in every group."""
    of: int
    """All heads of a group."""


@dataclass(frozen=True)
class Tensor:
    """Where a part of a parameter stands in another format."""

    name: str
    """With `{layer}` where it is one of every layer, and `{expert}` where it is one of every expert."""
    dims: Dims
    """Its dimensions; each is one or more of the parameter's, flattened."""
    part: tuple[str, int] | None = None
    """A dimension of the parameter and the index that this tensor holds; all of the parameter when None."""
    slots: Slots | None = None
    """Where it stands among the heads that the first dimension begins with; alone in its tensor when None."""
    each: bool = False
    """Whether there is one such tensor for every expert (`Tensor.of_expert`)."""
    expert: int | None = None
    """The expert that this tensor is of, where there is one for each."""
    numbers: tuple[int, ...] = ()
    """Of layers in the model, by which their names count, where there is one of each."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor that it is or is a part of, from the sizes of the parameter's dimensions."""
        own = self._own_shape(sizes)
        return own if self.slots is None else (own[0] // self.slots.count * self.slots.of, *own[1:])

    def view(self, whole: np.ndarray, parameter: Parameter) -> np.ndarray:
        """What is this tensor's of the one with its name; a view of it if that is contiguous."""
        if self.slots is None:
            return whole
        width = prod(parameter.sizes[axis] for axis in self.dims[0][1:])
        groups = whole.reshape(-1, self.slots.of, width, *whole.shape[1:])
        return groups[:, self.slots.first : self.slots.first + self.slots.count]

    def _own_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(prod(sizes[axis] for axis in group) for group in self.dims)

    @property
    def axes(self) -> set[str]:
        """The dimensions of the parameter that this tensor is a part of."""
        return {axis for group in self.dims for axis in group} | {axis for axis, _ in self._parts}

    @property
    def _parts(self) -> list[tuple[str, int]]:
        """Dimensions of the parameter with the index that this tensor holds; experts' first where it stands for all."""
        parts = [self.part] if self.part else []
        return [*parts, (EXPERT, self.expert or 0)] if self.each else parts

    def of_expert(self, number: int) -> "Tensor":
        """The tensor of one expert, where there is one for each."""
        return replace(self, name=self.name.replace("{expert}", str(number)), expert=number)

    def spread(self, parameter: Parameter) -> "Iterator[Tensor]":
        """Itself, or one for each of a parameter's experts."""
        yield from (self.of_expert(i) for i in range(parameter.sizes[EXPERT])) if self.each else (self,)

    @property
    def split(self) -> str | None:
        """The dimension that tensor-parallel ranks share, if any."""
        return next((axis for group in self.dims for axis in group if axis in SPLIT), None)

    def _part_of(self, array: np.ndarray, axes: Sequence[str]) -> tuple[np.ndarray, list[str]]:
        """The view of a parameter that this tensor holds, and the names of its dimensions."""
        left = list(axes)
        for axis, index in self._parts:
            at = left.index(axis)
            array = array[(slice(None),) * at + (index,)]
            left.remove(axis)
        return array, left

    def extract(self, array: np.ndarray, parameter: Parameter, share: tuple[int, int] = (0, 1)) -> np.ndarray:
        """The tensor, from one layer's slice of the parameter.

        Args:
          array: shaped like `parameter.shape`; the vocabulary may have any number of rows.
          parameter: what `array` is a slice of.
          share: rank and number of ranks, when the tensor is split over some.
        """
        view, axes = self._part_of(array, parameter.axes)
        view = view[_share(view.shape, axes, self.split, share)]
        sizes = dict(zip(axes, view.shape, strict=True))
        order = [axes.index(axis) for group in self.dims for axis in group]
        return view.transpose(order).reshape(self._own_shape(sizes))

    def insert(
        self, tensor: np.ndarray, into: np.ndarray, parameter: Parameter, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Undoes `extract`: writes the tensor, or its `view` of one, to its place in one layer's slice."""
        view, axes = self._part_of(into, parameter.axes)
        view = view[_share(view.shape, axes, self.split, share)]
        sizes = dict(zip(axes, view.shape, strict=True))
        flat = [axis for group in self.dims for axis in group]
        ordered = tensor.reshape([sizes[axis] for axis in flat])
        view[...] = ordered.transpose([flat.index(axis) for axis in axes])


def _share(shape: Sequence[int], axes: Sequence[str], split: str | None, share: tuple[int, int]) -> tuple[slice, ...]:
    rank, ranks = share
    if split is None or ranks == 1:
        return (slice(None),) * len(shape)
    at = axes.index(split)
    size = shape[at] // ranks
    return (slice(None),) * at + (slice(rank * size, (rank + 1) * size),)


@dataclass(frozen=True)
class Row:
    """A parameter of ours, and the tensors that hold it elsewhere."""

    ours: str
    tensors: tuple[Tensor, ...]
    untied: tuple[Tensor, ...] = ()
    """The tensors instead, if any, in a model whose output is not tied to the embedding."""

    def numbered(self, numbers: tuple[int, ...]) -> "Row":
        """Of layers with these numbers."""
        number = lambda tensors: tuple(replace(tensor, numbers=numbers) for tensor in tensors)  # noqa: E731
        return replace(self, tensors=number(self.tensors), untied=number(self.untied))

    def fits(self, parameter: Parameter) -> bool:
        """Whether its tensors have the parameter's dimensions: a gated MLP's has one more, and is another row's."""
        return all(tensor.axes == set(parameter.axes) for tensor in self.tensors)


@dataclass(frozen=True)
class Table:
    """Another format's names for a family's weights."""

    format: str
    """For messages, say "Hugging Face's gpt2"."""
    rows: tuple[Row, ...]
    """Of all models of the family; a model has those whose parameter it has."""
    prefix: str = ""
    """Of tensors in a model with its head; the bare model's have none."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that hold no weights, such as masks and positions that old versions saved."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may repeat another when the two are tied."""
    optional: tuple[str, ...] = ()
    """Our modules that may be missing altogether, such as a pretraining head, and then start fresh."""

    def select(self, parameters: Mapping[str, Parameter]) -> "Selection":
        """The rows of one model.

        Raises:
          UserError: a parameter of the model has no row: lists all such.
        """
        rows = {
            row.ours: row.numbered(parameters[row.ours].numbers)
            for row in self.rows
            if row.ours in parameters and row.fits(parameters[row.ours])
        }
        if OUTPUT in parameters:
            rows = {name: Row(name, row.untied or row.tensors) for name, row in rows.items()}
        homeless = [name for name in parameters if name not in rows]
        if homeless:
            raise UserError(f"{self.format} has no place for these parameters of the model: {', '.join(homeless)}")
        return Selection(self, tuple((parameters[name], rows[name]) for name in parameters))


@dataclass(frozen=True)
class Selection:
    """The rows of a table that a model has, in the order of its parameters."""

    table: Table
    rows: tuple[tuple[Parameter, Row], ...]

    def tensors(self) -> Iterator[tuple[Parameter, int | None, Tensor]]:
        """Every tensor of every layer, in the order in which they are converted."""
        for parameter, _ in self.rows:
            tensors = self.tensors_of(parameter)
            for layer in parameter.layers:
                for tensor in tensors:
                    yield parameter, layer, tensor

    def tensors_of(self, parameter: Parameter) -> list[Tensor]:
        """Those that hold a parameter, in one layer."""
        return [one for tensor in self.of(parameter.name).tensors for one in tensor.spread(parameter)]

    def shapes(self, vocab_rows: int) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its full name, with `vocab_rows` rows of vocabulary."""
        return {
            name_of(tensor, layer): tensor.shape(parameter.sizes | {VOCAB: vocab_rows})
            for parameter, layer, tensor in self.tensors()
        }

    def of(self, name: str) -> Row:
        """The row of a parameter."""
        return next(row for parameter, row in self.rows if parameter.name == name)


def name_of(tensor: Tensor, layer: int | None) -> str:
    """The full name of a tensor in one layer."""
    return tensor.name if layer is None else tensor.name.format(layer=tensor.numbers[layer])


def with_vocab(array: np.ndarray, parameter: Parameter, rows: int) -> np.ndarray:
    """A parameter's slice with `rows` rows of vocabulary: padded with zeros, or cut."""
    if VOCAB not in parameter.axes:
        return array
    at = parameter.axes.index(VOCAB)
    if array.shape[at] >= rows:
        return array[(slice(None),) * at + (slice(rows),)]
    return np.pad(array, [(0, rows - n if i == at else 0) for i, n in enumerate(array.shape)])
