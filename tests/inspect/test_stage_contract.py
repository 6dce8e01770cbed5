"""What the stages of a pipeline send, in compiled programs: each permute in ticks, and nothing else between stages."""

from typing import Any

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.contract import STAGES
from mtjax.analysis.counts import peak_stage_counts
from mtjax.inspect.collectives import find_collectives
from mtjax.inspect.hlo import parse
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.layout.plan import Plan
from mtjax.layout.rules import DATA
from mtjax.layout.timetable import num_ticks
from tests.inspect.steps import needs_aot, tiny
from tests.inspect.test_contract import sent
from tests.tiny import program_of

ONE_BY_ONE: dict[str, Any] = {"mesh": "2x2x2", "num_layers": 4, "microbatch_size": 1, "global_batch_size": 16}
"""8 microbatches on 2 stages: 9 ticks forward and 9 backward; s = 64, h = 64."""
SPLIT = {"recompute": "full", "sequence_parallel": True, "zero": 1, "grad_reduce_dtype": "bfloat16"}
HALF_STREAM = 64 * 64 // 2


def permutes(report: Report) -> dict[tuple[int, str], int]:
    """(elements, type) -> executions of collective-permutes, all of them over `stage`."""
    found: dict[tuple[int, str], int] = {}
    for c in report.collectives:
        if c.kind == "collective-permute":
            assert c.axes == ("stage",) and c.phase == STAGES
            for array in c.arrays:
                key = (array.elements, array.dtype)
                found[key] = found.get(key, 0) + c.count
    return found


@pytest.mark.parametrize(
    "settings",
    [
        SPLIT,
        pytest.param({"recompute": "none"}, marks=pytest.mark.exhaustive),
        pytest.param({"recompute": "full", "zero": 3}, marks=pytest.mark.exhaustive),
        pytest.param({"recompute": "none", "sequence_parallel": True, "zero": 2}, marks=pytest.mark.long),
    ],
    ids=["split sequences, ZeRO-1, bfloat16 on the wire", "residuals kept", "ZeRO-3", "residuals kept, split, ZeRO-2"],
)
def test_contracts_hold_on_cpus(settings: dict[str, Any]) -> None:
    report = inspect(tiny(**ONE_BY_ONE, **settings), find_target("cpu"))
    assert report.verdict.violations == ()
    ((elements, _), count) = next(iter(permutes(report).items()))  # CPU programs may widen what is sent
    assert (elements, count, len(permutes(report))) == (HALF_STREAM, 18, 1)
    assert abs(report.flops.difference) < 0.01


@needs_aot
@pytest.mark.parametrize(
    ("settings", "halves"),
    [
        # Its contract holds where permutes travel behind layers, below.
        pytest.param(SPLIT, 18, marks=pytest.mark.exhaustive),
        ({"recompute": "selective", "pipeline_schedule": "interleaved", "chunks": 2, "zero": 2}, 2 * 17),
        ({"recompute": "full", "pipeline_schedule": "gpipe", "zero": 3, "layers_per_stage": (1, 3)}, 18),
        pytest.param(
            {"recompute": "none", "family": "bert", "sequence_parallel": True, "zero": 2},
            18,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=[
        "1f1b, split sequences, ZeRO-1",
        "interleaved, ZeRO-2",
        "gpipe, ZeRO-3, unequal stages",
        "BERT, residuals kept",
    ],
)
def test_contracts_hold_on_h100s(settings: dict[str, Any], halves: int) -> None:
    """Operations and bytes; the stream travels in parts, also where all model ranks have all of it."""
    report = inspect(tiny(**ONE_BY_ONE, **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert permutes(report) == {(HALF_STREAM, "bf16"): halves}
    operations = [i for computation in report.step.module.computations.values() for i in computation.instructions]
    written_anew = [i for i in operations if i.opcode in ("copy", "transpose")]
    assert max(a.elements for i in written_anew for a in i.arrays) < 16 * HALF_STREAM  # what waits in slots has more


@needs_aot
@pytest.mark.long
def test_t5_on_stages_of_h100s_sends_both_streams_and_each_layer_its_own() -> None:
    """Operations and bytes by phase: two layers of each stack in a chunk, the decoder's sequences half as long.

    A tick has a forward pass of one stack, and another one in its backward half. What cross-attention reads is gathered
    once in the former, before the layers, and by each layer in the latter.
    """
    t5 = {"family": "t5", "num_decoder_layers": 4, "decoder_sequence_length": 32}
    report = inspect(tiny(**ONE_BY_ONE, **SPLIT, **t5), find_target("h100x8"))
    assert report.verdict.violations == ()
    ticks, m = num_ticks(stages=2, microbatches=8, chunks=2), 8
    encoding, decoding = ticks - m, m  # a tick runs one of the two, an idle one the encoder
    assert permutes(report) == {(HALF_STREAM, "bf16"): 2 * ticks, (HALF_STREAM // 2, "bf16"): 2 * ticks}

    def gathered_and_scattered(phase: str) -> dict[str, tuple[float, float]]:
        """Side -> gathers and scatters of its stream, of a step."""
        found = {(kind, size): n for (kind, size, dtype), n in sent(report, phase).items() if dtype == "bf16"}
        kinds = ("all-gather", "reduce-scatter")
        sides = {"encoder": 64 * 64, "decoder": 32 * 64}
        return {side: tuple(found.pop((kind, size), 0) for kind in kinds) for side, size in sides.items()} | found

    assert gathered_and_scattered("embedding forward") == {"encoder": (0, encoding), "decoder": (0, 2 * m)}
    assert gathered_and_scattered("layer forward") == {
        "encoder": (2 * 2 * 2 * encoding + 2 * decoding, 2 * 2 * 2 * encoding),
        "decoder": (12 * decoding, 12 * decoding),
    }
    assert gathered_and_scattered("other") == {"encoder": (decoding, 0), "decoder": (0, 0)}
    assert gathered_and_scattered("layer recompute") == {
        "encoder": (2 * 2 * encoding + 2 * decoding, 0),
        "decoder": (2 * 3 * decoding, 0),
    }
    assert gathered_and_scattered("layer backward") == {
        "encoder": (4 * encoding, 4 * encoding + 2 * decoding),
        "decoder": (2 * 3 * decoding, 2 * 3 * decoding),
    }
    assert gathered_and_scattered("loss backward") == {"encoder": (0, 0), "decoder": (m, m)}
    assert gathered_and_scattered("embedding backward") == {"encoder": (m, 0), "decoder": (m, 0)}


@needs_aot
@pytest.mark.parametrize(
    "layout",
    [
        SPLIT,
        pytest.param({"recompute": "none", "norm": "rmsnorm"}, marks=pytest.mark.exhaustive),
        pytest.param({"recompute": "full"}, marks=pytest.mark.exhaustive),
    ],
    ids=["split sequences", "tensor, residuals kept, RMSNorm", "tensor"],
)
def test_permutes_travel_behind_layers_on_h100s(layout: dict[str, Any]) -> None:
    """In the steady state: gradients behind the forward half, activations behind the backward half."""
    report = inspect(
        tiny(**{**ONE_BY_ONE, "mesh": "2x4x2", "hidden_size": 256, "num_layers": 8, "attention": "xla"}, **layout),
        find_target("h100x8"),
    )
    assert report.verdict.violations == ()
    assert report.stages is not None
    for permutes in report.stages.permutes:
        assert permutes.hidden >= 8 - 3, permutes


def test_evaluation_on_stages_gathers_parameters_once():
    """Of ZeRO-1, however many ticks there are: in the four microbatches of a batch each chunk works once and again."""
    program = program_of("2x2x2", num_layers=4, microbatch_size=1, zero=1)
    module = parse(program.evaluation.lower().compile().as_text())
    found = [c for c in find_collectives(module, program.mesh.shape, 8) if c.kind == "all-gather" and c.axes == (DATA,)]
    held = peak_stage_counts(anatomy_of(program.config.model), Plan.of(program.config, program.mesh_shape))
    assert sum(c.count * c.elements for c in found) == held.all - held.replicated
