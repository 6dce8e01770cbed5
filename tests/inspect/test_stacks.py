"""What H100 programs lay out in memory: nothing before it is needed, and no stack a second time in another order."""

from collections.abc import Iterator

from mtjax.inspect.hlo import Instruction
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny

LAYERS, VOCABULARY = 5, 512
SPLIT = {"num_layers": LAYERS, "vocab_size": VOCABULARY, "mesh": "2x4", "sequence_parallel": True, "attention": "xla"}
SPLIT |= {"microbatch_size": 2, "global_batch_size": 8, "tie_embeddings": False}
"""Of 64 tokens, width 64, 4 heads; two microbatches of two samples."""


def executed(report: Report) -> Iterator[Instruction]:
    """The instructions that write an array of their own: those outside of fusions."""
    computations = report.step.module.computations.values()
    fusions = [i for computation in computations for i in computation.instructions if i.opcode == "fusion"]
    fused = {name for fusion in fusions for name in fusion.called}
    for computation in computations:
        if computation.name not in fused:
            yield from computation.instructions


def filled(report: Report) -> list[tuple[str, list[int]]]:
    """Arrays that are filled with a constant: what reads nothing may stand at the beginning of the step."""
    made = (i for i in executed(report) if i.opcode in ("fusion", "broadcast") and not i.operands)
    return [(array.dtype, sorted(array.dims)) for i in made for array in i.arrays]


@needs_aot
def test_no_stack_of_queries_keys_and_values_is_turned() -> None:
    report = inspect(tiny(**SPLIT, recompute="selective", zero=2), find_target("h100x8"))
    size = LAYERS * 2 * 64 * 3 * 64 // 4
    assert any(a.elements == size and "update_slice" in i.name for i in executed(report) for a in i.arrays)
    assert [i.name for i in executed(report) for a in i.arrays if a.elements == size and "transpose" in i.name] == []


@needs_aot
def test_zeros1_parts_of_gradients_do_not_wait_from_the_beginning() -> None:
    found = filled(inspect(tiny(**SPLIT, recompute="full", zero=1), find_target("h100x8")))
    assert ("f32", [LAYERS, 64, 64]) in found  # the sums of the gradients of an MLP's matrix, split over 4 ranks
    assert ("f32", [LAYERS, 32, 64]) not in found


@needs_aot
def test_the_gradient_of_the_embedding_does_not_wait_from_the_beginning() -> None:
    run = tiny(**SPLIT | {"global_batch_size": 4}, recompute="full", zero=3)
    found = filled(inspect(run, find_target("h100x8")))
    assert found.count(("f32", [64, VOCABULARY // 4])) == 1  # the output table's, to which chunks of tokens add
