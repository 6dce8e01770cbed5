"""Gradients of strong decays: what tokens read of themselves, which no decay changes, must not round them off."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape
from mtjax.models.kernels.delta_rule import DeltaInputs, delta_scan
from mtjax.models.kernels.ssd import ScanInputs, scan
from mtjax.sharding.axes import use_rules
from tests.parity.compare import relative
from tests.tiny import mesh_of, tiny_config

RANDOM = np.random.default_rng(0)
B, S, U, H, P, N = 2, 32, 1, 2, 8, 8
"""Samples, tokens, groups, heads, and widths of a head and of the state."""
X, C = (RANDOM.normal(size=size).astype(np.float32) for size in ((B, S, U, H, P), (B, S, U, N)))
KEY = (X.sum(3) + C).astype(np.float32)
KEY /= np.linalg.norm(KEY, axis=-1, keepdims=True)
RATE = RANDOM.uniform(0.5, 1.0, (B, S, U, H)).astype(np.float32)
WEIGHTS = RANDOM.normal(size=X.shape).astype(np.float32)
STRONG = np.array([[-9.0, -7.0]], np.float32)


def mamba(a: jax.Array, size: int) -> jax.Array:
    return scan(ScanInputs(*map(jnp.asarray, (X, RATE, KEY, C))), a, size, S // size)[0]


def delta(a: jax.Array, size: int) -> jax.Array:
    query, key, value, rate = map(jnp.asarray, (C, KEY, X, RATE))
    return delta_scan(DeltaInputs(query, key, value, rate * a, rate), size, S // size)[0]


def mamba_64(a: np.ndarray) -> np.ndarray:
    state, outputs = np.zeros((B, U, H, P, N)), []
    for t in range(S):
        written = (RATE[:, t, ..., None].astype(np.float64) * X[:, t])[..., None] * KEY[:, t, :, None, None]
        state = np.exp(RATE[:, t] * a)[..., None, None] * state + written
        outputs.append((state * C[:, t, :, None, None]).sum(-1))
    return np.stack(outputs, 1)


def delta_64(a: np.ndarray) -> np.ndarray:
    state, outputs = np.zeros((B, U, H, P, N)), []
    for t in range(S):
        state, at = np.exp(RATE[:, t] * a)[..., None, None] * state, KEY[:, t, :, None, None].astype(np.float64)
        state = state + (RATE[:, t, ..., None] * (X[:, t] - (state * at).sum(-1)))[..., None] * at
        outputs.append((state * C[:, t, :, None, None]).sum(-1))
    return np.stack(outputs, 1)


@pytest.mark.parametrize(("ours", "in_64"), [(mamba, mamba_64), (delta, delta_64)])
@pytest.mark.parametrize("size", [32, 8])
def test_gradients_of_strong_decays_are_as_exact_as_others(ours: Callable, in_64: Callable, size: int) -> None:
    """Of one chunk and of several, beside differences of the recurrence in float64."""
    expected, step = np.zeros_like(STRONG, np.float64), 1e-4
    for head in range(H):
        one = step * np.eye(H)[None, head]
        difference = in_64(STRONG + one) - in_64(STRONG - one)
        expected[0, head] = (difference * WEIGHTS).sum() / (2 * step)
    with jax.set_mesh(mesh_of("1x1")), use_rules(layout_of(tiny_config().model, MeshShape()).rules):
        found = jax.jit(jax.grad(lambda a: (ours(a, size) * WEIGHTS).sum()))(jnp.asarray(STRONG))
    assert relative(np.asarray(found), expected) < 1e-5
