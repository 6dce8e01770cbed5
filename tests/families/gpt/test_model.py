import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Parallel
from mtjax.config.sizes import padded_vocab_size
from mtjax.layout.layouts import TENSOR
from mtjax.layout.rules import MODEL
from mtjax.layout.stacks import stacks_of
from mtjax.models.layer import Layer, Stack
from mtjax.models.layer_context import LayerContext
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.models.ops import dropout
from mtjax.sharding.axes import use_rules
from mtjax.sharding.param_specs import batch_sharding
from tests.tiny import batch_of, initial_state, mesh_of, program_of, tiny_config

MESHES = ("1x1", "8x1", "1x8", "2x4")


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_parameters_count_what_the_formula_says():
    program = program_of("1x1")
    counted = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_parameters))
    assert counted == parameters(anatomy_of(program.config.model))


@pytest.mark.parametrize(("mesh", "zero"), [("8x1", 0), ("1x8", 0), ("2x4", 3)])
def test_initial_parameters_do_not_depend_on_the_mesh(mesh, zero):
    here, there = (flat(p.initialize(3).parameters) for p in (program_of("1x1"), program_of(mesh, zero=zero)))
    last_bit = 1e-6 if zero else 0  # of shorter rows XLA computes the normal distribution in another way
    for name, value in here.items():
        np.testing.assert_allclose(value, there[name], rtol=last_bit, atol=last_bit / 100, err_msg=name)


def test_initialisation_is_the_papers():
    program = program_of("2x4", num_layers=8, hidden_size=128, scaled_init=True)
    found = jax.tree.map(np.asarray, program.initialize(0).parameters)
    layer = found["stack"]["layers"]
    output_std = 0.02 / (2 * 8) ** 0.5
    expected = {
        "embedding": (found["embedding"], 0.02),
        "positions": (found["positions"], 0.02),
        "qkv": (layer["attention"]["qkv"]["weight"], 0.02),
        "up": (layer["mlp"]["up"]["weight"], 0.02),
        "attention output": (layer["attention"]["output"]["weight"], output_std),
        "mlp output": (layer["mlp"]["down"]["weight"], output_std),
    }
    for name, (weight, std) in expected.items():
        assert abs(float(weight.std()) / std - 1) < 0.05, name
        assert abs(float(weight.mean())) < std / 10, name
    assert not layer["mlp"]["up"]["bias"].any() and (layer["mlp_norm"]["scale"] == 1).all()


def test_layers_start_different():
    weight = np.asarray(program_of("1x1").initialize(0).parameters["stack"]["layers"]["mlp"]["up"]["weight"])
    assert not np.allclose(weight[0], weight[1])


def test_parameters_live_where_the_rules_say():
    program = program_of("2x4")
    sharding = program.initialize(0).parameters["stack"]["layers"]["attention"]["qkv"]["weight"].sharding
    assert tuple(sharding.spec) == (None, None, None, "model", None)
    state = program.initialize(0)
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 5]
    assert len(moments) == 2 and all(m.sharding == sharding for m in moments)


def masks(mesh, samples, rules=TENSOR.rules):
    """Dropout masks of samples, on a mesh: attention's, whose heads are split, and the stream's."""
    names = (("batch", "heads", "seq", "key_seq"), ("batch", "act_seq", "embed"))

    def draw(numbers):
        with use_rules(rules):
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(numbers)
            ones = (jnp.ones((len(numbers), 8, 16, 16)), jnp.ones((len(numbers), 16, 32)))
            return [dropout(x, 0.1, keys, site, n) for site, (x, n) in enumerate(zip(ones, names, strict=True))]

    place = mesh_of(mesh)
    with jax.set_mesh(place):
        split = jax.shard_map(
            draw, axis_names={"data"}, in_specs=jax.P("data"), out_specs=[jax.P("data"), jax.P("data")]
        )
        numbers = jax.device_put(np.asarray(samples, np.uint32), batch_sharding(place, rules))
        return [np.asarray(a) for a in jax.jit(split)(numbers)]


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_dropout_masks_do_not_depend_on_the_mesh(mesh):
    samples = list(range(40, 48))
    for rules in (TENSOR.rules, dataclasses.replace(TENSOR.rules, act_seq=(MODEL,))):
        for here, there in zip(masks("1x1", samples), masks(mesh, samples, rules), strict=True):
            np.testing.assert_array_equal(here, there)


def test_dropout_differs_by_sample_and_keeps_the_mean():
    attention, stream = masks("1x1", list(range(8)))
    assert not np.array_equal(attention[0], attention[1]) and not np.array_equal(attention[0, 0], attention[0, 1])
    for mask in (attention, stream):
        assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - 6554 / 65536))}  # the rate in 16 bits
        dropped = (mask == 0).mean()
        assert abs(dropped - 0.1) < 5 * (0.1 * 0.9 / mask.size) ** 0.5


def hidden_of(program, parameters, batch):
    def run(parameters, batch):
        with use_rules(program.layout.rules):
            return program.model(parameters)(batch["tokens"], batch.get("position_ids"), batch.get("segment_ids"))

    with jax.set_mesh(program.mesh):
        return np.asarray(jax.jit(run)(parameters, batch))


def test_a_token_sees_only_those_before_it():
    program = program_of("2x4")
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    before = hidden_of(program, parameters, batch)
    changed = np.array(batch["tokens"])
    changed[:, 9] = (changed[:, 9] + 1) % 250
    after = hidden_of(program, parameters, batch | {"tokens": jax.device_put(changed, batch["tokens"].sharding)})
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_segments_do_not_see_each_other_and_positions_restart():
    """A packed sample's second document gives what it gives alone."""
    program = program_of("2x4")
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    cut, length = 7, program.config.model.sequence_length
    ids = np.concatenate([np.arange(cut), np.arange(length - cut)])
    segments = (np.arange(length) >= cut).astype(np.int32)
    place = batch["tokens"].sharding
    extra = {"position_ids": ids.astype(np.int32), "segment_ids": segments}
    packed = batch | {n: jax.device_put(np.tile(a, (8, 1)), place) for n, a in extra.items()}
    alone = np.array(batch["tokens"])
    alone[:, : length - cut] = alone[:, cut:]
    found = hidden_of(program, parameters, packed)[:, cut:]
    expected = hidden_of(program, parameters, {"tokens": jax.device_put(alone, place)})[:, : length - cut]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_vocabulary_is_padded_by_the_config_alone():
    model = program_of("1x1").config.model
    assert padded_vocab_size(model) == 256
    assert all(program_of(m).abstract_parameters["embedding"].shape == (256, 32) for m in MESHES)


def test_each_site_drops_its_own():
    with use_rules(TENSOR.rules), jax.set_mesh(mesh_of("1x1")):
        keys = jax.random.split(jax.random.key(0), 2)
        first, second = (dropout(jnp.ones((2, 64)), 0.5, keys, site, ("batch", "embed")) for site in (1, 2))
    assert not np.array_equal(first, second)


def test_each_layer_draws_from_its_own_key(monkeypatch):
    """Layers replaced by x -> 2 x + (a number drawn from the key that they get)."""

    def draw(self, x, context, states):
        return 2 * x + jax.random.uniform(context.dropout_keys[0]), states

    monkeypatch.setattr(Layer, "__call__", draw)
    model = tiny_config(num_layers=3).model
    key = jax.random.key(5)
    with use_rules(TENSOR.rules), jax.set_mesh(mesh_of("1x1")):
        (own,), key_0 = stacks_of(model), jax.random.key(0)
        stack = Stack(
            model, jnp.float32, layer_stack=own, loop_settings=LayerLoopSettings(), parallel=Parallel(), key=key_0
        )
        x, _ = stack.over_layers(LayerContext(key[None]))(jnp.zeros((1, 1, 1)))
    drawn = [float(jax.random.uniform(jax.random.fold_in(key, number))) for number in range(3)]
    np.testing.assert_allclose(float(x[0, 0, 0]), 4 * drawn[0] + 2 * drawn[1] + drawn[2], rtol=1e-6)
