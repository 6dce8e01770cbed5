"""Our own attention kernel, run operation by operation on the CPU: beside autodiff of a softmax that is written out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layout.attention_kernel import choose_kernel
from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.kernels.in_blocks import Inputs
from mtjax.models.kernels.pallas import Pallas
from mtjax.models.threefry import random_halves
from mtjax.sharding.context.block_attention import DropoutState
from tests.tiny import mesh_of, tiny_config

BATCH, LENGTH, SCALE, RATE = 2, 128, 0.3, 0.25
DOCUMENTS = jnp.asarray(np.repeat([[0, 1, 2], [0, 1, 1]], [50, 30, 48], axis=1))


def normal(seed, heads, width):
    return jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, heads, width))


def kept_of(heads):
    """What `random_halves` keeps of all heads, queries and keys of two samples: also what `xla` keeps."""
    with jax.set_mesh(mesh_of("1x1")):
        keys, shape = jax.random.split(jax.random.key(7), BATCH), (BATCH, heads, LENGTH, LENGTH)
        drawn = jax.jit(partial(random_halves, shape=shape, sharding=jax.P(None, None, None, None)))(keys)
    return np.asarray(drawn) >= keep_threshold(RATE), jnp.asarray(np.asarray(jax.random.key_data(keys)))


def written_out(inputs, seen, factors):
    query, key, value = inputs
    key, value = (jnp.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", query, key) * SCALE, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores) * factors, value)
    return mixed, jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize(
    ("is_causal", "groups", "width", "has_dropout", "documents"),
    [
        (True, 1, 24, True, DOCUMENTS),
        (True, 2, 16, False, None),
        pytest.param(False, 1, 16, True, DOCUMENTS, marks=pytest.mark.long),
    ],
)
def test_attends_as_a_softmax_that_is_written_out(is_causal, groups, width, has_dropout, documents):
    query, key, value, gradient = (normal(n, h, width) for n, h in enumerate((2, groups, groups, 2)))
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) if is_causal else jnp.ones((LENGTH, LENGTH), bool)
    seen = seen if documents is None else seen & (documents[:, :, None] == documents[:, None])[:, None]
    kept, words = kept_of(2)
    rate, dropout = (RATE, DropoutState(words, jnp.arange(2))) if has_dropout else (0.0, None)
    factors, inputs = kept / keep_share(RATE) if has_dropout else 1.0, (query, key, value)
    (out, log_sums), vjp = jax.vjp(lambda inputs: written_out(inputs, seen, factors), inputs)
    kernel, more = Pallas(SCALE, is_causal, rate, interpreted=True), Inputs(documents, None, None, dropout)

    @jax.jit
    def run(inputs):
        query, key, value = inputs
        mixed, sums = kernel.forward(query, key, value, more)
        return mixed, sums, *kernel.backward(inputs, more, mixed, sums, gradient)

    expected = out, log_sums, *vjp((gradient, jnp.zeros_like(log_sums)))[0]
    for mine, theirs in zip(run(inputs), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_a_rank_masks_its_heads_as_one_device_does():
    """The second of two heads by itself, as on a tensor parallel rank, in 16 bits."""
    arrays = [normal(n, 2, 16).astype(jnp.bfloat16) for n in range(3)]
    words = jnp.asarray([[1, 2], [3, 4]], jnp.uint32)
    kernel = Pallas(SCALE, True, RATE, interpreted=True)

    def run(heads):
        query, key, value = (a[:, :, heads] for a in arrays)
        return jax.jit(kernel)(query, key, value, Inputs(None, None, None, DropoutState(words, heads)))

    both, second = run(jnp.arange(2)), run(jnp.arange(1, 2))
    np.testing.assert_array_equal(both[:, :, 1:], second)


@pytest.mark.parametrize(
    ("fields", "platform", "capability", "kernel", "reason"),
    [
        ({}, "gpu", (8, 0), "pallas", None),
        ({"family": "bert"}, "gpu", (9, 0), "pallas", None),
        ({}, "cpu", (9, 0), "blocks", "it runs on GPUs only"),
        ({}, "gpu", (7, 0), "blocks", "it needs GPUs of compute capability 8.0 or newer"),
        (
            {"sequence_length": 96},
            "gpu",
            (9, 0),
            "blocks",
            "it needs samples of a multiple of 64 tokens, and sequence_length is 96",
        ),
        ({"position": "alibi"}, "gpu", (9, 0), "blocks", "it has no bias, and position is alibi"),
        (
            {"qk_clip": 5.0, "optimizer": "muon"},
            "gpu",
            (9, 0),
            "blocks",
            "it does not keep the largest scores, and qk_clip is 5",
        ),
        ({"attention_sinks": True, "family": "llama"}, "gpu", (9, 0), "blocks", "it has no sinks (attention_sinks)"),
        ({"family": "t5"}, "gpu", (9, 0), "xla", "it adds no bias to the scores, and family is t5"),
        *(
            ({"attention": "auto"} | fields, "gpu", capability, kernel, None)
            for fields, capability, kernel in (
                ({"head_dim": 64}, (9, 0), "pallas"),
                ({"head_dim": 64, "attention_dropout": 0.0}, (9, 0), "cudnn"),
                ({"head_dim": 64}, (8, 0), "xla"),
                ({"head_dim": 64}, (10, 0), "xla"),
                ({"head_dim": 96}, (9, 0), "xla"),
                ({"head_dim": 64, "family": "bert"}, (9, 0), "xla"),
                ({"head_dim": 64, "family": "llama", "num_kv_heads": 2}, (9, 0), "xla"),
                ({"head_dim": 64, "reset_attention_mask": True}, (9, 0), "xla"),
                ({"head_dim": 64, "deterministic": True}, (9, 0), "xla"),
                ({"head_dim": 64, "compute_dtype": "float32"}, (9, 0), "xla"),
            )
        ),
    ],
)
def test_is_the_kernel_where_it_can_be(fields, platform, capability, kernel, reason):
    settings = {"attention": "pallas", "compute_dtype": "bfloat16", "sequence_length": 128, "attention_dropout": 0.1}
    settings |= fields
    assert choose_kernel(tiny_config(**settings), platform, capability) == (kernel, reason)
