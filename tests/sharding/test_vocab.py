"""Vocabulary-parallel embedding and loss against float64 and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from mtjax.layout.layouts import TENSOR
from mtjax.sharding.axes import partition_spec, use_rules
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy, vocab_parallel_embedding
from mtjax.sharding.vocab_weighted import weighted_cross_entropy
from tests.tiny import gradients_like, mesh_of

ROWS, VOCAB, HIDDEN, BATCH, LENGTH = 64, 57, 16, 4, 6
MESHES = ("1x1", "1x2", "1x4", "1x8", "2x4", "4x2")
TABLE = partition_spec(TENSOR.rules, ("vocab", "embed"))
STREAM = partition_spec(TENSOR.rules, ("batch", "act_seq", "embed"))
TOKENS = partition_spec(TENSOR.rules, ("batch", "seq"))
FEW = ("1x1", "1x8", "2x4", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("1x2", "1x4", "4x2")))
ODD = ("plain", "extreme", "masked")
# Borders lie elsewhere on every mesh; what else is odd about a batch does not depend on it.
LOSS_CASES = [(mesh, "borders") for mesh in MESHES] + [(mesh, case) for mesh in ("1x1", "2x4") for case in ODD]
LOSS_CASES += [pytest.param(m, c, marks=pytest.mark.long) for m in MESHES for c in ODD if (m, c) not in LOSS_CASES]


def inputs(case: str):
    """hidden, table, labels and weights; `case` says what is odd about them."""
    random = np.random.default_rng(7)
    hidden = random.normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)
    table = random.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    labels = random.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    weights = random.random((BATCH, LENGTH)).astype(np.float32)
    if case == "extreme":
        hidden *= 1e3
    if case == "borders":  # first and last rows of the slices of 2, 4 and 8 shards, and the last real token
        labels = np.resize([0, 7, 8, 15, 16, 31, 32, 39, 40, 55, 56, VOCAB - 1], (BATCH, LENGTH)).astype(np.int32)
    if case == "masked":
        weights[1:3] = 0
        hidden[1, 0] = 1e4
    return hidden, table, labels, weights


def reference(hidden, table, labels, weights, smoothing=0.0, z_loss=0.0):
    """Losses and gradients of the weighted sum, in float64 by hand."""
    hidden, real = hidden.astype(np.float64), table[:VOCAB].astype(np.float64)
    logits = hidden @ real.T
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    target = np.eye(VOCAB)[labels] * (1 - smoothing) + smoothing / VOCAB
    losses = log_z - (target * logits).sum(-1) + z_loss * log_z**2
    probabilities = np.exp(logits - log_z[..., None])
    slope = (probabilities * (1 + 2 * z_loss * log_z[..., None]) - target) * weights[..., None]
    table_gradient = np.zeros(table.shape)
    table_gradient[:VOCAB] = np.einsum("bsv,bsh->vh", slope, hidden)
    return logits, losses, slope @ real, table_gradient


def fused(mesh, hidden, table, labels, weights, options):
    """Losses, and gradients of their weighted sum, where `data` is explicit."""

    def weighted(hidden, table):
        with use_rules(TENSOR.rules):
            losses = vocab_parallel_cross_entropy(hidden, table, labels, options)
        return (losses * weights).sum(), losses

    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((hidden, STREAM), (table, TABLE))]
    labels, weights = (jax.device_put(a, NamedSharding(mesh, TOKENS)) for a in (labels, weights))
    with jax.set_mesh(mesh):
        gradients, losses = jax.jit(jax.grad(weighted, (0, 1), has_aux=True))(*placed)
    return np.asarray(losses), *map(np.asarray, gradients)


@pytest.mark.parametrize(("mesh", "case"), LOSS_CASES)
def test_loss_equals_float64_and_optax(mesh, case):
    hidden, table, labels, weights = inputs(case)
    logits, losses, hidden_gradient, table_gradient = reference(hidden, table, labels, weights)
    found = fused(mesh_of(mesh), hidden, table, labels, weights, LossOptions(VOCAB, chunk=5))
    scale = max(1.0, np.abs(logits).max())
    np.testing.assert_allclose(found[0], losses, atol=1e-6 * scale, rtol=0)
    gathered = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits, jnp.float32), labels)
    np.testing.assert_allclose(found[0], gathered, atol=1e-6 * scale, rtol=0)
    for mine, theirs in ((found[1], hidden_gradient), (found[2], table_gradient)):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * max(1.0, np.abs(theirs).max()), rtol=0)


@pytest.mark.parametrize("mesh", ["1x1", "2x4"])
def test_smoothing_and_z_loss_equal_float64(mesh):
    arrays = inputs("plain")
    _, losses, hidden_gradient, table_gradient = reference(*arrays, smoothing=0.1, z_loss=1e-2)
    options = LossOptions(VOCAB, chunk=7, label_smoothing=0.1, z_loss=1e-2)
    found = fused(mesh_of(mesh), *arrays, options)
    for mine, theirs in zip(found, (losses, hidden_gradient, table_gradient), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("mesh", "case"), [("1x1", "masked"), ("4x1", "borders")])
def test_gradients_with_the_loss_are_those_of_float64(mesh, case):
    """With smoothing and z-loss; three times the sum has three times its gradients."""
    hidden, table, labels, weights = inputs(case)
    _, losses, *expected = reference(hidden, table, labels, weights, smoothing=0.1, z_loss=0.01)
    options, place = LossOptions(VOCAB, chunk=5, label_smoothing=0.1, z_loss=0.01), mesh_of(mesh)

    def total(hidden, table, labels, weights):
        with use_rules(TENSOR.rules):
            return 3 * weighted_cross_entropy(hidden, table, labels, weights, options)

    arrays = ((hidden, STREAM), (table, TABLE), (labels, TOKENS), (weights, TOKENS))
    placed = [jax.device_put(a, NamedSharding(place, s)) for a, s in arrays]
    with jax.set_mesh(place):
        found, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(*placed)
        alone = jax.jit(total)(*placed)
    np.testing.assert_allclose([found, alone], 3 * (losses * weights).sum(), rtol=1e-5)
    for own, there in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(own, 3 * there, atol=3e-5, rtol=0)


@pytest.mark.parametrize("mesh", ["1x1", "1x8", "2x4"])
def test_a_bias_is_a_column_of_the_table_that_meets_a_one(mesh):
    """In float64: hidden states with a 1 at their end, and a table with the bias as its last column."""
    hidden, table, labels, weights = inputs("plain")
    bias = np.random.default_rng(3).normal(size=ROWS).astype(np.float32)
    longer = (np.pad(hidden, [(0, 0), (0, 0), (0, 1)], constant_values=1), np.concatenate([table, bias[:, None]], 1))
    _, losses, _, gradient = reference(*longer, labels, weights, smoothing=0.1)
    place, options = mesh_of(mesh), LossOptions(VOCAB, chunk=5, label_smoothing=0.1)

    def weighted(table, bias):
        with use_rules(TENSOR.rules):
            losses = vocab_parallel_cross_entropy(hidden_there, table, labels_there, options, bias)
        return (losses * weights_there).sum(), losses

    with jax.set_mesh(place):
        arrays = (hidden, labels, weights, table, bias)
        specs = (STREAM, TOKENS, TOKENS, TABLE, partition_spec(TENSOR.rules, ("vocab",)))
        there = [jax.device_put(a, NamedSharding(place, s)) for a, s in zip(arrays, specs, strict=True)]
        hidden_there, labels_there, weights_there, *parameters = there
        (table_gradient, bias_gradient), found = jax.jit(jax.grad(weighted, (0, 1), has_aux=True))(*parameters)
    np.testing.assert_allclose(found, losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(table_gradient, gradient[:, :-1], atol=1e-5, rtol=0)
    np.testing.assert_allclose(bias_gradient, gradient[:, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])
def test_any_chunk_gives_the_same(chunk):
    arrays = inputs("plain")
    _, losses, hidden_gradient, table_gradient = reference(*arrays)
    found = fused(mesh_of("1x2"), *arrays, LossOptions(VOCAB, chunk=chunk))
    for mine, theirs in zip(found, (losses, hidden_gradient, table_gradient), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


def test_padding_rows_never_win_nor_learn():
    hidden, table, labels, weights = inputs("plain")
    table[VOCAB:] = 100.0
    found = fused(mesh_of("1x8"), hidden, table, labels, weights, LossOptions(VOCAB))
    np.testing.assert_allclose(found[0], reference(hidden, table, labels, weights)[1], atol=1e-5)
    assert not found[2][VOCAB:].any()


def test_masked_rows_have_no_gradient():
    hidden, table, labels, weights = inputs("masked")
    found = fused(mesh_of("2x4"), hidden, table, labels, weights, LossOptions(VOCAB))
    assert not found[1][1:3].any() and found[1][0].any()
    nothing = fused(mesh_of("2x4"), hidden, table, labels, 0 * weights, LossOptions(VOCAB))
    assert not nothing[1].any() and not nothing[2].any()


@pytest.mark.parametrize("mesh", FEW)
def test_gradients_where_data_is_manual(mesh):
    """The road that training takes: nested in the manual region over `data`, embedding and loss on one table."""
    hidden, table, labels, weights = inputs("plain")
    tokens = np.roll(labels, 1)
    place = mesh_of(mesh)

    def loss_sum(parameters, batch):
        with use_rules(TENSOR.rules):
            looked_up = vocab_parallel_embedding(parameters["table"], batch["tokens"], jnp.float32)
            stream = batch["hidden"] + looked_up
            losses = vocab_parallel_cross_entropy(stream, parameters["table"], batch["labels"], LossOptions(VOCAB, 5))
        return (losses * batch["weights"]).sum()

    batch = {"hidden": hidden, "tokens": tokens, "labels": labels, "weights": weights}
    rows = NamedSharding(place, partition_spec(TENSOR.rules, ("batch",)))
    batch = {name: jax.device_put(array, rows) for name, array in batch.items()}
    parameters = {"table": jax.device_put(table, NamedSharding(place, TABLE))}
    names = {"table": ("vocab", "embed")}

    with jax.set_mesh(place):
        found, gradients = jax.jit(lambda p, b: gradients_like(loss_sum, names, p, b, mesh))(parameters, batch)

    stream = hidden + table[tokens]
    _, losses, stream_gradient, table_gradient = reference(stream, table, labels, weights)
    np.add.at(table_gradient, tokens, stream_gradient)
    np.testing.assert_allclose(found["loss"], (losses * weights).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradients["table"], table_gradient, atol=1e-5 * np.abs(table_gradient).max())


@pytest.mark.parametrize("mesh", MESHES)
def test_embedding_is_a_lookup(mesh):
    _, table, labels, _ = inputs("borders")
    place = mesh_of(mesh)

    def look_up(table, tokens):
        with use_rules(TENSOR.rules):
            return vocab_parallel_embedding(table, tokens, jnp.bfloat16)

    with jax.set_mesh(place):
        found = jax.jit(look_up)(
            jax.device_put(table, NamedSharding(place, TABLE)), jax.device_put(labels, NamedSharding(place, TOKENS))
        )
    np.testing.assert_array_equal(np.asarray(found), table[labels].astype(jnp.bfloat16))


def test_logits_of_the_whole_batch_are_never_alive():
    """The compiled forward and backward pass hold no array of tokens x vocabulary, gathered or not."""
    mesh = mesh_of("1x2")
    tokens, rows, chunk = 8 * 64, 4096, 32

    def loss(hidden, table, labels):
        with use_rules(TENSOR.rules):
            return vocab_parallel_cross_entropy(hidden, table, labels, LossOptions(rows, chunk)).sum()

    arguments = [
        jax.ShapeDtypeStruct((8, 64, HIDDEN), jnp.float32, sharding=NamedSharding(mesh, STREAM)),
        jax.ShapeDtypeStruct((rows, HIDDEN), jnp.float32, sharding=NamedSharding(mesh, TABLE)),
        jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=NamedSharding(mesh, TOKENS)),
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    shard = rows // 2
    assert f"f32[{chunk},{shard}]" in compiled.as_text()
    assert f"f32[{tokens},{shard}]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * shard * 4 / 2
