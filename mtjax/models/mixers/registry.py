"""Mixers by name, and kinds of layers as sequences of mixers."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from mtjax.config import Model
from mtjax.config.adapters import adapters_of
from mtjax.config.layer_pattern import SHARED, SIDE_BY_SIDE
from mtjax.models.layer_context import Mixer
from mtjax.models.mixers.transformer import MLP, SelfAttention

KINDS: Mapping[str, tuple[str, ...]] = {
    "transformer": ("attention", "mlp"),
    "transformer with experts": ("attention", "experts"),
    "transformer with cross-attention": ("attention", "cross", "mlp"),
    # Of hybrid models (`mtjax.config.layer_pattern`).
    "mamba": ("mamba",),
    SIDE_BY_SIDE: ("mamba", "attention"),
    "delta": ("delta",),
    **dict.fromkeys(SHARED.values(), ("mamba",)),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "experts": ("experts",),
    # Of Retro (`mtjax.families.retro.stacks`).
    "retro": ("attention", "chunked", "mlp"),
    "retro after its encoder": ("chunked", "mlp"),
}
"""Kind of layer -> its mixers, in the order in which they run."""


def _attention(model: Model) -> type[Mixer]:
    """Selects the class of self-attention: latent, with an output gate, or plain; each with adapters or without."""
    is_adapted = bool(adapters_of(model, "attention"))
    if model.kv_lora_rank:
        return _late("adapted_latent:AdaptedLatentAttention" if is_adapted else "latent_attention:LatentAttention")
    if model.attention_output_gate:
        return _late("adapted_gated:AdaptedGatedAttention" if is_adapted else "gated_attention:GatedSelfAttention")
    return _late("adapted:AdaptedSelfAttention") if is_adapted else SelfAttention


def _late(name: str) -> type[Mixer]:
    """Imports a class of this package by the name of its file and its own: what a model does not have is not."""
    return resolve_name(f"{__package__}.{name}")


MIXERS: Mapping[str, Callable[[Model], type[Mixer]]] = {
    "attention": _attention,
    "cross": lambda m: _late("chunked:NeighbourCrossAttention" if m.family == "retro" else "cross:CrossAttention"),
    "chunked": lambda _: _late("chunked:ChunkedCrossAttention"),
    "mlp": lambda model: _late("adapted:AdaptedMLP") if adapters_of(model, "mlp") else MLP,
    "experts": lambda model: _late("adapted_experts:AdaptedExperts" if model.lora_rank else "experts:Experts"),
    "mamba": lambda model: _late("adapted_recurrent:AdaptedMamba" if adapters_of(model, "mamba") else "mamba:Mamba"),
    "delta": lambda m: _late(
        "adapted_recurrent:AdaptedDeltaNet" if adapters_of(m, "delta") else "delta_net:GatedDeltaNet"
    ),
}
"""Name of a mixer in a kind of layer -> returns its class for a model."""
