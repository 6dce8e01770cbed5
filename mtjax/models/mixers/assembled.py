"""Query, key and value from parameters that are assembled once, for generation."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.models.mixers.grouped_qkv import grouped_product
from mtjax.models.project import ProductRule


class AssembledQKV(nnx.Module):
    """`GroupedQKV` with assembled parameters, [embed, groups, heads / groups + 2, head_dim]; not for training."""

    is_read_linearly = False
    rule: ProductRule | None = None

    def __init__(self, weight: Array, bias: Array | None) -> None:
        names = ("heads", None, "head_dim")
        self.weight = nnx.Param(weight, axes=("embed", *names))
        self.bias = None if bias is None else nnx.Param(bias, axes=names)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """See `GroupedQKV.__call__`."""
        return grouped_product(x, self.weight[...], None if self.bias is None else self.bias[...])
