"""Mixers by name, and kinds of layers as sequences of mixers."""

from collections.abc import Mapping

from mtjax.config import Model
from mtjax.models.mixers.attention import SelfAttention
from mtjax.models.mixers.cross import CrossAttention
from mtjax.models.mixers.experts import Experts
from mtjax.models.mixers.latent_attention import LatentAttention
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


def layer_kind(model: Model) -> str:
    """Returns the kind of a decoder's layers, or of those with experts."""
    return "transformer with experts" if model.num_experts else "transformer"


def mixer_of(name: str, model: Model) -> type[Mixer]:
    """Returns the mixer of this name in a kind of layer; with latent attention, that in place of self-attention."""
    return LatentAttention if name == "attention" and model.kv_lora_rank else MIXERS[name]
