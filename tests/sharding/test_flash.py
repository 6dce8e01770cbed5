"""The road around the flash kernel, with another in its place: no GPU here."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, reshard

from mtjax.layout.attention_kernel import choose_kernel
from mtjax.layout.layouts import TENSOR
from mtjax.models.alibi import Alibi, slopes
from mtjax.models.kernels import cudnn, in_blocks
from mtjax.models.kernels.masks import causal_mask
from mtjax.models.kernels.packed import Packed
from mtjax.models.kernels.xla import AttentionOptions, softmax_attention
from mtjax.models.layer_context import LayerContext
from mtjax.sharding.axes import partition_spec, spec, use_rules
from mtjax.sharding.flash import Differentiable, flash_attention
from tests.tiny import gradients_like, mesh_of, program_of, run_steps, tiny_config

HEADS = partition_spec(TENSOR.rules, ("batch", "seq", "heads", "head_dim"))
TOKENS = partition_spec(TENSOR.rules, ("batch", "seq"))
SCALE = partition_spec(TENSOR.rules, ("heads", "head_dim"))
OF_HEADS = partition_spec(TENSOR.rules, ("heads",))


def stand_in_for(query, key, value, *, scale=None, is_causal=True, window=None):
    """Attention that saves what cuDNN's does: the logarithm of every softmax's denominator, and an empty array."""
    return stand_in((query.shape[-1] ** -0.5 if scale is None else scale, is_causal, window), query, key, value)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def stand_in(how, query, key, value):
    return stand_in_forward(how, query, key, value)[0]


def scores_of(how, query, key):
    scale, is_causal, window = how
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key) * scale
    return jnp.where(causal_mask(query.shape[1], None, window), scores, -1e30) if is_causal else scores


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


def packed_stand_in_for(query, key, value, lengths, starts, *, scale, window):
    """Attention within documents, with statistics of each, as cuDNN's: here all of a sample's are in its first row."""
    return packed_stand_in((scale, window), query, key, value, lengths, starts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def packed_stand_in(how, *inputs):
    return packed_forward(how, *inputs)[0]


def packed_scores(how, query, key, lengths, starts):
    tokens, (scale, window) = jnp.arange(query.shape[1])[:, None], how
    is_inside = (tokens >= starts[:, None, :-1]) & (tokens < (starts[:, :-1] + lengths)[:, None])
    ids = (is_inside * jnp.arange(1, lengths.shape[1] + 1)).sum(-1)
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key) * scale
    return jnp.where(causal_mask(query.shape[1], ids, window), scores, -1e30)


def packed_forward(how, query, key, value, lengths, starts):
    scores = packed_scores(how, query, key, lengths, starts)
    sums = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnqk,bknd->bqnd", jnp.exp(scores - sums[..., None]), value)
    statistics = jnp.pad(sums, ((0, len(sums) * (lengths.shape[1] - 1)), (0, 0), (0, 0)))
    return out, (query, key, value, lengths, starts, statistics, out)


def packed_backward(how, saved, gradient):
    query, key, value, lengths, starts, statistics, out = saved
    sums = statistics[: len(query)]
    probabilities = jnp.exp(packed_scores(how, query, key, lengths, starts) - sums[..., None])
    own = (gradient * out).sum(-1).transpose(0, 2, 1)[..., None]
    slope = probabilities * (jnp.einsum("bqnd,bknd->bnqk", gradient, value) - own) * how[0]
    of_query, of_key = jnp.einsum("bnqk,bknd->bqnd", slope, key), jnp.einsum("bnqk,bqnd->bknd", slope, query)
    return of_query, of_key, jnp.einsum("bnqk,bqnd->bknd", probabilities, gradient), None, None


packed_stand_in.defvjp(packed_forward, packed_backward)


def flash(query, key, value, documents):
    del documents
    return flash_attention(query, key, value, ("output", "statistics"), Differentiable(stand_in_for))


def with_a_window(query, key, value, documents):
    """Of two lengths of windows, the layer's is selected at run time, as in a scan over layers."""
    kernel, more = cudnn.kernel_of(query, None, options_of(5), stand_in_for)
    return flash_attention(query, key, value, ("output", "statistics"), kernel, more)


def without_a_window(query, key, value, documents):
    kernel, more = cudnn.kernel_of(query, None, options_of(100), stand_in_for)
    return flash_attention(query, key, value, ("output", "statistics"), kernel, more)


def with_sinks(query, key, value, documents):
    kernel = Differentiable(stand_in_for)
    return flash_attention(query, key, value, ("output", "statistics"), kernel, sinks=sinks_of(query))


def packed_samples(most, query, key, value, documents):
    """Samples on some ranks have more documents than the kernel holds, or none has."""
    kernel = Packed(16**-0.5, None, most, packed_stand_in_for)
    return flash_attention(query, key, value, ("output", "statistics"), kernel, documents)


with_room, with_little_room = partial(packed_samples, 32), partial(packed_samples, 7)


def packed_with_a_window(query, key, value, documents):
    kernel, more = cudnn.kernel_of(query, documents, options_of(5), None, packed_stand_in_for)
    return flash_attention(query, key, value, ("output", "statistics"), kernel, more)


def options_of(window):
    return AttentionOptions(window=jnp.asarray(window), windows=(5, 100))


def sinks_of(query):
    """Logits that depend on the queries, so that their gradients are compared too."""
    return query[..., 0].sum((0, 1)) / 100


def plain(query, key, value, documents, window=None, **settings):
    mask = causal_mask(query.shape[1], documents, window)
    settings = {"sinks": sinks_of(query)} | settings if settings.pop("with_sinks", False) else settings
    return softmax_attention(query, key, value, mask, AttentionOptions(**settings), None)


def in_blocks_of_4(query, key, value, documents):
    return in_blocks.attend(query, key, value, LayerContext(segment_ids=documents), options_of(5))


def in_blocks_with_all(query, key, value, documents):
    options = AttentionOptions(scale=0.3, softcap=2.0, sinks=sinks_of(query), alibi=SLOPES)
    return in_blocks.attend(query, key, value, LayerContext(segment_ids=documents), options)


SLOPES = Alibi(slopes(8))
SETTINGS = {
    in_blocks_of_4: {"window": 5},
    in_blocks_with_all: {"scale": 0.3, "softcap": 2.0, "alibi": SLOPES, "with_sinks": True},
    with_a_window: {"window": 5},
    packed_with_a_window: {"window": 5},
    with_sinks: {"with_sinks": True},
}


@pytest.mark.parametrize(
    ("attend", "mesh", "groups"),
    [
        (flash, "1x8", 8),
        (flash, "8x1", 8),
        (flash, "1x1", 2),
        (flash, "2x4", 4),
        (with_a_window, "2x4", 4),
        (with_sinks, "2x4", 4),
        (in_blocks_of_4, "2x4", 4),
        (in_blocks_with_all, "2x4", 4),
        (with_room, "2x4", 4),
        (with_little_room, "8x1", 2),
        pytest.param(packed_with_a_window, "2x4", 4, marks=pytest.mark.long),
        pytest.param(without_a_window, "1x1", 2, marks=pytest.mark.long),
        pytest.param(in_blocks_of_4, "1x1", 2, marks=pytest.mark.long),
        pytest.param(flash, "1x1", 8, marks=pytest.mark.long),
        pytest.param(flash, "2x4", 8, marks=pytest.mark.long),
    ],
)
def test_flash_equals_plain_attention_and_its_gradients(attend, mesh, groups, monkeypatch):
    monkeypatch.setattr(in_blocks, "queries_at_a_time", lambda rows, keys: 4)
    monkeypatch.setattr(cudnn, "documents_at_most", lambda tokens: 32)
    place, random = mesh_of(mesh), np.random.default_rng(0)
    arrays = [random.normal(size=(8, 32, n, 16)).astype(np.float32) for n in (8, groups, groups)]
    batch = [jax.device_put(a, NamedSharding(place, HEADS)) for a in arrays]
    if attend in (in_blocks_of_4, in_blocks_with_all, with_room, with_little_room, packed_with_a_window):
        documents = np.cumsum(random.random((8, 32)) < 0.2, axis=1, dtype=np.int32)
        batch.append(jax.device_put(documents, NamedSharding(place, TOKENS)))
    scales = {
        name: jax.device_put(random.normal(size=(n, 16)).astype(np.float32), NamedSharding(place, SCALE))
        for name, n in (("a", 8), ("b", groups), ("c", groups))
    }

    def gradients(attend):
        def loss_sum(scales, batch):
            with use_rules(TENSOR.rules):
                scaled = [a * scale for a, scale in zip(batch, scales.values(), strict=False)]
                return (attend(*scaled, batch[3] if len(batch) > 3 else None) ** 2).sum()

        return gradients_like(loss_sum, dict.fromkeys(scales, ("heads", "head_dim")), scales, batch, mesh)

    known = partial(plain, **SETTINGS.get(attend, {}))
    with jax.set_mesh(place):
        (losses, found), (theirs, expected) = (jax.jit(lambda f=f: gradients(f))() for f in (attend, known))
    np.testing.assert_allclose(losses["loss"], theirs["loss"], rtol=1e-5)
    for slope, known in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(slope, known, atol=1e-5 * np.abs(known).max())


@pytest.mark.parametrize(("mesh", "window"), [("2x4", 5), pytest.param("2x4", None, marks=pytest.mark.long)], ids=str)
def test_the_largest_scores_of_blocks_are_those_that_numpy_finds(mesh, window, monkeypatch):
    """Before a cap, biases and sinks, of tokens that attend to each other, in the samples of all ranks."""
    monkeypatch.setattr(in_blocks, "queries_at_a_time", lambda rows, keys: 4)
    place, random = mesh_of(mesh), np.random.default_rng(0)
    query, key, value = (random.normal(size=(8, 32, n, 16)).astype(np.float32) for n in (8, 4, 4))
    documents = np.cumsum(random.random((8, 32)) < 0.2, axis=1, dtype=np.int32)
    batch = [jax.device_put(a, NamedSharding(place, HEADS)) for a in (query, key, value)]
    batch.append(jax.device_put(documents, NamedSharding(place, TOKENS)))
    bounds = options_of(window) if window else AttentionOptions(softcap=2.0, alibi=SLOPES, scale=0.3)

    def loss_sum(zeros, batch):
        with use_rules(TENSOR.rules):
            *products, documents = batch
            products = [reshard(a, spec("batch", "seq", "heads", "head_dim")) for a in products]
            sinks = None if window else sinks_of(products[0])
            options = dataclasses.replace(bounds, largest_scores=zeros["attention"]["largest_scores"], sinks=sinks)
            return (in_blocks.attend(*products, LayerContext(segment_ids=documents), options) ** 2).sum()

    with jax.set_mesh(place):
        zeros = jax.device_put(np.zeros(8, np.float32), NamedSharding(place, OF_HEADS))
        names, zeros = ({"attention": {"largest_scores": each}} for each in (("heads",), zeros))
        found = jax.jit(lambda: gradients_like(loss_sum, names, zeros, batch, mesh))()[1]["attention"]["largest_scores"]
    scores = np.einsum("bqhd,bkhd->bhqk", *(a.astype(np.float64) for a in (query, np.repeat(key, 2, 2))))
    order = np.arange(32)
    seen = (order[:, None] >= order) & (documents[:, :, None] == documents[:, None, :])
    if window:
        seen &= order[:, None] - order < window
    known = np.where(seen[:, None], scores, -np.inf).max((0, 2, 3)) * (0.25 if window else 0.3)
    np.testing.assert_allclose(found, known, rtol=1e-5)


@pytest.mark.parametrize(
    "mesh", [pytest.param("2x2", marks=pytest.mark.long), pytest.param("1x1", marks=pytest.mark.exhaustive)]
)
def test_dropout_in_blocks_has_the_masks_of_all_scores_at_once(mesh, monkeypatch):
    """Of four queries at a time, forward and backward, on ranks with two samples of two heads."""
    monkeypatch.setattr(in_blocks, "queries_at_a_time", lambda rows, keys: 4)
    fields = {"attention_dropout": 0.3, "recompute": "selective", "num_layers": 1}
    (_, expected), (_, found) = (
        run_steps(program_of(mesh, **fields, attention=attention), 2) for attention in ("xla", "blocks")
    )
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "device", "kernel", "reason"),
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
        ({"attention": "cudnn", "hidden_size": 96, "sequence_length": 16384}, "gpu", "blocks", "this one is 12"),
        ({"head_dim": 256}, "gpu", "cudnn", None),
        ({"attention": "cudnn", "head_dim": 256}, "a100", "xla", "up to 128"),
        ({"attention": "cudnn", "reset_attention_mask": True}, "gpu", "cudnn", None),
        ({"attention": "cudnn", "reset_attention_mask": True}, "a100", "xla", "reset_attention_mask"),
        ({"attention": "cudnn", "reset_attention_mask": True, "attention_sinks": True}, "gpu", "xla", "no sinks"),
        ({"attention_softcap": 5.0, "sequence_length": 8192, "num_heads": 32}, "gpu", "blocks", None),
        ({"reset_attention_mask": True, "sequence_length": 16384, "num_heads": 2}, "gpu", "blocks", None),
        *(
            ({"reset_attention_mask": True, "head_dim": 64} | fields, device, kernel, None)
            for fields, device, kernel in (
                ({"sequence_length": 2047}, "gpu", "xla"),
                ({"sequence_length": 2048}, "gpu", "cudnn"),
                ({"sequence_length": 2049}, "gpu", "xla"),
                ({"sequence_length": 8192}, "gpu", "cudnn"),
                ({"sequence_length": 2048}, "b200", "xla"),
                ({"sequence_length": 2048, "head_dim": 96}, "gpu", "xla"),
                ({"sequence_length": 2048, "task": "chat"}, "gpu", "xla"),
                ({"sequence_length": 2048, "attention_window": 16}, "gpu", "xla"),
            )
        ),
        ({"attention_window": 16}, "gpu", "cudnn", None),
        ({"attention": "cudnn", "attention_softcap": 5.0}, "gpu", "xla", "attention_softcap is 5.0"),
        ({"attention": "blocks"}, "cpu", "blocks", None),
        ({"attention": "blocks", "attention_dropout": 0.1}, "gpu", "blocks", None),
        ({"attention_dropout": 0.1, "sequence_length": 16384}, "gpu", "xla", None),
        ({"qk_clip": 50.0}, "gpu", "xla", None),
        ({"qk_clip": 50.0, "sequence_length": 16384}, "gpu", "blocks", None),
        ({"qk_clip": 50.0, "attention": "blocks"}, "cpu", "blocks", None),
    ],
)
def test_kernel_is_cudnn_where_it_can_be(fields, device, kernel, reason):
    config = tiny_config(**{"hidden_size": 64, "attention_dropout": 0.0, "compute_dtype": "bfloat16"} | fields)
    capability = {"a100": (8, 0), "b200": (10, 0)}.get(device, (9, 0))
    platform = "cpu" if device == "cpu" else "gpu"
    chosen, why = choose_kernel(config, platform, capability)
    assert chosen == kernel
    assert (why is None) if reason is None else (reason in why)
