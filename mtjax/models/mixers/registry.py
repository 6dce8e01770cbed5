"""Mixers by name, and kinds of layers as sequences of mixers."""

from collections.abc import Mapping

from mtjax.models.mixers.attention import SelfAttention
from mtjax.models.mixers.cross import CrossAttention
from mtjax.models.mixers.experts import Experts
from mtjax.models.mixers.mixer import Mixer
from mtjax.models.mixers.mlp import MLP

MIXERS: Mapping[str, type[Mixer]] = {
    "attention": SelfAttention,
    "cross": CrossAttention,
    "mlp": MLP,
    "experts": Experts,
}

KINDS: Mapping[str, tuple[str, ...]] = {
    "transformer": ("attention", "mlp"),
    "transformer with experts": ("attention", "experts"),
    "transformer with cross-attention": ("attention", "cross", "mlp"),
}
"""Kind of layer -> its mixers, in the order in which they run."""
