"""Tables that map mtjax's parameters to the tensors of another format, for reading, writing and checking.

A row maps one parameter to the tensors that contain it. A tensor contains all of the parameter, or one index of a
dimension (such as the query in a stacked query, key and value), with its dimensions transposed and some of them
flattened into one, and the indices of one in another order. It may in turn be a slice of a tensor that several
parameters share. Values are only moved, never computed, so every conversion is reversible.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from mtjax.convert.parameters import Parameter
from mtjax.errors import UserError

OUTPUT = "output"
"""Name of the output projection, if it is not tied to the embedding."""
VOCAB = "vocab"
EXPERT = "expert"
SPLIT = (VOCAB, "heads", "kv_heads", "groups", "mlp")
"""Dimensions that are sharded over tensor-parallel ranks; at most one in a tensor."""

Dims = tuple[tuple[str, ...], ...]


def dims(text: str) -> Dims:
    """Parses a tensor's dimensions, outermost first: "embed qkv*heads" -> (("embed",), ("qkv", "heads"))."""
    return tuple(tuple(group.split("*")) for group in text.split())


@dataclass(frozen=True)
class Slots:
    """Position of heads in a tensor that stacks several kinds of heads by group, as Megatron's query, key and value."""

    first: int
    """Index of the first head within a group."""
    count: int
    """Number of heads in every group."""
    of: int
    """Number of heads of all kinds in a group."""
    width: int | None = None
    """Rows of what is counted here, such as 1 where heads have different widths; those of a head when None."""


@dataclass(frozen=True)
class Rows:
    """Position of rows in a tensor that stacks parts of different widths, as the first product of Mamba-2.

    Tensor-parallel ranks have the same share of every part, one part after the other.
    """

    first: int
    count: int
    of: int
    """Number of rows of all parts."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of another format that contains a parameter, or a slice of it."""

    name: str
    """Contains `{layer}` if there is one for every layer, and `{expert}` if there is one for every expert."""
    dims: Dims
    """Its dimensions; each is one or more of the parameter's dimensions, flattened."""
    part: tuple[str, int] | None = None
    """A dimension of the parameter, and the index of it that this tensor contains; None for all of the parameter."""
    slots: Slots | None = None
    """Its position among the heads in the first dimension; None if the tensor contains no others."""
    rows: Rows | None = None
    """Its position among the rows of the first dimension; None if the tensor contains no others."""
    skip: int = 0
    """Rows before the parameter's in the first dimension, which have no effect: written as zeros."""
    order: tuple[str, tuple[int, ...]] | None = None
    """A dimension that the tensor has in another order, and of each index of the parameter, its index there."""
    first: int = 0
    """Number of the first layer that has the tensor; in layers before it, the parameter has no effect."""
    each: bool = False
    """Whether there is one such tensor for every expert (`Tensor.of_expert`)."""
    expert: int | None = None
    """The number of the expert, if there is one tensor for each."""
    numbers: tuple[int, ...] = ()
    """The layers' numbers in the model, which appear in the names, if there is one tensor for each layer."""
    uses: tuple[int, ...] = ()
    """What `{use}` in the name stands for in each layer: which use of a shared module the layer is."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the tensor in the file, with other heads if any, from the sizes of dimensions."""
        shape = self._shape_without_slots(sizes)
        if self.slots is not None:
            return (shape[0] // self.slots.count * self.slots.of, *shape[1:])
        if self.rows is not None:
            return (shape[0] * self.rows.of // self.rows.count, *shape[1:])
        return (shape[0] + self.skip, *shape[1:]) if self.skip else shape

    @property
    def is_part(self) -> bool:
        """Whether the tensor in the file contains more than this tensor."""
        return self.slots is not None or self.rows is not None or self.skip > 0

    def view(self, array: np.ndarray, parameter: Parameter) -> np.ndarray:
        """Selects this tensor's rows from the tensor in the file; returns a view if `array` is contiguous."""
        if self.rows is not None:
            # A rank's shard has its share of every part, so positions shrink by the number of ranks.
            ranks = self.rows.of // array.shape[0]
            first = self.rows.first // ranks
            return array[first : first + self.rows.count // ranks]
        if self.slots is None:
            return array[self.skip :] if self.skip else array
        # [groups * of * width, ...] -> [groups, of, width, ...]
        width = self.slots.width or prod(parameter.sizes[axis] for axis in self.dims[0][1:])
        groups = array.reshape(-1, self.slots.of, width, *array.shape[1:])
        return groups[:, self.slots.first : self.slots.first + self.slots.count]

    def _shape_without_slots(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(prod(sizes[axis] for axis in group) for group in self.dims)

    @property
    def axes(self) -> set[str]:
        """The names of the parameter's dimensions."""
        return {axis for group in self.dims for axis in group} | {axis for axis, _ in self._indices}

    @property
    def _indices(self) -> list[tuple[str, int]]:
        """Dimensions of the parameter of which this tensor contains one index; expert 0 before `of_expert`."""
        indices = [self.part] if self.part else []
        return [*indices, (EXPERT, self.expert or 0)] if self.each else indices

    def of_expert(self, number: int) -> "Tensor":
        """Returns the tensor of one expert, if there is one for each."""
        return replace(self, name=self.name.replace("{expert}", str(number)), expert=number)

    def spread(self, parameter: Parameter) -> "Iterator[Tensor]":
        """Yields itself, or one tensor for each of a parameter's experts."""
        yield from (self.of_expert(i) for i in range(parameter.sizes[EXPERT])) if self.each else (self,)

    @property
    def split(self) -> str | None:
        """The dimension that is sharded over tensor-parallel ranks, if any."""
        return next((axis for group in self.dims for axis in group if axis in SPLIT), None)

    def _indexed(self, array: np.ndarray, axes: Sequence[str]) -> tuple[np.ndarray, list[str]]:
        """Returns the view of a parameter that this tensor contains, and the names of its dimensions."""
        remaining = list(axes)
        for axis, index in self._indices:
            at = remaining.index(axis)
            array = array[(slice(None),) * at + (index,)]
            remaining.remove(axis)
        return array, remaining

    def extract(self, array: np.ndarray, parameter: Parameter, rank: tuple[int, int] = (0, 1)) -> np.ndarray:
        """Returns the tensor, or a rank's shard, from one layer's slice of the parameter.

        Args:
          array: shaped like `parameter.shape`; the vocabulary may have any number of rows.
          parameter: the parameter of which `array` is a slice.
          rank: tensor-parallel rank and degree.
        """
        view, axes = self._indexed(array, parameter.axes)
        view = view[_shard_slices(view.shape, axes, self.split, rank)]
        sizes = dict(zip(axes, view.shape, strict=True))
        if self.order is not None:
            axis, order = self.order
            # `order` says where in the file each index of the parameter is; writing needs the inverse.
            view = view.take(np.argsort(order), axes.index(axis))
        order = [axes.index(axis) for group in self.dims for axis in group]
        return view.transpose(order).reshape(self._shape_without_slots(sizes))

    def insert(
        self, tensor: np.ndarray, into: np.ndarray, parameter: Parameter, rank: tuple[int, int] = (0, 1)
    ) -> None:
        """Writes the tensor, or a `view` of one, into one layer's slice of the parameter: inverse of `extract`."""
        view, axes = self._indexed(into, parameter.axes)
        view = view[_shard_slices(view.shape, axes, self.split, rank)]
        sizes = dict(zip(axes, view.shape, strict=True))
        flat = [axis for group in self.dims for axis in group]
        ordered = tensor.reshape([sizes[axis] for axis in flat])
        if self.order is not None:
            axis, order = self.order
            ordered = ordered.take(order, flat.index(axis))
        view[...] = ordered.transpose([flat.index(axis) for axis in axes])


def _shard_slices(
    shape: Sequence[int], axes: Sequence[str], split: str | None, rank_and_degree: tuple[int, int]
) -> tuple[slice, ...]:
    """Returns the slices of a tensor-parallel rank's shard; `split` is the sharded dimension."""
    rank, ranks = rank_and_degree
    if split is None or ranks == 1:
        return (slice(None),) * len(shape)
    at = axes.index(split)
    size = shape[at] // ranks
    return (slice(None),) * at + (slice(rank * size, (rank + 1) * size),)


@dataclass(frozen=True)
class Row:
    """A parameter of mtjax, and the tensors of another format that contain it."""

    ours: str
    tensors: tuple[Tensor, ...]
    untied: tuple[Tensor, ...] = ()
    """Replaces `tensors`, if not empty, in a model whose output is not tied to the embedding."""

    def numbered(self, numbers: tuple[int, ...]) -> "Row":
        """Returns the row for layers with these numbers."""
        with_numbers = lambda tensors: tuple(replace(tensor, numbers=numbers) for tensor in tensors)  # noqa: E731
        return replace(self, tensors=with_numbers(self.tensors), untied=with_numbers(self.untied))

    def fits(self, parameter: Parameter) -> bool:
        """Returns whether the tensors have the parameter's dimensions; a gated MLP has one more than a plain one."""
        return all(tensor.axes == set(parameter.axes) for tensor in self.tensors)


@dataclass(frozen=True)
class Table:
    """The table of a family's weights in another format."""

    format: str
    """Name for messages, such as "Hugging Face's gpt2"."""
    rows: tuple[Row, ...]
    """Rows for all models of the family; a model uses those of its parameters."""
    prefix: str = ""
    """Prefix of tensors' names in a model with a head; a bare model has none."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that are not weights, such as masks and positions that old versions saved."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be saved as copies of others that they are tied to."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Those of `copies` that are also written."""
    sublayers: int = 1
    """Layers of mtjax that are one layer in the format, whose number is in the names."""
    optional: tuple[str, ...] = ()
    """Modules of mtjax that may be missing, such as a pretraining head, and are then initialized randomly."""

    def select(self, parameters: Mapping[str, Parameter]) -> "Selection":
        """Selects the rows of one model.

        Raises:
          UserError: parameters of the model have no row (lists all of them).
        """
        rows = {
            row.ours: row.numbered(tuple(number // self.sublayers for number in parameters[row.ours].numbers))
            for row in self.rows
            # The last row of a name that fits: rows of the same name are alternatives with different dimensions.
            if row.ours in parameters and row.fits(parameters[row.ours])
        }
        # An output that is not tied to the embedding: BERT's has a bias of its own, beside that of the head.
        if OUTPUT in parameters:
            rows = {name: Row(name, row.untied or row.tensors) for name, row in rows.items()}
        # Never dropped silently: a parameter without a row would be lost when written, and random when read.
        without_row = [name for name in parameters if name not in rows]
        if without_row:
            raise UserError(f"{self.format} does not have these parameters of the model: {', '.join(without_row)}")
        return Selection(self, tuple((parameters[name], rows[name]) for name in parameters))


@dataclass(frozen=True)
class Selection:
    """The rows of a table for one model, in the order of its parameters."""

    table: Table
    rows: tuple[tuple[Parameter, Row], ...]

    def tensors(self) -> Iterator[tuple[Parameter, int | None, Tensor]]:
        """Yields every tensor of every layer, in the order in which they are converted."""
        for parameter, _ in self.rows:
            for layer in parameter.layers:
                for tensor in self.tensors_of(parameter, layer):
                    yield parameter, layer, tensor

    def tensors_of(self, parameter: Parameter, layer: int | None) -> list[Tensor]:
        """Returns the tensors that contain a parameter, in one layer; none in a layer that lacks them."""
        found = [one for tensor in self.of(parameter.name).tensors for one in tensor.spread(parameter)]
        return [one for one in found if layer is None or one.numbers[layer] >= one.first]

    def shapes(self, vocab_rows: int) -> dict[str, tuple[int, ...]]:
        """Returns the full name -> the shape of every tensor, with `vocab_rows` rows of vocabulary."""
        return {
            name_of(tensor, layer): tensor.shape(parameter.sizes | {VOCAB: vocab_rows})
            for parameter, layer, tensor in self.tensors()
        }

    def of(self, name: str) -> Row:
        """Returns the row of a parameter."""
        return next(row for parameter, row in self.rows if parameter.name == name)


def name_of(tensor: Tensor, layer: int | None) -> str:
    """Returns the full name of a tensor in one layer."""
    if layer is None:
        return tensor.name
    use = {"use": tensor.uses[layer]} if tensor.uses else {}
    return tensor.name.format(layer=tensor.numbers[layer], **use)


def with_vocab(array: np.ndarray, parameter: Parameter, rows: int) -> np.ndarray:
    """Pads (with zeros) or truncates the vocabulary of a parameter's slice to `rows` rows."""
    if VOCAB not in parameter.axes:
        return array
    at = parameter.axes.index(VOCAB)
    if array.shape[at] >= rows:
        return array[(slice(None),) * at + (slice(rows),)]
    return np.pad(array, [(0, rows - n if i == at else 0) for i, n in enumerate(array.shape)])
