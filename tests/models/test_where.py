"""Choices and sums that stay in the loop over layers, with the numbers of jnp's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import reshard

from mtjax.layout.layouts import TENSOR
from mtjax.models.kernels.xla import AttentionOptions, attend
from mtjax.models.layer_context import LayerContext
from mtjax.models.ops import dropout
from mtjax.models.saved_names import ATTENTION_CORE
from mtjax.models.unhoisted_sums import plus
from mtjax.sharding.axes import spec, use_rules, where
from tests.tiny import mesh_of

SAMPLES, HEADS, LENGTH, WIDTH = 4, 4, 24, 8
NAMES = ("batch", "seq", "heads", "head_dim")


@pytest.mark.parametrize("jitted", [False, True])
def test_values_and_gradients_are_jnps(jitted):
    random = np.random.default_rng(0)
    x, weights = (jnp.asarray(random.normal(size=(2, 3, 5)), jnp.float32) for _ in range(2))
    bias = jnp.asarray(random.normal(size=(1, 3, 5)), jnp.float32)
    keep = jnp.asarray(random.random((1, 1, 5)) < 0.5)
    ours = lambda x, bias: (where(keep, plus(x, bias), -2.5) * weights).sum()  # noqa: E731
    jnps = lambda x, bias: (jnp.where(keep, x + bias, -2.5) * weights).sum()  # noqa: E731
    found, known = (jax.value_and_grad(f, argnums=(0, 1)) for f in (ours, jnps))
    if jitted:
        found, known = jax.jit(found), jax.jit(known)
    jax.tree.map(np.testing.assert_array_equal, found(x, bias), known(x, bias))


def test_layers_read_no_constants_as_large_as_the_stream():
    keys = jax.random.split(jax.random.key(0), SAMPLES)
    bias = jnp.ones((1, HEADS, LENGTH, LENGTH))

    def layer(x, number):
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        x = dropout(attend(x, x, x, LayerContext(own, bias=bias), AttentionOptions(0.1)), 0.1, own, 1, NAMES)
        return x, None

    @jax.grad
    def loss(x):
        saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(ATTENTION_CORE))
        return lax.scan(saved, reshard(x, spec(*NAMES)), jnp.arange(3))[0].sum()

    with jax.set_mesh(mesh_of("1x1")), use_rules(TENSOR.rules):
        program = jax.make_jaxpr(loss)(jnp.ones((SAMPLES, LENGTH, HEADS, WIDTH)))
    loops = [equation for equation in program.eqns if equation.primitive is jax.lax.scan_p]
    read = [array.aval for loop in loops for array in loop.invars[: loop.params["num_consts"]]]
    assert len(loops) == 2  # forward and backward
    assert [array for array in read if array.size >= SAMPLES * LENGTH * HEADS * WIDTH] == []
