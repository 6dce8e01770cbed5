"""In which order collectives run on CPUs, whose runtime keeps none between those in a conditional or a loop and those
beside it: by data."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from mtjax.inspect import hlo
from tests.tiny import program_of, run_steps

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
}
PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
T5: dict[str, Any] = PLAIN | {
    "family": "t5",
    "num_layers": 4,
    "num_decoder_layers": 2,
    "decoder_sequence_length": 16,
    "zero": 3,
    "microbatch_size": 1,
    "sequence_parallel": True,
}
"""Two sections, of which each stage has one layer of the second: XLA makes no loop for it, so that its parameters are
gathered beside the conditionals."""
INTERLEAVED: dict[str, Any] = PLAIN | {
    "family": "llama",
    "num_layers": 4,
    "num_kv_heads": 4,
    "mlp_size": 48,
    "tie_embeddings": True,
    "qk_norm": True,
    "pipeline_schedule": "interleaved",
    "chunks": 2,
    "microbatch_size": 1,
    "recompute": "full",
    "zero": 3,
    "sequence_parallel": True,
}
GATHERED_ONCE: dict[str, Any] = PLAIN | {"num_layers": 4, "microbatch_size": 1, "zero": 1, "recompute": "none"}


def unordered(module: hlo.Module) -> list[tuple[str, str, str]]:
    """Pairs of a conditional or a loop with collectives inside and another operation with some, neither of which needs
    the other's result: the computation, and the scopes of both."""

    @cache
    def sends(name: str) -> bool:
        return any(
            i.opcode.removesuffix("-start") in COLLECTIVES or any(sends(called) for called in i.called)
            for i in module.computations[name].instructions
        )

    found = []
    for computation in module.computations.values():
        before: dict[str, set[str]] = {}
        sending: list[tuple[hlo.Instruction, bool]] = []
        for instruction in computation.instructions:
            own = [name for name in instruction.operands if name in before]
            before[instruction.name] = set(own).union(*(before[name] for name in own))
            is_flow = instruction.opcode in ("conditional", "while") and any(map(sends, instruction.called))
            if is_flow or instruction.opcode.removesuffix("-start") in COLLECTIVES:
                found += [
                    (computation.name, other.op_name, instruction.op_name)
                    for other, other_is_flow in sending
                    if (is_flow or other_is_flow) and other.name not in before[instruction.name]
                ]
                sending.append((instruction, is_flow))
    return found


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("data=2,stage=2,model=2", T5, marks=pytest.mark.long),
        pytest.param("data=1,stage=2,context=2,model=2", INTERLEAVED, marks=pytest.mark.long),
        pytest.param("data=2,stage=2,model=2", GATHERED_ONCE, marks=pytest.mark.long),
    ],
    ids=["two sections", "interleaved", "gathered once"],
)
def test_what_stages_send_is_ordered_by_data(mesh, settings):
    program = program_of(mesh, **settings)
    module = hlo.parse(program.lower_step().compile().as_text() or "")
    # The sums that the program begins with need nothing, and nothing in the loops has their channels.
    of_batch = ("jit(_step)/reduce_sum", "jit(_step)/optimizer/reduce_sum")
    assert [pair for pair in unordered(module) if pair[1] not in of_batch] == []


def test_an_unordered_pair_is_found():
    text = """
HloModule m, num_partitions=2

branch (p: f32[4]) -> f32[4] {
  p = f32[4]{0} parameter(0)
  ROOT sum = f32[4]{0} all-reduce(p), replica_groups={{0,1}}, to_apply=add
}

other (q: f32[4]) -> f32[4] {
  ROOT q = f32[4]{0} parameter(0)
}

add (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main (x: f32[4], holds: pred[]) -> (f32[4], f32[8], f32[8]) {
  x = f32[4]{0} parameter(0)
  holds = pred[] parameter(1)
  chosen = f32[4]{0} conditional(holds, x, x), true_computation=branch, false_computation=other, metadata={op_name="c"}
  beside = f32[8]{0} all-gather(x), dimensions={0}, replica_groups={{0,1}}, metadata={op_name="beside"}
  behind = f32[8]{0} all-gather(chosen), dimensions={0}, replica_groups={{0,1}}, metadata={op_name="behind"}
  ROOT all = (f32[4]{0}, f32[8]{0}, f32[8]{0}) tuple(chosen, beside, behind)
}
"""
    assert unordered(hlo.parse(text.strip())) == [("main", "c", "beside")]


@pytest.mark.long
def test_stages_that_gather_beside_conditionals_run_to_the_end():
    """They stopped in the first step, or the second, on virtual devices."""
    _, found = run_steps(program_of("data=2,stage=2,model=2", **T5), 10)
    assert np.isfinite([metrics["loss"] for metrics in found]).all()
