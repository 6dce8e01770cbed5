"""H100 programs of layers without a loop: in which order they must recompute, and what their optimizer reads."""

import re
from typing import Any

import pytest

from mtjax.inspect.compiled import compile_step
from mtjax.inspect.hlo import Computation
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny

LAYERS = 4


def products_of(entry: Computation) -> dict[str, str]:
    """Products of layers by name: "recompute" or "backward"."""
    found = {}
    for i in entry.instructions:
        if i.opcode == "custom-call" and "layers" in i.op_name and i.op_name.endswith("dot_general"):
            remade, back = "rematted_computation" in i.op_name, "transpose(" in i.op_name
            found |= {i.name: "recompute" if remade else "backward"} if remade or back else {}
    return found


def needs(entry: Computation, name: str) -> set[str]:
    """All instructions that one depends on."""
    seen, queue = set(), [name]
    while queue:
        for operand in entry.by_name[queue.pop()].operands:
            if operand in entry.by_name and operand not in seen:
                seen.add(operand)
                queue.append(operand)
    return seen


def unrolled_program(**fields: Any) -> tuple[Computation, dict[str, str]]:
    """Compiles layers without a loop for H100s; returns the entry computation, and its products as of `products_of`."""
    entry = compile_step(tiny(**fields, unroll_layers=True), find_target("h100x8")).module.entry
    return entry, products_of(entry)


@needs_aot
@pytest.mark.long
def test_full_recompute_waits_for_the_gradients_of_matrices_two_layers_above() -> None:
    """With `jax.checkpoint` alone it waits for the gradients of hidden states only, 10 of 14 products of a layer."""
    fields = {"mesh": "8x1", "zero": 3, "global_batch_size": 16, "num_layers": LAYERS, "attention": "xla"}
    entry, kinds = unrolled_program(**fields, recompute="full")
    remade = [name for name, kind in kinds.items() if kind == "recompute"]
    each = (len(kinds) - len(remade)) // LAYERS
    above = sorted(sum(kinds.get(n) == "backward" for n in needs(entry, name)) for name in remade)
    # The last layer follows the loss. The first one follows all products of layers from two above on, and of the next
    # layer what the gradient of hidden states needs.
    of_layer = len(remade) // LAYERS
    assert of_layer >= 3 and above[:of_layer] == [0] * of_layer and above[of_layer] > 0
    assert above[-1] == each * (LAYERS - 2) + above[of_layer]


@needs_aot
@pytest.mark.long
def test_the_norm_of_gradients_reads_each_layers_array() -> None:
    """No sum over the concatenation of the layers' gradients, in which each element finds its array by comparisons."""
    fields = {"mesh": "1x1", "microbatch_size": 8, "num_layers": LAYERS, "attention": "xla"}
    run = tiny(**fields, recompute="none", unroll_layers=True)
    step = compile_step(run, find_target("h100x8"))
    for computation in step.module.computations.values():
        joined = [i for i in computation.instructions if i.opcode == "concatenate" and re.search("64", str(i.arrays))]
        summed = [i for i in computation.instructions if i.opcode == "reduce" and "optimizer" in i.op_name]
        assert not (joined and summed), computation.name


@needs_aot
@pytest.mark.long
def test_gradients_in_8_bits_wait_for_those_of_the_matrices_above() -> None:
    """Else XLA computes those of many matrices at the end, and holds the activations and gradients of all layers."""
    fields = {"mesh": "8x1", "zero": 1, "microbatch_size": 1, "num_layers": LAYERS, "fp8": "delayed"}
    report = inspect(tiny(**fields, recompute="none", unroll_layers=True), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert report.float8 is not None and (report.float8.found, report.float8.expected) == (12 * LAYERS,) * 2
    entry = report.step.module.entry
    kinds = products_of(entry)
    back = [name for name, kind in kinds.items() if kind == "backward"]
    each, above = len(back) // LAYERS, [sum(kinds.get(n) == "backward" for n in needs(entry, name)) for name in back]
    assert each >= 8
    assert sorted(n // each for n in above) == [layer for layer in range(LAYERS) for _ in range(each)]
