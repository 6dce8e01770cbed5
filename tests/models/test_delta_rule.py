"""The gated delta rule in chunks beside its recurrence in float64, in bfloat16 and in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape
from mtjax.models.kernels.delta_rule import DeltaInputs, delta_passage, delta_scan, delta_step, inverse_of_unit_lower
from mtjax.sharding.axes import use_rules
from tests.parity.compare import relative
from tests.tiny import mesh_of, tiny_config

SIZES = (2, 150, 2, 3, 5, 7)
"""Samples, tokens, groups, heads of a group, and widths of a value and of a key."""


def drawn(dtype: Any) -> dict[str, np.ndarray]:
    """Inputs in the numbers of a type: keys of which some come again, and heads that forget fast and slowly."""
    b, s, u, h, p, n = SIZES
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, b, s, u, n))
    key[:, 10:40] = key[:, 10:11]
    found = {"query": query, "key": key, "value": random.normal(size=(b, s, u, h, p))}
    found |= {name: found[name] / np.linalg.norm(found[name], axis=-1, keepdims=True) for name in ("query", "key")}
    found = {name: np.asarray(jnp.asarray(array, dtype)) for name, array in found.items()}
    decay = -np.exp(random.uniform(np.log(0.001), np.log(0.5), (b, s, u, h)))
    beta = random.uniform(0.0, 1.0, (b, s, u, h))
    return found | {"decay": decay.astype(np.float32), "beta": beta.astype(np.float32)}


def recurrence(
    inputs: dict[str, np.ndarray], incoming: np.ndarray | None = None, begins: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, from a state that comes in; `begins`: tokens with which a document begins."""
    query, key, value, decay, beta = (inputs[name].astype(np.float64) for name in DeltaInputs._fields[:5])
    outputs: list[np.ndarray] = []
    state = np.zeros((*value.shape[:1], *value.shape[2:], key.shape[-1])) if incoming is None else incoming
    for t in range(value.shape[1]):
        state = np.exp(decay[:, t])[..., None, None] * state
        if begins is not None:
            state = np.where(begins[:, t, None, None, None, None], 0, state)
        at = key[:, t, :, None, None]
        state = state + (beta[:, t, ..., None] * (value[:, t] - (state * at).sum(-1)))[..., None] * at
        outputs.append((state * query[:, t, :, None, None]).sum(-1))
    return np.stack(outputs, 1), state


ROUNDING = 2.0**-9
"""Of bfloat16, relative to a number."""


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4 * ROUNDING)])
def test_errors_are_a_few_roundings_also_after_many_chunks(dtype: Any, bound: float) -> None:
    """Relative to the largest number, of 150 tokens, of the last 32, and of the state: measured were 3e-7 and 2.6
    roundings."""
    inputs = drawn(dtype)
    expected, last = recurrence(inputs)
    with jax.set_mesh(mesh_of("1x1")), use_rules(layout_of(tiny_config().model, MeshShape()).rules):
        for chunk, at_once in ((64, 100), (11, 2)):
            run = jax.jit(lambda own, size=chunk, m=at_once: delta_scan(DeltaInputs(**own), size, m))
            y, state = run(inputs)
            assert y.dtype == dtype and state.dtype == jnp.float32
            found = np.asarray(y, np.float64)
            errors = [
                relative(found, expected),
                relative(found[:, -32:], expected[:, -32:]),
                relative(np.asarray(state), last),
            ]
            assert max(errors) < bound
        one = jax.jit(lambda own, state: delta_step(DeltaInputs(**own), state))
        y, state = one({name: array[:, :1] for name, array in inputs.items()}, np.zeros_like(last, np.float32))
        assert relative(np.asarray(y, np.float64), expected[:, :1]) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4 * ROUNDING)])
@pytest.mark.parametrize(("chunk", "at_once"), [(64, 100), (11, 2)])
def test_a_passage_holds_for_any_state_that_comes_in(dtype: Any, bound: float, chunk: int, at_once: int) -> None:
    """Of one sample whose first tokens go on with the document before them, and one that begins with another; measured
    were 2e-7 and 2.4 roundings."""
    inputs, random = drawn(dtype), np.random.default_rng(1)
    b, s, u, h, p, n = SIZES
    incoming = np.asarray(jnp.asarray(random.normal(size=(b, u, h, p, n)), dtype))
    begins = np.zeros((b, s), bool)
    begins[0, [30, 33, 100]] = begins[1, [0, 70]] = True
    segments, before = begins.cumsum(1).astype(np.int32), np.zeros(b, np.int32)

    @jax.jit
    def run(own: Any, segments: Any, before: Any, state: Any) -> tuple[Any, Any, Any]:
        """What is read and left, and the largest factor of what is left of the state."""
        passage = delta_passage(DeltaInputs(**own, segments=segments), chunk, at_once, before)
        added, matrix = passage.leaves[..., :p], passage.leaves[..., p:]
        state = jnp.swapaxes(state, -1, -2)
        kept = jnp.einsum("buhnm,buhmp->buhnp", matrix, state.astype(jnp.float32), precision="highest")
        return passage.read(state), added + kept, jnp.abs(matrix).max((1, 2, 3, 4))

    for cut in (segments, 0 * segments):
        expected, last = recurrence(inputs, incoming.astype(np.float64), begins if cut.any() else None)
        with jax.set_mesh(mesh_of("1x1")), use_rules(layout_of(tiny_config().model, MeshShape()).rules):
            y, left, kept = run(inputs, cut, before, incoming)
        assert y.dtype == dtype and left.dtype == jnp.float32
        assert relative(np.asarray(y, np.float64), expected) < bound
        assert relative(np.asarray(left, np.float64).swapaxes(-1, -2), last) < bound
        # Nothing of the state is left after another document begins.
        np.testing.assert_array_equal(np.asarray(kept) > 0, ~cut.any(1))


def test_the_inverse_stands_keys_that_are_all_alike() -> None:
    """Of which a sum of powers of the matrix has terms up to 1e17."""
    system = np.tril(np.ones((1, 61, 61), np.float32), -1)
    found = jax.jit(inverse_of_unit_lower)(system)
    np.testing.assert_allclose(found[0], np.linalg.inv(np.eye(61) + system[0].astype(np.float64)), atol=1e-6)


def test_the_gradient_of_the_inverse_is_jax_numpys() -> None:
    random = np.random.default_rng(0)
    system, back = np.tril(random.normal(size=(13, 13)), -1).astype(np.float32), random.normal(size=(13, 13))

    def gradient(inverse: Any) -> np.ndarray:
        return np.tril(jax.grad(lambda a: (inverse(a) * back.astype(np.float32)).sum())(system), -1)

    expected = gradient(lambda a: jnp.linalg.inv(jnp.eye(13) + a))
    assert relative(gradient(inverse_of_unit_lower), expected) < 1e-4
