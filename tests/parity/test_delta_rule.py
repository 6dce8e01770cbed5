"""The gated delta rule beside transformers' Qwen3-Next: its chunked form, with gradients, and its recurrent one."""

import jax
import numpy as np
import pytest

from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape
from mtjax.models.kernels.delta_rule import DeltaInputs, delta_scan
from mtjax.sharding.axes import use_rules
from tests.models.test_delta_rule import SIZES, drawn
from tests.parity.compare import relative
from tests.tiny import mesh_of, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("size", "at_once"), [(128, 9), (13, 2)])
def test_outputs_states_and_gradients_equal_transformers(size: int, at_once: int) -> None:
    inputs = drawn(np.float32)
    b, s, u, h, p, n = SIZES
    back = np.random.default_rng(1).normal(size=(b, s, u, h, p)).astype(np.float32)
    heads = {"query": (u, n), "key": (u, n), "value": (u * h, p), "decay": (u * h,), "beta": (u * h,)}
    given = {name: torch.tensor(inputs[name].reshape(b, s, *shape)).requires_grad_() for name, shape in heads.items()}
    tensors = {"g" if name == "decay" else name: tensor for name, tensor in given.items()}
    y, state = theirs.torch_chunk_gated_delta_rule(**tensors, output_final_state=True)
    (y * torch.tensor(back.reshape(y.shape))).sum().backward()
    with torch.no_grad():
        again, last = theirs.torch_recurrent_gated_delta_rule(**tensors, output_final_state=True)

    def run(own: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        found, after = delta_scan(DeltaInputs(**{**own, "query": own["query"] * n**-0.5}), size, at_once)
        return (found * back).sum(), (found, after)

    with jax.set_mesh(mesh_of("1x1")), use_rules(layout_of(tiny_config().model, MeshShape()).rules):
        gradients, (found, after) = jax.jit(jax.grad(run, has_aux=True))(inputs)
    states = np.asarray(after).reshape(b, u * h, p, n).swapaxes(-1, -2)
    for expected, of_state in ((y, state), (again, last)):
        assert relative(np.asarray(found).reshape(y.shape), expected.detach().numpy()) < 1e-5
        assert relative(states, of_state.detach().numpy()) < 1e-5
    for name, tensor in given.items():
        assert relative(np.asarray(gradients[name]).reshape(tensor.shape), tensor.grad.numpy()) < 1e-5, name
