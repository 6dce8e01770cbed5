"""The computing time of each kind of layers, on operations small enough to name by hand."""

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.inspect import hlo
from mtjax.inspect.collectives import find_collectives
from mtjax.inspect.kinds import kinds_text, time_of_kinds
from mtjax.inspect.roofline import Roofline
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from tests.inspect.steps import tiny

BACK = "jit(_step)/transpose(jvp(layers))/while/body/closed_call/checkpoint"
OPERATIONS = {
    "jit(_step)/jvp(layers)/while/body/closed_call/checkpoint/mamba/mamba/inputs/add": "mamba",
    f"{BACK}/rematted_computation/mamba/mamba/scan/while/body/mul": "mamba",
    f"{BACK}/experts/mlp/router/add": "experts",
    "jit(_step)/jvp(layers)/mlp/layers/while/body/closed_call/checkpoint/mlp/mul": "mlp",
    "jit(_step)/transpose(jvp(layers))/transpose(jvp(mlp))/layers/while/body/checkpoint/mlp/mul": "mlp",
    "jit(_step)/jvp(layers)/while/body/dynamic_slice": None,
    "jit(_step)/jvp(loss)/mlp/mul": None,
}
"""Path of scopes -> kind of layers."""


def test_an_operation_counts_for_the_first_kind_in_its_path() -> None:
    lines = "\n".join(
        f'  %f.{i} = f32[99]{{0}} tanh(%x), metadata={{op_name="{name}"}}' for i, name in enumerate(OPERATIONS)
    )
    text = "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[99]) -> f32[99] {\n  %x = f32[99]{0} parameter(0)\n"
    module = hlo.parse(f"{text}{lines}\n  ROOT %g = f32[99]{{0}} copy(%x)\n}}\n")
    roofline = Roofline(module, find_collectives(module, {"data": 1}, 8), DGX_H100)
    run = tiny(family="hybrid", layer_pattern="MME-", num_layers=4, num_experts=4, mesh="2x1", ssm_heads=4)
    plan = Plan.of(run, parse_mesh("2x1"))
    kinds = time_of_kinds(roofline, anatomy_of(run.model).stacks, plan)
    counts = {name: list(OPERATIONS.values()).count(name) for name in ("mamba", "mlp", "experts")}
    assert {name: kind.seconds / roofline.launch for name, kind in kinds.items()} == pytest.approx(counts)
    assert plan.microbatches == 2
    assert {name: (kind.letter, kind.runs) for name, kind in kinds.items()} == {
        "mamba": ("M", 4),
        "mlp": ("-", 2),
        "experts": ("E", 2),
    }
    assert kinds["mamba"].each == kinds["mamba"].seconds / 4
    assert kinds_text(kinds, 4 * kinds["mamba"].seconds).count("mamba (M) ") == 1
    assert ", 2 layers 25.0%; mlp (-) " in kinds_text(kinds, 4 * kinds["mamba"].seconds)


def test_models_whose_layers_are_alike_have_no_kinds() -> None:
    run, module = (
        tiny(),
        hlo.parse("HloModule m\n\nENTRY %main (x: f32[9]) -> f32[9] {\n  ROOT %x = f32[9] parameter(0)\n}\n"),
    )
    assert (
        time_of_kinds(Roofline(module, [], DGX_H100), anatomy_of(run.model).stacks, Plan.of(run, parse_mesh("2x4")))
        == {}
    )
