"""BERT: its size, what a token sees, and the same numbers on every mesh."""

import jax
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.config import Config, replace, validate
from mtjax.errors import UserError
from mtjax.layout.attention_kernel import choose_kernel
from mtjax.sharding.axes import use_rules
from tests.same_numbers import assert_same
from tests.tiny import batch_of, initial_state, program_of, run_steps, tiny_config

POST = {"norm_placement": "post", "norm_epsilon": 1e-12}


def bert(mesh, **fields):
    return program_of(mesh, family="bert", **fields)


def parameters_of(**fields):
    """As the model has them, and as the formula counts them."""
    program = bert("1x1", **fields)
    counted = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_parameters))
    assert counted == parameters(anatomy_of(program.config.model))
    return counted


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_parameters_count_what_megatron_counts(placement):
    """Layers 3,768, two tables 2,400, positions 48, norm 24; masked-LM head 280, pooler 156, classifier 26."""
    small = {"num_layers": 2, "hidden_size": 12, "num_heads": 4, "vocab_size": 100, "vocab_multiple": 1}
    small |= {"sequence_length": 4, "num_token_types": 0, "tie_embeddings": False, "norm_placement": placement}
    assert parameters_of(**small) == 6702
    assert parameters_of(**small | {"sentence_order": False}) == 6702 - 156 - 26
    assert parameters_of(**small | {"num_token_types": 2}) == 6702 + 24
    assert parameters_of(**small | {"tie_embeddings": True}) == 6702 - 1200


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("2x4", {}, id="2x4-pre-LN", marks=pytest.mark.exhaustive),
        pytest.param("1x8", POST, id="1x8-post-LN", marks=pytest.mark.long),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.exhaustive)
            for name, case in {
                "8x1-pre-LN": ("8x1", {}),
                "1x8-pre-LN": ("1x8", {}),
                "8x1-post-LN": ("8x1", POST),
                "2x4-post-LN": ("2x4", POST),
            }.items()
        ),
    ],
)
def test_losses_with_dropout_agree_on_every_mesh(mesh, settings):
    state, found = run_steps(bert(mesh, recompute="full", microbatch_size=1, **settings), 3)
    expected_state, expected = run_steps(bert("1x1", **settings), 3)
    for name in ("loss", "masked_lm", "sentence_order", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5, err_msg=name)
    assert len({m["loss"] for m in expected}) == 3
    assert_same(bert(mesh, recompute="full", microbatch_size=1, **settings), bert("1x1", **settings))
    for here, there in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(expected_state.parameters), strict=True):
        assert np.abs(np.asarray(here) - np.asarray(there)).mean() < 1e-5


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("2x2", {}, marks=pytest.mark.long),
        pytest.param(
            "data=1,stage=2,model=2", {"microbatch_size": 1, "recompute": "full"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_without_the_order_the_loss_is_that_of_the_masked_tokens(mesh, settings):
    plain = {"sentence_order": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    program = bert(mesh, **plain, **settings)
    assert set(program.batch_names) == {n for n in bert("1x1").batch_names if n != "sentence_order"}
    _, found = run_steps(program, 2)
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    sums = program.evaluation(parameters, batch)
    assert set(sums) == {"masked_lm"} and float(sums["masked_lm"][1]) == np.asarray(batch["loss_mask"]).sum()
    np.testing.assert_allclose(found[0]["loss"], sums["masked_lm"][0] / sums["masked_lm"][1], rtol=1e-6)
    _, known = run_steps(bert("1x1", **plain), 2)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in known], rtol=1e-5)


def test_the_loss_is_the_sum_of_two_means():
    program = bert("2x4")
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    sums = program.evaluation(parameters, batch)
    assert float(sums["masked_lm"][1]) == np.asarray(batch["loss_mask"]).sum()
    assert float(sums["sentence_order"][1]) == 8
    off = bert("2x4", hidden_dropout=0.0, attention_dropout=0.0)
    metrics = off.step(initial_state(off), batch)[1]
    for name, (total, count) in sums.items():
        np.testing.assert_allclose(metrics[name], total / count, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], metrics["masked_lm"] + metrics["sentence_order"], rtol=1e-6)
    assert float(metrics["tokens"]) == np.asarray(batch["padding_mask"]).sum()


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
    found, expected = (run_steps(bert(mesh, **more), 3)[1] for mesh, more in (("2x4", layout), ("1x1", {})))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5, err_msg=name)


def hidden_of(program, parameters, batch):
    def run(parameters, batch):
        with use_rules(program.layout.rules):
            return program.model(parameters)(batch["tokens"], batch["token_types"], batch["padding_mask"])

    with jax.set_mesh(program.mesh):
        return np.asarray(jax.jit(run)(parameters, batch))


def test_a_token_sees_both_sides_but_no_padding():
    program = bert("2x4")
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    mask = np.asarray(batch["padding_mask"]).astype(bool)
    before = hidden_of(program, parameters, batch)

    def after(change):
        tokens = np.where(change, 7, np.asarray(batch["tokens"])).astype(np.int32)
        return hidden_of(program, parameters, batch | {"tokens": jax.device_put(tokens, batch["tokens"].sharding)})

    np.testing.assert_array_equal(after(~mask)[mask], before[mask])
    middle = np.zeros_like(mask)
    middle[:, 3] = np.asarray(batch["tokens"])[:, 3] != 7
    assert (after(middle) != before)[mask & middle.any(1, keepdims=True)].any(-1).all()


def test_masked_positions_alone_count():
    program = bert("2x4", hidden_dropout=0.0, attention_dropout=0.0)
    batch = batch_of(program, 0)
    labels = np.where(np.asarray(batch["loss_mask"]) > 0, np.asarray(batch["labels"]), 3).astype(np.int32)
    other = batch | {"labels": jax.device_put(labels, batch["labels"].sharding)}
    first, second = (program.step(initial_state(program), b)[1] for b in (batch, other))
    assert float(first["loss"]) == float(second["loss"])


def test_a_masked_token_too_many_has_no_number():
    """Samples have no more than they may; if they had, the loss would not pass over them in silence."""
    program = bert("2x4")
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    place = batch["loss_mask"].sharding
    for masked, finite in ((2, True), (3, False)):
        mask = np.zeros((8, 16), np.float32)
        mask[:, 1 : 1 + masked] = 1
        total, count = program.evaluation(parameters, batch | {"loss_mask": jax.device_put(mask, place)})["masked_lm"]
        assert np.isfinite(float(total)) == finite and float(count) == 8 * masked


def test_it_learns_one_batch():
    program = bert("2x4", hidden_dropout=0.0, attention_dropout=0.0)
    state, losses = initial_state(program), []
    for _ in range(20):
        state, metrics = program.step(state, batch_of(program, 0))
        losses.append([float(metrics["masked_lm"]), float(metrics["sentence_order"])])
    assert losses[-1][0] < losses[0][0] - 1.0 and losses[-1][1] < losses[0][1] - 0.1


def test_flash_attention_is_refused_with_its_reason():
    fields = {"hidden_size": 64, "attention": "cudnn", "attention_dropout": 0.0, "compute_dtype": "bfloat16"}
    kernel, why = choose_kernel(tiny_config(family="bert", **fields), "gpu")
    assert kernel == "xla" and why is not None and "padding" in why


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "bert", "position": "alibi"}, "position is 'alibi', and the family bert supports learned or rope"),
        ({"norm_placement": "before"}, "norm_placement is 'before'"),
        ({"family": "bert", "num_token_types": -1}, "num_token_types is -1"),
        ({"family": "bert", "norm_placement": "post", "embedding_norm": True}, "norm on the embeddings already"),
        ({"norm_placement": "output", "first_attention_norm": False}, "needs norm_placement pre"),
        ({"first_attention_norm": False, "parallel_residual": "one_norm"}, "they are pre and one_norm"),
        ({"head_bias": False}, "head_bias only works with the family bert"),
    ],
)
def test_settings_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        validate(replace(Config(), **fields))
