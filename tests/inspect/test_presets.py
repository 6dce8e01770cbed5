"""Presets keep their contracts on their own meshes: with every ZeRO stage, sequences whole and split, and one sample a
microbatch as well as several.

Counts of collectives follow from a preset's structure, not from its size: programs are made of two narrow layers.
"""

import itertools
from collections.abc import Iterator
from functools import cache

import pytest

from mtjax import config
from mtjax.config import Config
from mtjax.config.sizes import num_kv_heads
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.layout.mesh import parse_mesh
from tests.inspect.steps import has_cudnn, needs_aot, tiny

load = cache(config.load)
"""Each preset is read once, not in each of the questions that collecting these tests asks."""
PRESETS = sorted(path.stem for path in config.shipped_folder().glob("*.toml"))
REPRESENTATIVES = (
    "gpt2-8.3b",
    "gpt2-355m",
    "default",
    "llama2-7b",
    "llama3-8b",
    "llama-tiny",
    "mixtral-8x7b",
    "dots1-142b",
    "bert-3.9b",
    "bert-336m",
    "bert-base",
    "t5-11b",
    "t5-base",
    "t5-1.1-base",
    "t5-220m",
    "mistral-7b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "gemma2-9b",
    "gemma3-4b",
    "olmo2-7b",
    "pythia-6.9b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "phi4-14b",
    "granite3-8b",
    "glm4-9b",
    "falcon-7b",
    "command-r-35b",
)
"""One preset of each structure."""


def structure(name: str) -> tuple[object, ...]:
    """What makes the programs of two presets differ in more than sizes."""
    preset = load(name)
    model, training = preset.model, preset.training
    ways, groups = parse_mesh(preset.parallel.mesh).model, num_kv_heads(model)
    layer = (model.norm, model.norm_placement, model.position, model.activation, model.bias, model.tie_embeddings)
    layer += (model.norm_weight, model.parallel_residual, model.attention_bias, model.qk_norm and model.qk_norm_scope)
    layer += (model.attention_window is None, model.attention_sinks, model.kv_lora_rank > 0, model.q_lora_rank > 0)
    heads = (groups == model.num_heads, groups % ways == 0)
    experts = (model.num_experts > 0, model.first_dense_layers > 0)
    return model.family, layer, heads, experts, ways > 1, training.recompute, training.compute_dtype


def narrow(name: str, *, zero: int, split: bool, one_sample: bool) -> Config:
    """A preset with its mesh and its heads, but two layers, heads of 8, and short sequences."""
    preset = load(name)
    heads, several = preset.model.num_heads, preset.training.microbatch_size or 1
    decoder = {"decoder_sequence_length": 64} if preset.model.family == "t5" else {}
    heads_of = {"head_dim": 8} if not preset.model.kv_lora_rank else {}
    return config.replace(
        preset,
        num_layers=2,
        first_dense_layers=min(preset.model.first_dense_layers, 1),
        hidden_size=8 * heads,
        mlp_size=24 * heads,
        sequence_length=128,
        vocab_size=2000,
        attention="auto" if has_cudnn else "xla",
        zero=zero,
        sequence_parallel=split,
        microbatch_size=1 if one_sample else max(2, several),
        **decoder,
        **heads_of,
    )


def fits(name: str, split: bool) -> bool:
    """Whether a preset's mesh has model ways to split sequences over, if they are to be split."""
    return not split or parse_mesh(load(name).parallel.mesh).model > 1


def covering() -> Iterator[tuple[str, int, bool, bool]]:
    """(name, ZeRO, split, one sample): every two of family, ZeRO, split and one sample meet, as far as meshes allow.

    BERT and T5, which take longest to compile, are in tests/inspect/test_family_contracts.py; here they have one
    sample, with ZeRO 0 or 3.
    """
    for place, family in enumerate(FAMILIES):
        names = [name for name in REPRESENTATIVES if load(name).model.family == family]
        for zero in range(4):
            split, one_sample = (place + zero) % 2 == 1, (place + zero // 2) % 2 == 1
            able = [name for name in names if fits(name, split)]
            if family not in ("bert", "t5") or (one_sample and zero in (0, 3)):
                yield able[zero % len(able)], zero, split, one_sample


LAYOUTS = list(itertools.product(range(4), (False, True), (False, True)))
FAMILIES = dict.fromkeys(load(name).model.family for name in REPRESENTATIVES)
COVERING = list(covering())
PRODUCT = [(name, *case) for name in REPRESENTATIVES for case in LAYOUTS if fits(name, case[1])]
IN_CI = [case for case in COVERING if load(case[0]).model.family == "llama" and case[1] % 2]
"""ZeRO-1 with shared key heads, and ZeRO-3 with experts. test_contract.py has GPT, test_stacks.py and
test_stage_contract.py ZeRO-2, and test_family_contracts.py ModernBERT and T5; `make test-layouts` compiles the others.
"""
CASES = [pytest.param(*case, marks=pytest.mark.long) for case in IN_CI] + [
    pytest.param(*case, marks=pytest.mark.exhaustive) for case in PRODUCT if case not in IN_CI
]


def test_every_preset_is_represented():
    """But for hybrid models, whose contracts are in tests/inspect/test_hybrid_contract.py."""
    represented = {structure(name) for name in REPRESENTATIVES}
    others = [name for name in PRESETS if load(name).model.family != "hybrid"]
    assert [name for name in others if structure(name) not in represented] == []


@needs_aot
@pytest.mark.parametrize(("name", "zero", "split", "one_sample"), CASES)
def test_presets_keep_their_contract_on_h100(name, zero, split, one_sample):
    report = inspect(narrow(name, zero=zero, split=split, one_sample=one_sample), find_target("h100x8"))
    assert report.verdict.violations == ()


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 3},
        pytest.param({"family": "llama", "num_kv_heads": 2, "recompute": "none"}, marks=pytest.mark.exhaustive),
    ],
    ids=["GPT, ZeRO-3", "Llama with shared heads"],
)
def test_one_sample_of_split_sequences_is_gathered_once_for_both_products(settings):
    """The gradient of a row-parallel product, for that of its input and for that of its weight."""
    run = tiny(num_layers=2, sequence_parallel=True, microbatch_size=1, **settings)
    assert inspect(run, find_target("h100x8")).verdict.violations == ()
