"""QK-clip: largest scores and scaled weights beside NumPy's in float64, on any mesh; what it does not go along with."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config.checks import validate
from mtjax.errors import UserError
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.sharding.axes import use_rules
from mtjax.train.qk_clip import METRIC
from mtjax.train.step import make_train_step
from tests.tiny import batch_of, host_batch, initial_state, mesh_of, program_of, run_steps, tiny_config

LONG = pytest.mark.long
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
STILL = {"warmup_steps": 1, "initial_learning_rate": 0.0, "num_layers": 1, "num_heads": 4, **PLAIN}
"""One layer, whose weights the first update leaves as they are."""
GROUPED = {"family": "llama", "num_kv_heads": 2}
LATENT = {"family": "llama", "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
TIMES = np.asarray([1.0, 40.0, 3.0, 12.0])
"""Of the queries of each head, so that scores of some are too large."""


def _times(state: Any, name: str) -> Any:
    """Multiplies the queries of each head."""

    def one(path: Any, a: Any) -> Any:
        here = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if name not in here or here[-1] not in ("weight", "bias"):
            return a
        factor = np.stack([TIMES, np.ones(4), np.ones(4)]) if name == "qkv" else TIMES
        return jax.device_put(np.asarray(a) * factor[..., None].astype(np.float32), a.sharding)

    return dataclasses.replace(state, parameters=jax.tree_util.tree_map_with_path(one, state.parameters))


def _rotated(a: np.ndarray, theta: float = 10000.0) -> np.ndarray:
    """Rotates pairs (i, i + width / 2) of [batch, seq, heads, width]."""
    half = a.shape[-1] // 2
    angle = np.arange(a.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = a[..., :half], a[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _rms(a: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return a / np.sqrt(np.square(a).mean(-1, keepdims=True) + epsilon) * scale


def largest_scores(config: Any, parameters: Any, tokens: np.ndarray) -> np.ndarray:
    """The largest score of each head of the first layer, in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters)
    layer = jax.tree.map(lambda a: a[0], p["stack"]["layers"])
    x, of, epsilon = p["embedding"][tokens], layer["attention"], config.model.norm_epsilon
    norm = layer["attention_norm"]
    if config.model.family == "gpt":
        x = x + p["positions"][: tokens.shape[1]]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        x = x * norm["scale"] + norm["bias"]
        query, key = np.moveaxis(np.einsum("bse,ethd->bsthd", x, of["qkv"]["weight"]) + of["qkv"]["bias"], 2, 0)[:2]
    elif config.model.kv_lora_rank:
        x = _rms(x, norm["scale"], epsilon)
        down, rank = x @ of["key_value_down"]["weight"], config.model.kv_lora_rank
        latent = _rms(down[..., :rank], of["key_value_norm"]["scale"], 1e-6)
        query, still = np.einsum("bse,ehd->bshd", x, of["query"]["weight"]), config.model.qk_nope_head_dim
        key = np.einsum("bsl,lhd->bshd", latent, of["key_value_up"]["weight"])[..., :still]
        turned = np.repeat(_rotated(down[..., None, rank:]), query.shape[2], 2)
        query = np.concatenate([query[..., :still], _rotated(query[..., still:])], -1)
        key = np.concatenate([key, turned], -1)
    else:
        x = _rms(x, norm["scale"], epsilon)
        query = _rotated(np.einsum("bse,ehd->bshd", x, of["qkv"]["query"]["weight"]))
        key = _rotated(np.einsum("bse,ehd->bshd", x, of["qkv"]["key_value"]["weight"][:, 0]))
        key = np.repeat(key, query.shape[2] // key.shape[2], 2)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    return np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf).max((0, 2, 3))


def scaled(config: Any, attention: Any, largest: np.ndarray) -> Any:
    """The weights of attention after QK-clip, by the formulas of arXiv 2507.20534 and Megatron-Core's for groups."""
    threshold, alpha = config.optimizer.qk_clip, config.optimizer.qk_clip_alpha
    after = jax.tree.map(lambda a: np.array(a, np.float64), attention)
    for head in range(len(largest)):
        group = largest[head // 2 * 2 :][:2] if config.model.num_kv_heads == 2 else largest[head : head + 1]
        factor = min(1.0, threshold / group.max())
        if config.model.kv_lora_rank:
            after["query"]["weight"][..., head, :10] *= factor**alpha
            after["query"]["weight"][..., head, 10:] *= factor
            after["key_value_up"]["weight"][..., head, :10] *= factor ** (1 - alpha)
        elif config.model.num_kv_heads == 2:
            after["qkv"]["query"]["weight"][..., head, :] *= factor**alpha
            if head % 2 == 0:
                after["qkv"]["key_value"]["weight"][..., 0, head // 2, :] *= factor ** (1 - alpha)
        else:
            for name in ("weight", "bias"):
                after["qkv"][name][..., 0, head, :] *= factor**alpha
                after["qkv"][name][..., 1, head, :] *= factor ** (1 - alpha)
    return after


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        pytest.param({"attention_bias": "all"}, "qkv", id="heads", marks=LONG),
        pytest.param({"qk_clip_alpha": 0.25, **GROUPED}, "query", id="groups"),
        pytest.param(LATENT, "query", id="latent attention", marks=LONG),
    ],
)
def test_weights_of_heads_with_too_large_scores_are_those_of_numpy(fields: dict[str, Any], name: str) -> None:
    program = make_train_step(tiny_config(qk_clip=0.3, optimizer="muon", **STILL, **fields), mesh_of("1x1"))
    state = _times(initial_state(program), name)
    tokens, before = host_batch(program.config, 0)["tokens"], jax.tree.map(np.asarray, state.parameters)
    largest = largest_scores(program.config, before, tokens)
    assert (largest > 0.3).any() and (largest < 0.3).any()
    state, metrics = program.step(state, batch_of(program, 0))
    assert float(metrics[METRIC]) == pytest.approx(largest.max(), rel=1e-5)
    found = jax.tree.map(np.asarray, state.parameters)["stack"]["layers"]["attention"]
    expected = scaled(program.config, before["stack"]["layers"]["attention"], largest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, expected)
    # With these weights, the largest score of the same batch is the threshold.
    _, metrics = program.step(state, batch_of(program, 0))
    assert float(metrics[METRIC]) == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param("2x2", {"zero": 3, "sequence_parallel": True, "microbatch_size": 2, **GROUPED}, id="zero 3"),
        pytest.param(
            "2x2",
            {"zero": 3, "sequence_parallel": True, "microbatch_size": 2, "attention": "blocks", **GROUPED},
            id="zero 3, in blocks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "2x1",
            {"zero": 2, "microbatch_size": 1, "recompute": "full", "attention": "blocks", "optimizer": "muon"},
            id="zero 2, in blocks",
            marks=LONG,
        ),
        pytest.param(
            "1x2x1",
            {"microbatch_size": 2, "attention": "blocks", "optimizer": "muon"},
            id="stages, in blocks",
            marks=LONG,
        ),
        pytest.param(
            "2x2",
            {"optimizer": "muon", "zero": 1, "attention": "blocks", **LATENT},
            id="latent attention, in blocks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("2x1", {"zero": 1, "optimizer": "muon"}, id="zero 1", marks=pytest.mark.exhaustive),
        pytest.param(
            "2x1",
            {"zero": 2, "microbatch_size": 1, "recompute": "full"},
            id="zero 2",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("2x2", {"unroll_layers": True, "optimizer": "muon"}, id="unrolled", marks=LONG),
        pytest.param("1x2x1", {"microbatch_size": 2, "optimizer": "muon"}, id="stages", marks=pytest.mark.exhaustive),
        pytest.param("1x4", {"optimizer": "muon", **GROUPED}, id="shared key heads", marks=pytest.mark.exhaustive),
        pytest.param("2x2", {"optimizer": "muon", "zero": 1, **LATENT}, id="latent attention", marks=LONG),
        pytest.param("2x2", {"fp8": "delayed", "zero": 1, "optimizer": "muon"}, id="FP8", marks=LONG),
        pytest.param(
            "2x1",
            {"compute_dtype": "bfloat16", "master_dtype": "bfloat16", "zero": 1},
            id="16 bits",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_scores_and_weights_do_not_depend_on_the_mesh(mesh: str, fields: dict[str, Any]) -> None:
    own = ("zero", "sequence_parallel", "microbatch_size", "recompute", "unroll_layers", "attention")
    alone = {name: value for name, value in fields.items() if name not in own}
    results = []
    for where, settings in (("1x1", alone), (mesh, fields)):
        program = program_of(where, qk_clip=0.02, **PLAIN, **settings)
        state, metrics = run_steps(program, 3)
        results.append((metrics, jax.tree.map(np.asarray, state.parameters)))
    (expected, weights), (found, others) = results
    assert min(one[METRIC] for one in expected) > 0.02
    if "compute_dtype" in fields:  # updates in another order round to other numbers: the first step's alone are equal
        assert [one[METRIC] for one in found][:1] == pytest.approx([one[METRIC] for one in expected][:1], rel=1e-2)
        return
    for name in (METRIC, "loss"):
        assert [one[name] for one in found] == pytest.approx([one[name] for one in expected], rel=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), others, weights)


def test_the_scale_of_float16s_loss_is_not_that_of_scores() -> None:
    (state, half), (_, whole) = (
        run_steps(program_of("1x1", qk_clip=0.02, compute_dtype=dtype, **PLAIN), 1) for dtype in ("float16", "float32")
    )
    assert float(np.asarray(state.loss_scale.scale)) > 1e3
    assert half[0][METRIC] == pytest.approx(whole[0][METRIC], rel=1e-2)


def test_hidden_states_on_stages_observe_nothing() -> None:
    """As finetuning evaluates them."""
    program = program_of("1x2x1", qk_clip=0.02, microbatch_size=2, **PLAIN)
    state = initial_state(program)

    def run(parameters: Any, batch: Any) -> Any:
        with use_rules(program.layout.rules):
            return final_hidden_states(program, parameters, batch)

    found = program.on_mesh(lambda *given: jax.eval_shape(run, *given), state.parameters, batch_of(program, 0))
    assert found.shape[-1] == program.config.model.hidden_size


def test_a_model_without_a_step_observes_nothing() -> None:
    program = program_of("1x1", qk_clip=0.02, **PLAIN)
    state = initial_state(program)
    tokens = batch_of(program, 0)
    (loss, _), *_ = program.evaluation(state.parameters, tokens).values()
    plain = program_of("1x1", **PLAIN)
    (expected, _), *_ = plain.evaluation(state.parameters, tokens).values()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    attention: Any = program.on_mesh(program.model, state.parameters).decoder_stacks[0].layers.attention
    assert attention.largest_scores is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"qk_clip": 0.0, "qk_clip_alpha": 0.4}, "qk_clip_alpha is 0.4, and qk_clip is 0: add --qk-clip 100"),
        ({"family": "bert"}, "qk_clip 100 does not support the family bert"),
        ({"attention": "cudnn"}, "does not support attention cudnn, which does not keep the largest scores"),
        ({"qk_norm": True}, "does not support qk_norm, which normalizes"),
        ({"qkv_clip": 8.0}, "does not support qkv_clip 8.0, which clips"),
        ({"lora_rank": 4}, "does not support LoRA, which freezes query and key weights, and lora_rank is 4"),
        ({"mtp_num_layers": 1}, "does not support multi-token prediction, and mtp_num_layers is 1"),
        ({"optimizer": "schedule-free", "decay_style": "constant"}, "does not support optimizer schedule-free"),
        ({"offload": "optimizer"}, "does not support offload optimizer"),
    ],
)
def test_what_does_not_go_along_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate(tiny_config(**{"qk_clip": 100.0, **fields}))


def test_context_parallelism_is_refused_as_no_rank_has_all_scores() -> None:
    config = tiny_config(qk_clip=100.0, mesh="data=1,context=2", position="rope", sequence_length=32)
    with pytest.raises(UserError, match="qk_clip needs all scores of a sample, and mesh .* divides"):
        make_train_step(config, mesh_of("data=1,context=2"))
