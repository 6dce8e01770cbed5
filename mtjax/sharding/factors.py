"""Multiplies sharded parameters by factors of some of their dimensions, such as layers and heads."""

import jax
from jax import Array
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float


def sharded_by_rows(table: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Gathers the columns of a table on all ranks; its rows remain as they are sharded."""
    return reshard(table, PartitionSpec(jax.typeof(table).sharding.spec[0], None))


def times_factors(parameter: Array, factors: Array) -> Array:
    """Multiplies a parameter, sharded in any way, by factors of as many dimensions, of size 1 where they are equal."""
    entries_of_parameter = jax.typeof(parameter).sharding.spec
    # Sharded like the parameter, so that the product moves nothing.
    entries = [entry if size > 1 else None for entry, size in zip(entries_of_parameter, factors.shape, strict=True)]
    return parameter * reshard(factors, PartitionSpec(*entries))
