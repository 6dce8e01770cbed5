"""Values that only some ranks have: computed there alone, or added up over all."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import map_shards


def cond_by_stage(holds: jax.Array, then: Callable[..., Any], otherwise: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `then(*arguments)` on ranks where `holds`, and `otherwise(*arguments)` elsewhere.

    Args:
      holds: a bool that is equal on all ranks of a pipeline stage.
      then: a branch; its collectives may be over any axes but `stage`.
      otherwise: the other branch.
      *arguments: of both.
    """
    # The scope by which `mtjax inspect` recognizes branches of stages.
    with jax.named_scope("stages"):
        return lax.cond(holds, then, otherwise, *arguments)


def psum_shards(x: jax.Array, axes: Axes) -> jax.Array:
    """All-reduces `x`, which may be sharded over explicit axes, over manual axes."""
    return map_shards(lambda shard: lax.psum(shard, axes), jax.typeof(x).sharding.spec)(x)
