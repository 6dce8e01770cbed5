"""T5: what its tokens see, its distances, and the same numbers on every mesh."""

import itertools

import jax
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Config, replace, validate
from mtjax.errors import UserError
from mtjax.families.t5.model import table_std
from mtjax.sharding.axes import use_rules
from tests.same_numbers import assert_same
from tests.tiny import batch_of, initial_state, program_of, run_steps

RELATIVE = {"decoder_sequence_length": 8, "num_decoder_layers": 3, "relative_buckets": 8, "relative_max_distance": 12}
MEGATRON = {"norm": "layernorm", "position": "learned", "activation": "gelu", "bias": True}
MEGATRON |= {"decoder_sequence_length": 24}


def t5(mesh, **fields):
    return program_of(mesh, family="t5", **fields)


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        pytest.param(RELATIVE, "2x4", id="relative-2x4", marks=pytest.mark.long),
        pytest.param(MEGATRON, "1x8", id="learned-1x8", marks=pytest.mark.exhaustive),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.exhaustive)
            for name, case in {
                "relative-8x1": (RELATIVE, "8x1"),
                "relative-1x8": (RELATIVE, "1x8"),
                "learned-2x4": (MEGATRON, "2x4"),
                "learned-8x1": (MEGATRON, "8x1"),
            }.items()
        ),
    ],
)
def test_losses_with_dropout_agree_on_every_mesh(mesh, settings):
    state, found = run_steps(t5(mesh, recompute="full", microbatch_size=1, **settings), 3)
    expected_state, expected = run_steps(t5("1x1", **settings), 3)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5, err_msg=name)
    assert len({m["loss"] for m in expected}) == 3
    assert_same(t5(mesh, recompute="full", microbatch_size=1, **settings), t5("1x1", **settings))
    for here, there in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(expected_state.parameters), strict=True):
        assert np.abs(np.asarray(here) - np.asarray(there)).mean() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param({"zero": 2, "microbatch_size": 2}, marks=pytest.mark.exhaustive),
        {"zero": 3, "sequence_parallel": True, "recompute": "full"},
    ],
    ids=str,
)
def test_split_sequences_and_zero_change_nothing(layout):
    found, expected = (run_steps(t5(mesh, **RELATIVE, **more), 3)[1] for mesh, more in (("2x4", layout), ("1x1", {})))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5, err_msg=name)


def hidden_of(program, parameters, batch):
    def run(parameters, batch):
        with use_rules(program.layout.rules):
            model = program.model(parameters)
            return model(batch["encoder_tokens"], batch["decoder_tokens"], batch["encoder_mask"])

    with jax.set_mesh(program.mesh):
        return np.asarray(jax.jit(run)(parameters, batch))


def test_the_decoder_sees_what_is_before_it_and_the_encoder_but_no_padding():
    program = t5("2x4", **RELATIVE)
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    before = hidden_of(program, parameters, batch)

    def after(name, change):
        tokens = np.where(change, (np.asarray(batch[name]) + 1) % 250, np.asarray(batch[name])).astype(np.int32)
        return hidden_of(program, parameters, batch | {name: jax.device_put(tokens, batch[name].sharding)})

    mask = np.asarray(batch["encoder_mask"]).astype(bool)
    np.testing.assert_array_equal(after("encoder_tokens", ~mask), before)
    third = np.zeros_like(mask)
    third[:, 2] = True
    assert (after("encoder_tokens", third) != before).any(-1).all()
    fifth = np.zeros((8, 8), bool)
    fifth[:, 4] = True
    changed = after("decoder_tokens", fifth)
    np.testing.assert_array_equal(changed[:, :4], before[:, :4])
    assert (changed[:, 4:] != before[:, 4:]).any(-1).all()


@pytest.mark.parametrize(("scale", "std"), [(0.5, 1.0), (1.0, 1.0), (1.001, 1 / 1.001), (16.0, 1 / 16), (64.0, 0.02)])
def test_the_initial_table_has_no_jump_in_the_factor_of_logits(scale, std):
    """Unit variance as in T5's code at 1, and less the larger the factor, down to init_std."""
    config = replace(Config(), family="t5", output_scale=scale, init_std=0.02)
    assert table_std(config.model) == pytest.approx(std)


def test_it_learns_one_batch():
    program = t5("2x4", hidden_dropout=0.0, attention_dropout=0.0, **RELATIVE)
    state, losses = initial_state(program), []
    for _ in range(20):
        state, metrics = program.step(state, batch_of(program, 0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "relative"}, "position is 'relative', and the family gpt supports learned or rope"),
        ({"family": "t5", "position": "rope"}, "the family t5 supports relative or learned"),
        ({"family": "t5", "num_kv_heads": 4}, "needs as many as num_heads"),
        ({"family": "t5", "relative_buckets": 6}, "multiple of 4"),
        ({"family": "t5", "relative_max_distance": 32}, "must be above relative_buckets 32"),
        ({"relative_bias_layers": "all"}, "relative_bias_layers only works with the family t5, and family is gpt"),
        ({"family": "t5", "position": "learned", "relative_bias_layers": "all"}, "all and position learned"),
        ({"family": "t5", "pooler_activation": "relu"}, "pooler_activation only works with the family bert"),
        ({"family": "t5", "decoder_sequence_length": 0}, "decoder_sequence_length is 0"),
    ],
)
def test_settings_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        validate(replace(Config(), **fields))


@pytest.mark.parametrize("settings", [RELATIVE, MEGATRON, MEGATRON | {"tie_embeddings": False, "sequence_length": 32}])
def test_parameters_count_what_the_formula_says(settings):
    program = t5("1x1", **settings)
    counted = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_parameters))
    assert counted == parameters(anatomy_of(program.config.model))


def test_no_two_matrices_of_a_layer_begin_alike():
    """Cross-attention drew from the MLP's key once: parts of its matrices were copies of the MLP's, up to scale."""
    layer = program_of("1x1", family="t5").initialize(0).parameters["decoder"]["stack"]["layers"]
    flat = jax.tree_util.tree_leaves_with_path(layer)
    drawn = {jax.tree_util.keystr(path): np.ravel(leaf[0]) for path, leaf in flat if "weight" in str(path)}
    assert len(drawn) == 7
    for (one, a), (other, b) in itertools.combinations(drawn.items(), 2):
        size = min(len(a), len(b))
        assert abs(np.corrcoef(a[:size], b[:size])[0, 1]) < 0.3, (one, other)
