"""Defaults, layers of pipeline stages, and windows and RoPE of each layer are those of the installed megatron-core."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtjax.config.sizes import rotated_layers, windowed_layers
from mtjax.convert.from_megatron.given import GivenArguments, from_words
from mtjax.convert.from_megatron.report import config_of
from mtjax.convert.from_megatron.translate import translate
from mtjax.convert.megatron_stages import stage_layers
from mtjax.errors import UserError
from mtjax.migrate.megatron import by_dest
from tests.convert.test_from_megatron import SMALL

pytestmark = pytest.mark.torch

OTHER_NAMES = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
LATER = {"num_query_groups", "attention_softmax_in_fp32", "optimizer_offload_fraction"}
"""Of the command line's parser, which fills in other defaults than the classes have."""


def test_defaults_are_megatrons() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    theirs = {
        field.name: field.default
        for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING and type(field.default) in (int, float, str, bool)
    }
    compared = {
        dest: (row.default, theirs[OTHER_NAMES.get(dest, dest)])
        for dest, row in by_dest().items()
        if OTHER_NAMES.get(dest, dest) in theirs and row.default is not None and dest not in LATER
    }
    assert len(compared) > 40
    assert {dest: pair for dest, pair in compared.items() if pair[0] != pair[1]} == {}


ENDS = [{"decoder_first_pipeline_num_layers": a, "decoder_last_pipeline_num_layers": b} for a in (2, 4) for b in (2, 5)]
ENDS += [{"decoder_first_pipeline_num_layers": 4}, {"num_layers_in_last_pipeline_stage": 4}, {}]
COUNTED = [
    {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
    for embedding, loss in ((True, True), (True, False), (False, True))
]
OF_CORE = {f"decoder_{end}_pipeline_num_layers": f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")}
STAGES = [
    {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks, **case}
    for case in (*ENDS, *COUNTED)
    for stages in (2, 3, 4)
    for chunks in (None, 2)
]
LAYOUTS = ("Et*3|(tt|)*2,L", "Et|t|t*3,|tL", "E|(t|)*6,L", "E,t|ttt||ttL")


def test_layers_of_stages_are_megatrons() -> None:
    """By the functions with which its blocks are built, of 4 to 18 layers."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    core = dict.fromkeys([*OF_CORE.values(), "pipeline_model_parallel_layout"]) | dict.fromkeys(COUNTED[0], False)
    compared = 0
    for case in STAGES:
        stages, chunks = case["pipeline_model_parallel_size"], case["virtual_pipeline_model_parallel_size"]
        for layers in range(4, 19):
            settings = core | {OF_CORE.get(name, name): value for name, value in case.items()} | {"num_layers": layers}
            config: Any = SimpleNamespace(**settings)
            numbers = range(chunks) if chunks else (None,)
            try:
                theirs = [
                    [
                        range(
                            at := get_transformer_layer_offset(config, c, s), at + get_num_layers_to_build(config, c, s)
                        )
                        for c in numbers
                    ]
                    for s in range(stages)
                ]
            except (AssertionError, ZeroDivisionError):
                continue
            if sum(len(part) for row in theirs for part in row) == layers:
                assert stage_layers(case, layers, "saved") == theirs
                compared += 1
            else:
                with pytest.raises(UserError, match="do not add up"):
                    stage_layers(case, layers, "saved")
    assert compared > 100
    for layout in LAYOUTS:
        wanted = PipelineParallelLayerLayout(layout, 2).layout
        ours = stage_layers(
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout},
            sum(part.count(LayerType.decoder) for row in wanted for part in row),
            "saved",
        )
        assert [[len(part) for part in row] for row in ours] == [
            [part.count(LayerType.decoder) for part in row] for row in wanted
        ]


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
def test_windows_and_rope_by_layer_are_megatrons() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention

    layers, length, before = 8, 12, 3
    frequencies: list[Any] = [None, 1, 2, 4, [1, 1, 0, 1, 0, 0, 0, 1]]
    for frequency in frequencies:
        for skipped in (2, 4, [0, 1, 1, 0, 0, 0, 0, 1]):
            words = ["--window-size", f"{before},0", "--no-rope-freq", str(skipped).replace(" ", "")]
            words += [] if frequency is None else ["--window-attn-skip-freq", str(frequency).replace(" ", "")]
            given = GivenArguments("the arguments", gpus=1)
            from_words([*SMALL, "--position-embedding-type", "rope", *words], given)
            model = config_of(translate(given)[0]).model
            theirs = TransformerConfig(num_layers=layers, hidden_size=96, num_attention_heads=4, no_rope_freq=skipped)
            assert [not on for on in rotated_layers(model)] == [bool(skips) for skips in np.array(theirs.no_rope_freq)]
            has_window: Any = is_layer_window_attention
            windowed = [has_window((before, 0), frequency, 1 + number) for number in range(layers)]
            assert list(windowed_layers(model)) == windowed
            if any(windowed):
                seen = seen_keys(get_sliding_window_causal_mask, length, before)
                assert [min(n + 1, model.attention_window or length) for n in range(length)] == seen


def seen_keys(mask: Callable[[int, int, tuple[int, int]], Any], length: int, before: int) -> list[int]:
    """How many keys each query attends to; Megatron makes the mask on a GPU."""
    import torch

    real = torch.ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", lambda *sizes, device, **rest: real(*sizes, **rest))
        return (~mask(length, length, (before, 0))).sum(-1).tolist()
