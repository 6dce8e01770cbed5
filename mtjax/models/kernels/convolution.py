"""The short causal convolution of layers with a recurrent state: each channel reads its own newest tokens."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtjax.sharding.axes import varying_like


def causal_convolution(
    mixed: Float[Array, "b s u channels"],
    weights: Float[Array, "taps u channels"],
    bias: Float[Array, "u channels"] | None,
    before: Float[Array, "b taps-1 u channels"] | None,
    segments: Int[Array, "b tokens"] | None,
) -> Float[Array, "b s u channels"]:
    """Computes the convolution, and SiLU, in float32.

    Args:
      mixed: the channels, by groups.
      weights: of each channel; the last tap is the token's own.
      bias: of each channel, if any.
      before: inputs of the taps - 1 tokens before; zeros when None.
      segments: document of each token, which may begin with those of the tokens before: no tap crosses documents.
    """
    taps, length = weights.shape[0], mixed.shape[1]
    weights = varying_like(weights.astype(jnp.float32), mixed)
    total: Array | float = 0.0 if bias is None else varying_like(bias.astype(jnp.float32), mixed)
    with jax.named_scope("conv"):
        if before is None:
            seen = jnp.pad(mixed, [(0, 0), (taps - 1, 0), (0, 0), (0, 0)])
        else:
            seen = jnp.concatenate([before.astype(mixed.dtype), mixed], 1)
        for tap in range(taps):
            back = taps - 1 - tap
            term = seen[:, tap : tap + length].astype(jnp.float32) * weights[tap]
            if segments is not None and back:
                same = jnp.pad(segments[:, back:] == segments[:, :-back], ((0, 0), (back, 0)))[:, -length:]
                term = jnp.where(same[..., None, None], term, 0)
            total = total + term
        return jax.nn.silu(total).astype(mixed.dtype)
