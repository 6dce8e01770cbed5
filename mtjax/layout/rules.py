"""Logical names of dimensions, and the table that maps each to the mesh axes over which it is sharded.

A model names its dimensions, for example ("batch", "act_seq", "embed"); `Rules` has the mesh axes of each name. A new
logical name is a field of `Rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from mtjax.errors import nearest

Axes = tuple[str, ...]
"""Mesh axes, outermost first. Of a dimension: those over which it is sharded; () if it is replicated."""

DATA = "data"
STAGE = "stage"
SHARD = "shard"
"""Ranks of a sharding group, over which ZeRO shards where a mesh has groups; they are replicated over `data`."""
CONTEXT = "context"
EXPERT = "expert"
MODEL = "model"

MANUAL: Axes = (DATA, STAGE, SHARD, CONTEXT, EXPERT)
"""Every mesh axis but `model`: manual axes of the shard_map around the differentiated part of a step, in which `model`
is explicit."""


@dataclass(frozen=True)
class Rules:
    """Logical name of a dimension -> mesh axes over which it is sharded."""

    batch: Axes = ()
    seq: Axes = ()
    """The sequence, outside the residual stream."""
    key_seq: Axes = ()
    """The sequence of keys, in scores and masks."""
    act_seq: Axes = ()
    """The sequence of the residual stream, between sublayers."""
    act_embed: Axes = ()
    """The width of the residual stream, between sublayers; `embed` is that of parameters, and of a sublayer's input."""
    embed: Axes = ()
    heads: Axes = ()
    head_dim: Axes = ()
    qkv: Axes = ()
    """Query, key and value, stacked for one matmul."""
    kv_heads: Axes = ()
    """Key and value heads of grouped-query attention; replicated where there are fewer of them than ranks."""
    kv: Axes = ()
    """Key and value, stacked."""
    mlp: Axes = ()
    expert: Axes = ()
    """Experts, in their matrices."""
    routes: Axes = ()
    """Experts in a router's scores: replicated."""
    every_expert: Axes = ()
    """Experts' biases of the residual stream's width: replicated."""
    sources: Axes = ()
    """The embedding and the hidden state that a layer of multi-token prediction reads: replicated."""
    gate: Axes = ()
    """Gate and up projection of a gated MLP, stacked for one matmul."""
    vocab: Axes = ()
    layers: Axes = ()
    positions: Axes = ()
    """Learned positions."""
    features: Axes = ()
    """Width of a replicated projection: BERT's heads, multi-token prediction."""
    latent: Axes = ()
    """Width of a latent of multi-head latent attention: replicated."""
    token_types: Axes = ()
    buckets: Axes = ()
    """Buckets of distances of relative positions."""
    classes: Axes = ()
    """Classes of a classifier."""
    groups: Axes = ()
    """Groups of heads of a state-space layer; replicated where there are fewer of them than ranks."""
    state: Axes = ()
    """Width of the state of a channel: replicated."""
    taps: Axes = ()
    """Tokens that a convolution reads: replicated."""
    rank: Axes = ()
    """Rank of a LoRA adapter."""
    operands: Axes = ()
    """Operands of an 8-bit product, which have a scale each: replicated."""
    scales: Axes = ()
    """Scales that delayed scaling counts: replicated."""

    def __post_init__(self) -> None:
        for field in fields(self):
            axes = getattr(self, field.name)
            if not isinstance(axes, tuple):
                raise TypeError(f"{field.name} must be a tuple of mesh axes, such as ('data',), and is {axes!r}")

    def mesh_axes(self, name: str | None) -> Axes:
        """Returns the mesh axes over which a dimension called `name` is sharded; () for one without a name (None).

        Raises:
          AttributeError: no dimension has this name.
        """
        if name is None:
            return ()
        names = self.__dataclass_fields__  # a search asks a million times, and `fields` makes a list each time
        if name not in names:
            raise AttributeError(f"no logical axis is called {name!r}{nearest(name, [*names])}")
        return getattr(self, name)

    def replicated_axes(self, names: Sequence[str | None]) -> Axes:
        """Returns the manual mesh axes over which a parameter with these dimensions is replicated.

        Each rank along them has a part of its gradient, from its own samples, tokens or stage: the gradient is the
        sum over these axes.

        Raises:
          AttributeError: no dimension has one of the names.
        """
        sharding = {axis for name in names for axis in self.mesh_axes(name)}
        return tuple(axis for axis in MANUAL if axis not in sharding)

    @property
    def token_axes(self) -> Axes:
        """Mesh axes over which the tokens of a batch are sharded: by samples, or along the sequence."""
        return self.batch + self.seq

    @property
    def with_replicated_activations(self) -> "Rules":
        """These rules with replicated activations: for batches of a few samples that are not worth sharding."""
        return replace(self, batch=(), seq=(), act_seq=(), act_embed=())

    def restricted_to(self, axes: Axes) -> "Rules":
        """Returns these rules on a mesh that has no other axes than `axes`."""
        used = {f.name: tuple(axis for axis in getattr(self, f.name) if axis in axes) for f in fields(self)}
        return replace(self, **used)
