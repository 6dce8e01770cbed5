"""Turned matrices: the products of the matrices that they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mtjax.generate.transposed_weight import TransposedWeight
from tests.tiny import mesh_of


@pytest.mark.parametrize(("shape", "inputs"), [((4, 3, 2, 5), 1), ((2, 5, 4), 2), ((6, 4), 1)])
def test_a_product_is_that_of_the_matrix(shape: tuple[int, ...], inputs: int) -> None:
    draw = np.random.default_rng(0)
    matrix, x = draw.standard_normal(shape), draw.standard_normal((2, 3, *shape[:inputs]))
    with jax.set_mesh(mesh_of("1x1")):
        turned = TransposedWeight.of(jnp.asarray(matrix, jnp.float32), inputs)
        product = turned[...].product(jnp.asarray(x, jnp.float32), inputs, PartitionSpec())
    assert turned.ndim == len(shape)
    np.testing.assert_allclose(product, np.tensordot(x, matrix, inputs), rtol=1e-5, atol=1e-6)
