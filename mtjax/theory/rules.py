"""Logical names of dimensions, and the table that maps each to the mesh axes that split it.

A model says what its dimensions are called, say ("batch", "act_seq", "embed"); `Rules` says which mesh axes split a
dimension of that name. A new logical name is a field of `Rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from mtjax.errors import nearest

Axes = tuple[str, ...]
"""Mesh axes, outermost first; of a dimension those that split it, () where none does."""

DATA = "data"
STAGE = "stage"
CONTEXT = "context"
EXPERT = "expert"
MODEL = "model"

MANUAL: Axes = (DATA, STAGE, CONTEXT, EXPERT)
"""Every mesh axis but `model`: manual around the differentiated part of a step, where `model` is explicit."""


@dataclass(frozen=True)
class Rules:
    """Logical name of a dimension -> mesh axes that split it."""

    batch: Axes = ()
    seq: Axes = ()
    """Tokens of a sample, where they are not in the residual stream."""
    key_seq: Axes = ()
    """The sequence of keys, in scores and masks."""
    act_seq: Axes = ()
    """The sequence in the residual stream between blocks."""
    embed: Axes = ()
    heads: Axes = ()
    head_dim: Axes = ()
    qkv: Axes = ()
    """Query, key and value, stacked so that they are one product."""
    kv_heads: Axes = ()
    """Key and value heads that groups of query heads share; replicated where there are fewer of them than ranks."""
    kv: Axes = ()
    """Key and value, stacked."""
    mlp: Axes = ()
    expert: Axes = ()
    """Experts, each with matrices of its own."""
    routes: Axes = ()
    """Experts as a router scores them: on every rank."""
    gate: Axes = ()
    """Gate and up projection of a gated MLP, stacked so that they are one product."""
    vocab: Axes = ()
    layers: Axes = ()
    positions: Axes = ()
    """Learned vectors, one for each place in a sample."""
    features: Axes = ()
    """Width of a projection that is replicated on every rank: BERT's heads."""
    token_types: Axes = ()
    buckets: Axes = ()
    """Buckets of distances of relative positions."""
    classes: Axes = ()
    """Answers of a classifier."""
    rank: Axes = ()
    """Between the two matrices of a low-rank adapter."""

    def __post_init__(self) -> None:
        for field in fields(self):
            axes = getattr(self, field.name)
            if not isinstance(axes, tuple):
                raise TypeError(f"{field.name} is split by a tuple of mesh axes, such as ('data',), not by {axes!r}")

    def axes(self, name: str | None) -> Axes:
        """The mesh axes that split a dimension called `name`; () for one without a name (None).

        Raises:
          AttributeError: no dimension has this name.
        """
        if name is None:
            return ()
        names = [field.name for field in fields(self)]
        if name not in names:
            raise AttributeError(f"no logical axis is called {name!r}{nearest(name, names)}")
        return getattr(self, name)

    def replicas(self, names: Sequence[str | None]) -> Axes:
        """The manual mesh axes that do not split a parameter whose dimensions have these names.

        Ranks along them hold the same parameter and see other data: its gradient is summed over these axes.

        Raises:
          AttributeError: no dimension has one of the names.
        """
        splitting = {axis for name in names for axis in self.axes(name)}
        return tuple(axis for axis in MANUAL if axis not in splitting)

    @property
    def shared_work(self) -> Axes:
        """Mesh axes whose ranks see other samples, or other tokens of the same ones."""
        return self.batch + self.seq

    @property
    def with_whole_samples(self) -> "Rules":
        """These rules where every rank works on all tokens of all samples: a few that are not worth sharing."""
        return replace(self, batch=(), seq=(), act_seq=())

    def over(self, axes: Axes) -> "Rules":
        """These rules on a mesh that has no other axes than `axes`."""
        kept = {f.name: tuple(axis for axis in getattr(self, f.name) if axis in axes) for f in fields(self)}
        return replace(self, **kept)
