"""Mixers by name, and kinds of layers as sequences of mixers."""

from collections.abc import Callable, Mapping

from mtjax.config import Model
from mtjax.config.adapters import adapters_of
from mtjax.config.layer_pattern import SHARED, SIDE_BY_SIDE
from mtjax.models.mixers.attention import SelfAttention
from mtjax.models.mixers.mixer import Mixer
from mtjax.models.mixers.mlp import MLP

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
    # Of Retro (`mtjax.models.retro_stacks`).
    "retro": ("attention", "chunked", "mlp"),
    "retro after its encoder": ("chunked", "mlp"),
}
"""Kind of layer -> its mixers, in the order in which they run."""


# What a model does not have is not imported.


def _attention(model: Model) -> type[Mixer]:
    if model.kv_lora_rank:
        if adapters_of(model, "attention"):
            from mtjax.models.mixers.adapted_latent import AdaptedLatentAttention

            return AdaptedLatentAttention
        from mtjax.models.mixers.latent_attention import LatentAttention

        return LatentAttention
    if adapters_of(model, "attention"):
        from mtjax.models.mixers.adapted import AdaptedSelfAttention

        return AdaptedSelfAttention
    if model.attention_output_gate:
        from mtjax.models.mixers.gated_attention import GatedSelfAttention

        return GatedSelfAttention
    return SelfAttention


def _mlp(model: Model) -> type[Mixer]:
    if adapters_of(model, "mlp"):
        from mtjax.models.mixers.adapted import AdaptedMLP

        return AdaptedMLP
    return MLP


def _cross_attention(model: Model) -> type[Mixer]:
    if model.family == "retro":
        from mtjax.models.mixers.chunked import NeighbourCrossAttention

        return NeighbourCrossAttention
    from mtjax.models.mixers.cross import CrossAttention

    return CrossAttention


def _chunked(_: Model) -> type[Mixer]:
    from mtjax.models.mixers.chunked import ChunkedCrossAttention

    return ChunkedCrossAttention


def _experts(model: Model) -> type[Mixer]:
    if model.lora_rank:
        from mtjax.models.mixers.adapted_experts import AdaptedExperts

        return AdaptedExperts
    from mtjax.models.mixers.experts import Experts

    return Experts


def _mamba(model: Model) -> type[Mixer]:
    if adapters_of(model, "mamba"):
        from mtjax.models.mixers.adapted_mamba import AdaptedMamba

        return AdaptedMamba
    from mtjax.models.mixers.mamba import Mamba

    return Mamba


def _delta(_: Model) -> type[Mixer]:
    from mtjax.models.mixers.delta_net import GatedDeltaNet

    return GatedDeltaNet


MIXERS: Mapping[str, Callable[[Model], type[Mixer]]] = {
    "attention": _attention,
    "cross": _cross_attention,
    "chunked": _chunked,
    "mlp": _mlp,
    "experts": _experts,
    "mamba": _mamba,
    "delta": _delta,
}
"""Name of a mixer in a kind of layer -> returns its class for a model."""
