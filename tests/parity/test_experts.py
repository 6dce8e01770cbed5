"""Experts beside Mixtral's block of transformers: output, balance loss, and the gradients of both."""

import jax
import numpy as np
import pytest

from mtjax.models.mixers.experts import BALANCE_LOSS, LOAD
from mtjax.sharding.axes import use_rules
from tests.models.test_experts import RULES, SOFTMAX, apply, mixer_of
from tests.tiny import mesh_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

CHOSEN = 2
"""Experts of a token, by which transformers does not divide its balance loss."""

pytestmark = pytest.mark.torch


def test_output_balance_loss_and_gradients_are_mixtrals():
    """Of one sample, over whose tokens transformers takes its balance loss too."""
    from transformers.models.mixtral import modeling_mixtral

    x, of_out = np.random.default_rng(0).normal(size=(2, 1, 24, 16)).astype(np.float32)
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of(SOFTMAX)

        def loss(p, x):
            out, report = apply(static, p, x)
            return (out * of_out).sum() + 3 * CHOSEN * report[BALANCE_LOSS].sum(), (out, report)

        (of_p, of_x), (out, report) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(parameters, x)
    p = jax.tree.map(np.array, parameters)
    count, width, inner = p["down"]["weight"].shape[0], x.shape[-1], p["down"]["weight"].shape[1]
    theirs = modeling_mixtral.MixtralSparseMoeBlock(
        transformers.MixtralConfig(
            hidden_size=width, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=2
        )
    )

    def as_theirs(tree):
        up = np.asarray(tree["up"]["weight"]).transpose(0, 2, 3, 1).reshape(count, 2 * inner, width)
        down = np.asarray(tree["down"]["weight"]).transpose(0, 2, 1)
        return {
            "gate.weight": np.asarray(tree["router"]["weight"]).T,
            "experts.gate_up_proj": up,
            "experts.down_proj": down,
        }

    theirs.load_state_dict({name: torch.tensor(value) for name, value in as_theirs(p).items()})
    read = torch.tensor(x, requires_grad=True)
    known = theirs(read)
    logits, _, chosen = theirs.gate(read)
    balance = modeling_mixtral.load_balancing_loss_func((logits,), count, 2)
    ((known * torch.tensor(of_out)).sum() + 3 * balance).backward()

    def close(found, value, name):
        np.testing.assert_allclose(found, value, atol=1e-5 * np.abs(value).max(), err_msg=name)

    close(out, known.detach().numpy(), "output")
    close(CHOSEN * report[BALANCE_LOSS][0], balance.item(), "balance loss")
    np.testing.assert_array_equal(report[LOAD][0], np.bincount(chosen.numpy().ravel(), minlength=count))
    close(of_x, read.grad.numpy(), "gradient of the stream")
    for name, value in as_theirs(of_p).items():
        close(value, theirs.get_parameter(name).grad.numpy(), name)
