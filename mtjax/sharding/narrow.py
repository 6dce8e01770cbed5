"""Master weights in the compute type: products read them as they are, and the step differentiates by float32 zeros."""

from dataclasses import replace

import jax.numpy as jnp

from mtjax.sharding.axes import varying_like
from mtjax.sharding.param_comm import ShardedParam


def narrow_shard(parameter: ShardedParam) -> ShardedParam:
    """Returns a parameter with float32 zeros in the place of its shard, which is gathered as it is."""
    shard = parameter.shard
    return replace(parameter, shard=varying_like(jnp.zeros_like(shard, jnp.float32), shard), narrow_shards=(shard,))
