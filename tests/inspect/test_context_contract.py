"""What ranks that share samples send, in compiled programs: keys and values, and their gradients.

The rest is as on other meshes, with sequences that are shorter by the context ways; gradients are summed over data and
context together.
"""

from typing import Any

import pytest

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import crossing_in_layers, has_cudnn, needs_aot, tiny
from tests.tiny import LATENT

RING: dict[str, Any] = {"mesh": "data=1,context=4,model=2", "attention": "xla"}
"""3 layers, 4 microbatches of 2 samples; of 64 tokens a rank has 16, and 2 of 4 heads of 16."""
DOCUMENTS: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}
GROUPED: dict[str, Any] = {
    "mesh": "data=2,context=2,model=2",
    "family": "llama",
    "num_kv_heads": 1,
    "sequence_parallel": True,
}
"""2 microbatches; a key and a value head of 16 on each rank, for 32 tokens."""

BERT: dict[str, Any] = {"mesh": "data=1,context=4,model=2", "family": "bert", "recompute": "full"}
"""Which rank's tokens are padding goes from rank to rank as documents' numbers do."""

STAGES: dict[str, Any] = {
    "mesh": "data=1,stage=2,context=2,model=2",
    "num_layers": 4,
    "global_batch_size": 4,
    "microbatch_size": 1,
    "attention": "xla",
    "sequence_parallel": True,
    "zero": 1,
}
"""5 ticks of a chunk of 2 layers, forward once, and backward with another pass forward."""


@pytest.mark.parametrize(
    "settings",
    [
        # Those of H100s below are of these, too.
        pytest.param(RING, marks=pytest.mark.exhaustive),
        pytest.param(RING | DOCUMENTS | {"context_method": "all-gather"}, marks=pytest.mark.exhaustive),
        pytest.param(GROUPED | {"zero": 3, "recompute": "none"}, marks=pytest.mark.long),
        pytest.param(BERT, marks=pytest.mark.long),
        pytest.param(RING | {"family": "llama", **LATENT}, marks=pytest.mark.long),
        pytest.param(RING | {"family": "llama", "context_method": "all-gather", **LATENT}, marks=pytest.mark.long),
    ],
    ids=[
        *("ring", "all-gather, documents", "shared keys, split sequences, ZeRO-3", "bert"),
        *("latents, ring", "latents, all-gather"),
    ],
)
def test_contracts_hold_on_cpus(settings):
    assert inspect(tiny(**settings), find_target("cpu")).verdict.violations == ()


@needs_aot
def test_a_ring_of_h100s_sends_keys_and_values_and_their_gradients_and_nothing_else():
    """3 hops of two arrays: forward, again, and 2 of 3 backward, which share the first with the pass before; 3 of the
    gradients' sums in float32, and one in 16 bits. Of the documents' numbers one array a hop."""
    report = inspect(tiny(**RING, **DOCUMENTS), find_target("h100x8"))
    assert report.verdict.violations == ()
    turns, keys, documents = 3 * 4, "bf16[2,16,2,16]", "s32[2,16]"
    send = "collective-permute"
    assert crossing_in_layers(report, "context") == {
        (LAYER_FORWARD, send, keys): turns * 2 * 3,
        (LAYER_RECOMPUTE, send, keys): turns * 2 * 3,
        (LAYER_BACKWARD, send, keys): turns * 2 * (2 + 1),
        (LAYER_BACKWARD, send, "f32[2,16,2,16]"): turns * 2 * 3,
        (LAYER_FORWARD, send, documents): turns * 3,
        (LAYER_RECOMPUTE, send, documents): turns * 3,
        (LAYER_BACKWARD, send, documents): turns * 2,
    }
    assert report.flops.difference == 0


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            RING | DOCUMENTS | {"context_method": "all-gather", "recompute": "selective"}, id="all-gather, documents"
        ),
        pytest.param(
            GROUPED | {"zero": 2, "attention": "cudnn", "recompute": "none"},
            marks=pytest.mark.skipif(not has_cudnn, reason="needs the extra aot-cudnn"),
            id="ring of cuDNN's kernel, shared keys",
        ),
        pytest.param(
            {"mesh": "data=1,context=4,model=2", "context_method": "all-gather", "zero": 3, "attention": "cudnn"},
            marks=pytest.mark.skipif(not has_cudnn, reason="needs the extra aot-cudnn"),
            id="gather for cuDNN's kernel, ZeRO-3",
        ),
        pytest.param(STAGES, id="ring on stages, ZeRO-1"),
        pytest.param(
            BERT | {"sequence_parallel": True, "zero": 3},
            id="both ways and padding, split sequences",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_contracts_hold_on_h100s(settings):
    """BERT's products that pick tokens are in no formula; beside 3 layers of 64 they are more than beside real ones."""
    report = inspect(tiny(**settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert abs(report.flops.difference) <= (0.02 if report.config.model.family == "bert" else 0)
