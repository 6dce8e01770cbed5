"""What H100 programs lay out in memory: nothing before it is needed, and no stack a second time in another order."""

from collections.abc import Iterator
from functools import cache

from mtjax import config as configs
from mtjax.inspect.hlo import Instruction
from mtjax.inspect.products import product_of
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


@cache
def report_with_zero_3() -> Report:
    return inspect(tiny(**SPLIT | {"global_batch_size": 4}, recompute="full", zero=3), find_target("h100x8"))


@cache
def report_with_zero_2() -> Report:
    return inspect(tiny(**SPLIT, recompute="selective", zero=2), find_target("h100x8"))


@needs_aot
def test_no_stack_of_queries_keys_and_values_is_turned() -> None:
    report = report_with_zero_2()
    size = (LAYERS - 1) * 2 * 64 * 3 * 64 // 4  # the last layer is outside the loop
    assert any(a.elements == size and "update_slice" in i.name for i in executed(report) for a in i.arrays)
    assert [i.name for i in executed(report) for a in i.arrays if a.elements == size and "transpose" in i.name] == []


@needs_aot
def test_zeros1_parts_of_gradients_do_not_wait_from_the_beginning() -> None:
    found = filled(inspect(tiny(**SPLIT, recompute="full", zero=1), find_target("h100x8")))
    assert ("f32", [LAYERS, 64, 64]) in found  # the sums of the gradients of an MLP's matrix, split over 4 ranks
    assert ("f32", [LAYERS, 32, 64]) not in found


@needs_aot
def test_stacks_that_zero_gathers_once_are_laid_out_as_they_are_read() -> None:
    """In the compute type, once; an MLP's second matrix is split along an inner dimension, as gathers don't lay out."""
    size = LAYERS * 64 * 4 * 64 // 4
    made = [(i.name, a.dtype) for i in executed(report_with_zero_2()) for a in i.arrays if a.elements == size]
    assert {dtype for name, dtype in made if "update_slice" in name} == {"bf16"}
    assert [name for name, _ in made if "copy" in name or "transpose" in name] == []


@needs_aot
def test_stacks_of_which_zero_3_gathers_a_layer_at_a_time_are_read_as_they_are() -> None:
    """An MLP's second matrix is split along an inner dimension, and a gather sends the outermost: of one layer."""
    size = LAYERS * 64 * 4 * 64 // 8
    found = executed(report_with_zero_3())
    ordered = [i.op_name for i in found for a in i.arrays if a.elements == size and "transpose" in i.name]
    # Stacks of gradients are transposed behind the loop.
    assert [name for name in ordered if "/transpose(jvp(layers))" not in name] == []
    assert ordered


@needs_aot
def test_the_gradient_of_the_embedding_does_not_wait_from_the_beginning() -> None:
    found = filled(report_with_zero_3())
    assert found.count(("f32", [64, VOCABULARY // 4])) == 1  # the output table's, to which chunks of tokens add


@needs_aot
def test_a_backward_pass_writes_what_products_read_and_no_more() -> None:
    """Of GELU the value and the gradient, no tanh; in float32 neither terms of a norm's sums nor gradients of scores.
    By XLA's choice of kernels, which it makes by size: that of a real layer."""
    fields = {"num_layers": 2, "global_batch_size": 16, "microbatch_size": 8, "mesh": "1x1", "attention": "xla"}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    run = configs.replace(configs.load("gpt2-1.2b"), **fields, **dropout, recompute="none", unroll_layers=True)
    found = inspect(run, find_target("h100x8"))
    kernels = [i for i in executed(found) if i.opcode == "fusion" and ("/mlp/" in i.op_name or not i.op_name)]
    stream = 8 * 1024 * 1536
    assert [a.dtype for i in kernels for a in i.arrays if a.elements == 4 * stream] == ["bf16"] * 3 * 2
    assert [i.name for i in kernels for a in i.arrays if a.elements == stream and a.dtype == "f32"] == []
    made = (product_of(c, i) for c in found.step.module.computations.values() for i in c.instructions)
    assert {product.dtype for product in made if product} == {"bf16"}
