"""The road around the flash kernel, with another in its place: no GPU here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mtjax.models.kernels.options import AttentionOptions
from mtjax.models.kernels.xla import causal_mask, softmax_attention
from mtjax.sharding.axes import partition_spec, use_rules
from mtjax.sharding.flash import flash_attention
from mtjax.theory.attention import choose_kernel
from mtjax.theory.layout import TENSOR
from tests.tiny import gradients_like, mesh_of, tiny_config

HEADS = partition_spec(TENSOR.rules, ("batch", "seq", "heads", "head_dim"))
SCALE = partition_spec(TENSOR.rules, ("heads", "head_dim"))


def stand_in_for(query, key, value, *, scale=None, is_causal=True):
    """Attention that saves what cuDNN's does: the logarithm of every softmax's denominator, and an empty array."""
    return stand_in((query.shape[-1] ** -0.5 if scale is None else scale, is_causal), query, key, value)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def stand_in(how, query, key, value):
    return stand_in_forward(how, query, key, value)[0]


def scores_of(how, query, key):
    scale, is_causal = how
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key) * scale
    return jnp.where(causal_mask(query.shape[1], None), scores, -1e30) if is_causal else scores


def stand_in_forward(how, query, key, value):
    statistics = jax.nn.logsumexp(scores_of(how, query, key), axis=-1)
    out = mixed_by(how, query, key, value, statistics)
    return out, (query, key, value, jnp.zeros(0), statistics, out)


def mixed_by(how, query, key, value, statistics):
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return jnp.einsum("bnqk,bknd->bqnd", jnp.exp(scores_of(how, query, key) - statistics[..., None]), value)


def stand_in_backward(how, saved, gradient):
    """By its definition; the derivative of the softmax reads the output and the statistics as they were saved."""
    query, key, value, _, statistics, out = saved
    own = (gradient * out).sum(-1).transpose(0, 2, 1)[..., None]

    def pulled(query, key, value):
        probabilities = jax.lax.stop_gradient(jnp.exp(scores_of(how, query, key) - statistics[..., None]))
        values = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
        slope = jnp.einsum("bqnd,bknd->bnqk", gradient, jax.lax.stop_gradient(values)) - own
        through_scores = (scores_of(how, query, key) * jax.lax.stop_gradient(probabilities * slope)).sum()
        return through_scores + (jnp.einsum("bnqk,bknd->bqnd", probabilities, values) * gradient).sum()

    return jax.grad(pulled, argnums=(0, 1, 2))(query, key, value)


stand_in.defvjp(stand_in_forward, stand_in_backward)


def flash(query, key, value):
    return flash_attention(query, key, value, ("output", "statistics"), stand_in_for)


def plain(query, key, value):
    return softmax_attention(query, key, value, causal_mask(query.shape[1], None), AttentionOptions(), None)


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ("1x8", 8),
        ("8x1", 8),
        ("1x1", 2),
        ("2x4", 4),
        pytest.param("1x1", 8, marks=pytest.mark.long),
        pytest.param("2x4", 8, marks=pytest.mark.long),
    ],
)
def test_flash_equals_plain_attention_and_its_gradients(mesh, groups):
    place, random = mesh_of(mesh), np.random.default_rng(0)
    arrays = [random.normal(size=(8, 32, n, 16)).astype(np.float32) for n in (8, groups, groups)]
    batch = [jax.device_put(a, NamedSharding(place, HEADS)) for a in arrays]
    scales = {
        name: jax.device_put(random.normal(size=(n, 16)).astype(np.float32), NamedSharding(place, SCALE))
        for name, n in (("a", 8), ("b", groups), ("c", groups))
    }

    def gradients(attend):
        def loss_sum(scales, batch):
            with use_rules(TENSOR.rules):
                return (attend(*(a * scale for a, scale in zip(batch, scales.values(), strict=True))) ** 2).sum()

        return gradients_like(loss_sum, dict.fromkeys(scales, ("heads", "head_dim")), scales, batch, mesh)

    with jax.set_mesh(place):
        (losses, slopes), (theirs, expected) = (jax.jit(lambda f=f: gradients(f))() for f in (flash, plain))
    np.testing.assert_allclose(losses["loss"], theirs["loss"], rtol=1e-5)
    for slope, known in zip(slopes.values(), expected.values(), strict=True):
        np.testing.assert_allclose(slope, known, atol=1e-5 * np.abs(known).max())


@pytest.mark.parametrize(
    ("fields", "platform", "kernel", "reason"),
    [
        ({}, "gpu", "cudnn", None),
        ({"attention": "cudnn"}, "gpu", "cudnn", None),
        ({"attention": "xla"}, "gpu", "xla", None),
        ({}, "cpu", "xla", None),
        ({"attention": "cudnn"}, "cpu", "xla", "GPUs only"),
        ({"attention_dropout": 0.1}, "gpu", "xla", None),
        ({"attention": "cudnn", "attention_dropout": 0.1}, "gpu", "xla", "attention_dropout is 0.1"),
        ({"attention": "cudnn", "compute_dtype": "float32"}, "gpu", "xla", "compute_dtype is float32"),
        ({"attention": "cudnn", "hidden_size": 96}, "gpu", "xla", "this one is 12"),
        ({"attention": "cudnn", "reset_attention_mask": True}, "gpu", "xla", "reset_attention_mask"),
    ],
)
def test_kernel_is_cudnn_where_it_can_be(fields, platform, kernel, reason):
    config = tiny_config(**{"hidden_size": 64, "attention_dropout": 0.0, "compute_dtype": "bfloat16"} | fields)
    chosen, why = choose_kernel(config, platform)
    assert chosen == kernel
    assert (why is None) if reason is None else (reason in why)
