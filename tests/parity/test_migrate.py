"""The defaults in the table of Megatron-LM's arguments are those of the installed megatron-core."""

import dataclasses

import pytest

from mtjax.migrate.megatron import by_dest

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
