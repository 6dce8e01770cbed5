"""Turned matrices: the products of the matrices that they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mtjax.config.storage import PLAIN
from mtjax.generate.transposed_weight import TransposedWeight
from mtjax.generate.weight_format import WeightFormat
from mtjax.layout.layouts import TENSOR
from mtjax.models.project import project
from mtjax.sharding.axes import use_rules
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


def test_components_of_an_adapter_are_not_turned() -> None:
    """One of the two is indexed at a time, as one of the experts is."""
    kept, turned = np.ones((2, 3, 4)), np.ones((3, 4))
    convert = WeightFormat(jnp.float32, PLAIN, True)
    with jax.set_mesh(mesh_of("1x1")):
        assert not isinstance(convert(jnp.asarray(kept), ("gate", "rank", "mlp")), TransposedWeight)
        assert isinstance(convert(jnp.asarray(turned), ("embed", "mlp")), TransposedWeight)


def test_a_product_in_8_bits_of_training_is_none_of_a_turned_matrix() -> None:
    """A run that trains in 8 bits writes its sample with the rules of its products in place."""
    draw = np.random.default_rng(0)
    matrix, x = draw.standard_normal((6, 4)), draw.standard_normal((2, 3, 6))

    def rule(*_: object) -> None:
        raise AssertionError("the rule of training was called")

    with jax.set_mesh(mesh_of("1x1")), use_rules(TENSOR.rules.restricted_to(())):
        turned = TransposedWeight.of(jnp.asarray(matrix, jnp.float32), 1)
        found = project(jnp.asarray(x, jnp.float32), turned, None, ("mlp",), rule=rule)
    np.testing.assert_allclose(found, x @ matrix, rtol=1e-5, atol=1e-6)
