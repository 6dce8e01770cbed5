"""Hybrid models: their patterns, the same numbers on every mesh, and documents that are packed beside each alone."""

import dataclasses
import math
from functools import cache, partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.config import Config, replace, validate
from mtjax.config.layer_pattern import (
    common_pattern,
    expanded,
    joined_loops,
    loops_of_pattern,
    runs_of,
    shortened_pattern,
)
from mtjax.config.ssm import ssm_groups
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.convert.parameters import parameters_of
from mtjax.layout.stages import PADDING, layer_order, order_of
from mtjax.models.language_model import HiddenStates
from mtjax.sharding.axes import use_rules
from mtjax.train.step import TrainStep, make_train_step
from tests.parity.compare import assert_same_gradients, relative
from tests.same_numbers import by_name
from tests.tiny import batch_of, final_hidden, mesh_of, model_logits, tiny_config

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mlp_size": 40,
    "ssm_heads": 4,
    "ssm_head_dim": 12,
    "ssm_state": 10,
    "ssm_groups": 2,
    "ssm_chunk": 5,
    "ssm_conv": 3,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "expert_size": 20,
    "shared_expert_size": 28,
    "router_score": "sigmoid",
    "router_bias": True,
    "router_scale": 1.5,
}
SPLIT = {"sequence_parallel": True}
FACTORS: dict[str, Any] = {
    "ssm_norm": False,
    "ssm_scales": (0.9, 1.5, 0.7, 1.2, 0.8),
    "ssm_output_scale": 0.7,
    "attention_output_scale": 0.9,
    "activation": "swiglu",
    "mlp_gate_scale": 0.8,
    "mlp_output_scale": 0.6,
}
"""Those of Falcon-H1."""
SHARED: dict[str, Any] = {
    "head_dim": 12,
    "num_kv_heads": 4,
    "activation": "geglu_exact",
    "position": "rope",
    "tie_embeddings": True,
    "attention_scale": 6**-0.5,
    "block_rank": 3,
    "block_attention_adapters": True,
}
"""Those of Zamba2."""
ONE_KEY_HEAD: dict[str, Any] = {"num_kv_heads": 1, "block_attention_adapters": False, "position": "none"}


GATED = {"attention_output_gate": True}
QWEN3_NEXT: dict[str, Any] = {
    **GATED,
    "norm_weight": "offset",
    "qk_norm": True,
    "position": "rope",
    "head_dim": 8,
    "rope_fraction": 0.5,
    "activation": "swiglu",
    "num_experts": 5,
    "experts_top_k": 3,
    "expert_size": 20,
    "shared_expert_size": 28,
    "shared_expert_gate": True,
    "router_aux_loss": 0.0,
}


def hybrid_config(pattern: str, **fields: Any) -> Config:
    """A tiny model of a pattern, with odd sizes: chunks of 5 of 16 tokens, 10 states, heads of 12."""
    width = {"ssm_head_dim": 6} if fields.get("ssm_heads") == 8 else {}
    settings = SIZES | width | {"num_layers": len(expanded(pattern))} | fields
    return tiny_config(family="hybrid", layer_pattern=pattern, **settings)


@given(st.text("MG*-E", min_size=1, max_size=24))
def test_loops_run_the_layers_of_the_pattern(letters: str) -> None:
    assert "".join(run.unit * run.times for run in runs_of(letters)) == letters
    assert expanded(shortened_pattern(letters)) == letters
    assert sum(len(run.unit) for run in runs_of(letters * 2)) <= len(letters)
    assert "".join(run.unit * run.times for run in loops_of_pattern(letters)) == letters


def is_within(letters: str, pattern: str) -> bool:
    """Whether the letters are what is left of a pattern of which some are left out."""
    rest = iter(pattern)
    return all(letter in rest for letter in letters)


@given(st.lists(st.text("M*-", min_size=1, max_size=7), min_size=1, max_size=4))
def test_the_pattern_of_a_chunk_has_the_layers_of_every_stage(chunks: list[str]) -> None:
    common = common_pattern(tuple(chunks))
    assert all(is_within(chunk, common) for chunk in chunks)
    assert common_pattern((common, common)) == common
    first, second = chunks[0], chunks[-1]
    kept = ("".join(letters) for n in range(len(first) + 1) for letters in combinations(first, n))
    longest = max(len(letters) for letters in kept if is_within(letters, second))
    assert len(common_pattern((first, second))) == len(first) + len(second) - longest


@pytest.mark.parametrize(
    ("pattern", "per_stage", "slots", "numbers"),
    [
        ("TTTXX", (2, 3), "TTXX", {"T": ((0, 1), (2, -1)), "X": ((-1, -1), (3, 4))}),
        ("TXTXTX", (2, 4), "TXTX", {"T": ((0, -1), (2, 4)), "X": ((1, -1), (3, 5))}),
        ("M-M*-M", (3, 3), "M*-M", {"M": ((0, 2), (-1, 5)), "*": ((-1,), (3,)), "-": ((1,), (4,))}),
    ],
)
def test_stages_with_other_layers_leave_slots_empty(
    pattern: str, per_stage: tuple[int, ...], slots: str, numbers: dict[str, Any]
) -> None:
    order = layer_order(len(pattern), 2, 1, per_stage)
    assert order.chunk_pattern(pattern) == slots
    for letter, expected in numbers.items():
        assert tuple(stage[0] for stage in order.of(letter, pattern).numbers) == expected


def test_groups_divide_the_heads_where_none_were_given() -> None:
    for hidden, groups in ((96, 1), (128, 4), (4096, 8)):
        config = replace(Config(), family="hybrid", layer_pattern="M", hidden_size=hidden)
        validate(config)
        assert ssm_groups(config.model) == groups


def test_nemotron_h_leaves_few_layers_to_compile() -> None:
    letters = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
    assert shortened_pattern(letters) == "(M-M-M-M*-M-)x4(M-)x4"
    assert expanded("(M-M*-)x2E") == "M-M*-M-M*-E"


@pytest.mark.parametrize("pattern", ["(M-M*-)x4", "*(M-)x5E", "(M)x5Z(M)x5z", "(M-M-M-M*-M-)x4(M-)x4", "M*E", "(-M)x3"])
def test_loops_hand_on_what_they_gather(pattern: str) -> None:
    """A loop of several iterations gathers a layer of its first letter at its end, and, backward, of its last."""
    letters = expanded(pattern)
    loops = joined_loops(letters)
    assert "".join(unit * times for unit, times in loops) == letters
    for number, (unit, times) in enumerate(loops):
        if times > 1:
            assert loops[number + 1].unit[0] == unit[0]
            assert (loops[number - 1].unit[-1] if number else letters[-1]) == unit[-1]


def gradients(config: Config, mesh: str) -> tuple[float, Any]:
    """Loss and gradients of the first batch, stacks in the order of their layers."""
    program = make_train_step(config, mesh_of(mesh))
    parameters, batch = (
        jax.tree_util.tree_map_with_path(partial(_shaken, program), program.initialize(0).parameters),
        batch_of(program, 0),
    )
    with jax.set_mesh(program.mesh):
        loss, _, found = jax.jit(lambda p, b: program.gradients(p, b, None))(parameters, batch)
    return float(loss), by_name(program, found)


def _shaken(program: TrainStep, path: Any, leaf: Any) -> Any:
    """Adapters that add something, which are 0 at first: other numbers in each layer, the same wherever it runs."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if ".lora." not in name and "_adapter." not in name:
        return leaf
    is_stacked, order = ".layers." in name, order_of(name, program.layer_orders)
    rows, shape = (order.flat if order else range(len(leaf)), leaf.shape[1:]) if is_stacked else ([0], leaf.shape)
    numbers = np.zeros((len(rows), *shape), np.float32)
    for row, number in enumerate(rows):
        if number != PADDING:
            seed = (len(name) + math.prod(shape), number)
            numbers[row] = 0.05 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(numbers.reshape(leaf.shape), leaf.sharding)


@cache
def on_one_device(config: Config) -> tuple[float, Any]:
    return gradients(config, "1x1")


def test_layers_run_in_the_order_of_the_pattern() -> None:
    """Beside one layer after the other, each taken from its stack by hand."""
    program = make_train_step(hybrid_config("(MM-)x2*"), mesh_of("1x1"))
    parameters, batch = program.initialize(0).parameters, batch_of(program, 0)
    places = [*(("mamba", 0), ("mamba", 1), ("mlp", 0), ("mamba", 2), ("mamba", 3), ("mlp", 1)), ("attention", 0)]

    @jax.jit
    def run(parameters: Any, tokens: Any) -> tuple[Any, Any]:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            section = model.sections["mamba"]
            x = section.embed({"tokens": tokens}, None, None).x
            context = section.context({"tokens": tokens}, None, HiddenStates(x))
            for number, (stack, index) in enumerate(places):
                layer = jax.tree.map(lambda a, index=index: a[index], getattr(model, stack).layers)
                x, _ = layer(x, dataclasses.replace(context, layer=number), None)
            return final_hidden(model, tokens), model.final_norm(x)

    with jax.set_mesh(program.mesh):
        found, expected = run(parameters, batch["tokens"])
    assert relative(found, expected) < 1e-6


STAGES = {"microbatch_size": 2}
INTERLEAVED = {**STAGES, "pipeline_schedule": "interleaved", "chunks": 2}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
CHUNKS = {"sequence_length": 40, "ssm_chunk": 3}
"""With which pieces of samples, on two or four context parallel ranks, are several chunks, the last with padding."""
long = partial(pytest.param, marks=pytest.mark.long)
rare = partial(pytest.param, marks=pytest.mark.exhaustive)
"""Of what has each of its settings in another case: make test-layouts."""


@pytest.mark.parametrize(
    ("pattern", "mesh", "model", "fields"),
    [
        (
            "G*",
            "data=1,context=2,model=2",
            {**GATED, **DOCUMENTS, "ssm_chunk": 3},
            {**SPLIT, "zero": 1, "recompute": "full"},
        ),
        rare("G*", "2x2", GATED, {**SPLIT, "zero": 1, "recompute": "full"}),
        long("G-G*", "data=1,context=4,model=1", {**GATED, **DOCUMENTS, **CHUNKS}, {"zero": 3}),
        rare("GE*E", "data=1,context=2,expert=2,model=2", {**GATED, **EXPERTS, **CHUNKS}, {**SPLIT, "zero": 1}),
        rare("H-M", "2x2", FACTORS, {**SPLIT, "zero": 1, "recompute": "full"}),
        rare("Z", "2x2", SHARED, {**SPLIT, "zero": 1, "recompute": "full"}),
        rare("M-M*", "2x2", {}, {"zero": 3, "microbatch_size": 2}),
        rare("G-G*", "2x2", GATED, {"zero": 3, "microbatch_size": 2}),
        rare("GE*", "data=1,expert=2,model=2", {**GATED, **EXPERTS}, {**SPLIT, "zero": 1}),
        rare("G*-", "2x2", {**GATED, "lora_rank": 3}, {**SPLIT, "recompute": "full"}),
        long("G-", "1x4", {"lora_rank": 3, "ssm_groups": 1, "ssm_heads": 8}, {"zero": 1}),
        rare("MZz", "2x2", {**SHARED, "lora_rank": 2}, {**SPLIT, "zero": 1, "recompute": "full"}),
        rare("ZM", "1x4", {**SHARED, **ONE_KEY_HEAD, "lora_rank": 2}, {"zero": 3}),
        rare("(G*)x2", "2x2x2", GATED, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
        rare("(MZ)x2", "2x2", SHARED, {"zero": 3, "microbatch_size": 2, "recompute": "selective"}),
        rare("(MZ)x2", "2x2x2", SHARED, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
        rare("(MZ)x2", "2x2x2", SHARED, {**STAGES, **SPLIT, "zero": 3, "recompute": "full"}),
        long("(MZ)x2", "2x2x2", {**SHARED, "lora_rank": 2}, {**STAGES, **SPLIT, "zero": 3, "recompute": "full"}),
        rare("(MZ)x2", "2x2x1", {**SHARED, "lora_rank": 2}, {**STAGES, "zero": 3}),
        rare("(MZ)x2", "1x2x1", {**SHARED, "lora_rank": 2}, {**STAGES, "zero": 1}),
        rare(
            "(MZ)x2",
            "2x2x2",
            {**SHARED, "lora_rank": 2, "lora_targets": "mixers"},
            {**STAGES, **SPLIT, "zero": 1, "recompute": "full"},
        ),
        long("ZMZ", "data=1,context=2,model=2", {**SHARED, **DOCUMENTS}, {**SPLIT, "recompute": "full"}),
        long("(H-)x2", "2x1x2", FACTORS, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
        rare("H-", "data=1,context=2,model=2", FACTORS, {"recompute": "selective", "zero": 3}),
        long("MH-", "2x2", {"lora_rank": 3}, {**SPLIT, "recompute": "full"}),
        rare("ME", "data=1,expert=2,model=2", {**EXPERTS, "lora_rank": 2, "router_bias": False}, {"zero": 1}),
        long("M-*", "1x4", {"ssm_groups": 1, "ssm_heads": 8}, SPLIT),
        long("M-M*", "1x1", {}, {"ssm_chunk": 2}),
        rare("ME*E", "data=2,expert=2,model=2", EXPERTS, {**SPLIT, "zero": 1}),
        rare("M-M*", "data=1,context=2,model=2", DOCUMENTS, {**SPLIT, "recompute": "full", "zero": 1}),
        rare("M-M*-M", "1x2x2", {}, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
        rare("MM*-M-*M", "2x2x1", {}, {**INTERLEAVED, "zero": 1, "recompute": "full"}),
        long("*-E*-E*-", "1x2x1", EXPERTS, INTERLEAVED),
        rare("MZMz", "1x2x1", SHARED, STAGES),
        long("MZzM", "1x2x1", SHARED, INTERLEAVED),
        long("M*-M", "data=1,stage=2,context=2,model=1", {}, {**STAGES, "context_method": "all-gather"}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("GM", "data=1,context=2,model=4", {"ssm_groups": 4, **CHUNKS}, {"microbatch_size": 1}),
                ("GM*", "data=2,context=4,model=1", {**DOCUMENTS, **CHUNKS}, {"recompute": "selective", "zero": 3}),
                ("G-", "data=2,context=2,model=2", CHUNKS, {**SPLIT, "zero": 2, "microbatch_size": 2}),
                ("G*-", "data=1,context=2,model=2", {**GATED, "lora_rank": 3}, {**SPLIT, "recompute": "full"}),
                (
                    "(G*)x2",
                    "data=1,stage=2,context=2,model=2",
                    {**GATED, **DOCUMENTS, **CHUNKS},
                    {**STAGES, **SPLIT, "zero": 1, "recompute": "full"},
                ),
                ("G*-G", "data=1,stage=2,context=2,model=1", {}, {**STAGES, "context_method": "all-gather"}),
                ("M-M*M-", "1x2", {}, {"recompute": "selective"}),
                ("M-M*", "2x2", {}, {**SPLIT, "zero": 1, "recompute": "full"}),
                ("MMMMM*", "2x2", {}, {"zero": 3, "microbatch_size": 2}),
                ("G*", "1x4", {**GATED, "ssm_groups": 1, "ssm_heads": 8}, SPLIT),
                ("MZz", "2x2", SHARED, {**SPLIT, "zero": 1, "recompute": "full"}),
                ("(MZ)x2", "1x2x1", SHARED, {**STAGES, "zero": 1}),
                ("(MZz)x2", "2x2x1", SHARED, {**STAGES, "zero": 2}),
                ("ZMz", "1x4", {**SHARED, **ONE_KEY_HEAD}, {"zero": 1}),
                ("MH-", "1x4", {"lora_rank": 3, "ssm_groups": 1, "ssm_heads": 8, "num_kv_heads": 4}, {"zero": 1}),
                ("H-", "1x4", {"ssm_groups": 1, "ssm_heads": 8}, SPLIT),
                ("(M*)x2", "2x2x2", {}, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
                ("(M-)x2", "1x2x1", {"ssm_groups": 1, "ssm_heads": 8}, STAGES),
                ("MEM*ME", "data=2,expert=2,model=2", EXPERTS, {**SPLIT, "zero": 1}),
                ("(M-M*)x2", "2x2x2", {}, {**STAGES, **SPLIT, "zero": 1, "recompute": "full"}),
                ("M-M*", "data=1,context=4,model=1", {}, {"zero": 3}),
                ("(M-M*)x4", "1x2x1", {}, INTERLEAVED),
                ("(ME)x2", "1x2x1", EXPERTS, STAGES),
                ("EM*E-", "2x2x1", EXPERTS, {**STAGES, "layers_per_stage": (2, 3), "zero": 3, "recompute": "none"}),
            )
        ),
    ],
)
def test_every_mesh_computes_the_same(pattern: str, mesh: str, model: dict[str, Any], fields: dict[str, Any]) -> None:
    loss, expected = on_one_device(hybrid_config(pattern, **model))
    own, found = gradients(hybrid_config(pattern, **model, **fields), mesh)
    assert abs(own / loss - 1) < 1e-6
    assert_same_gradients(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("pattern", "chunk"),
    [("M*M", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in (("G*G", 3), ("M*M", 16), ("G*G", 16)))],
)
def test_documents_that_are_packed_are_as_if_each_were_alone(pattern: str, chunk: int) -> None:
    program = make_train_step(hybrid_config(pattern, ssm_chunk=chunk, **DOCUMENTS), mesh_of("1x1"))
    parameters, batch = program.initialize(0).parameters, batch_of(program, 0)

    @jax.jit
    def run(parameters: Any, tokens: Any, segments: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, final_hidden(model, tokens, None, segments))

    tokens, segments = np.asarray(batch["tokens"]), np.asarray(batch["segment_ids"])
    places = [(row, segments[row] == number) for row in range(len(tokens)) for number in np.unique(segments[row])]
    alone = np.zeros((-(-len(places) // 8) * 8, tokens.shape[1]), np.int32)
    for line, (row, own) in zip(alone, places, strict=False):
        line[: own.sum()] = tokens[row, own]
    put = partial(jax.device_put, device=program.batch_sharding)
    with jax.set_mesh(program.mesh):
        packed = np.asarray(run(parameters, batch["tokens"], batch["segment_ids"]))
        each = np.concatenate(
            [run(parameters, put(p), put(np.zeros_like(p))) for p in np.split(alone, len(alone) // 8)]
        )
    expected = np.zeros_like(packed)
    for line, (row, own) in zip(each, places, strict=False):
        expected[row, own] = line[: own.sum()]
    assert relative(packed, expected) < 1e-5
    assert len(places) > 16


def _logits(config: Config, of: Any) -> np.ndarray:
    """Logits of the first batch with parameters that `of` makes of the initial ones, by path."""
    program = make_train_step(config, mesh_of("1x1"))
    parameters = jax.tree_util.tree_map_with_path(of, program.initialize(0).parameters)

    def run(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, final_hidden(model, tokens))

    with jax.set_mesh(program.mesh):
        return np.asarray(jax.jit(run)(parameters, batch_of(program, 0)["tokens"]))


@pytest.mark.long
def test_merged_adapters_are_the_same_model() -> None:
    """By what reads the checkpoints of finetuning."""
    config, seen = hybrid_config("MG*", **GATED, lora_rank=3), {}
    program = make_train_step(config, mesh_of("1x1"))

    def shaken(path: Any, leaf: Any) -> Any:
        seen[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf = _shaken(program, path, leaf)
        return leaf

    def merged(path: Any, leaf: Any) -> Any:
        of = plain[jax.tree_util.keystr(path, simple=True, separator=".")]
        return jax.device_put(np.stack(list(MtjaxSource.slices(folder, of))).reshape(leaf.shape), leaf.sharding)

    adapted = _logits(config, shaken)
    plain = parameters_of(hybrid_config("MG*", **GATED))
    folder: Any = SimpleNamespace(
        adapters={name: of for name, of in parameters_of(config).items() if name not in plain},
        saved=lambda of: iter([seen[of.name]] if of.num_layers is None else np.asarray(seen[of.name])),
        weights=SimpleNamespace(config=config),
        _count_not_finite=lambda *_: None,
    )
    assert relative(_logits(hybrid_config("MG*", **GATED), merged), adapted) < 1e-5
