"""Planted breaches of the contract: each is caught, and called by its name."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec, reshard

from mtjax.analysis.contract import Contract, Expectation, Requirement
from mtjax.families.gpt.model import GPT
from mtjax.inspect.check import Landmarks, check
from mtjax.inspect.collectives import Collective
from mtjax.inspect.compiled import compile_program
from mtjax.inspect.hlo import Array
from mtjax.inspect.report import Report, report
from mtjax.inspect.targets import find_target
from mtjax.layout.layouts import TENSOR, Layout
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.rules import DATA, MODEL, Rules
from mtjax.models.logits import full_logits
from mtjax.models.mixers.transformer import MLP
from mtjax.sharding import gradients
from mtjax.sharding.axes import spec
from mtjax.sharding.param_comm import is_wrapped, materialize
from mtjax.train.step import TrainStep
from tests.inspect.steps import needs_aot, required_of, tiny


def inspect_tiny(layout: Layout = TENSOR, target_name: str = "cpu", **values) -> Report:
    target, config = find_target(target_name), tiny(num_layers=2, **values)
    return report(compile_program(TrainStep(config, target.mesh(parse_mesh("2x4")), layout), target))


def gathering(self, x, context, state):
    """An MLP that gathers its inner activations and splits them again."""
    inner = jax.nn.gelu(self.up(reshard(x, spec("batch", "seq", "embed"))))
    whole = jnp.tanh(reshard(inner, PartitionSpec(None, None, None)))
    return self.down(reshard(whole, spec("batch", "seq", "mlp"))), state


def test_an_extra_gather_of_an_activation(monkeypatch):
    monkeypatch.setattr(MLP, "__call__", gathering)
    violations = inspect_tiny(compute_dtype="float32").verdict.violations
    forward = [v for v in violations if "in layer forward" in v]
    assert any(v.startswith("4 extra all-gather over model") and "f32[2,64,256]" in v and "mlp" in v for v in forward)


@pytest.mark.long
@needs_aot
def test_an_extra_gather_in_a_program_for_h100(monkeypatch):
    monkeypatch.setattr(MLP, "__call__", gathering)
    violations = inspect_tiny(target_name="h100x8", attention="xla").verdict.violations
    forward = [v for v in violations if "in layer forward" in v]
    assert any(v.startswith("4 extra all-gather over model") and "bf16[2,64,256]" in v and "mlp" in v for v in forward)


def test_a_replicated_weight():
    layout = Layout(Rules(batch=(DATA,), heads=(MODEL,), kv_heads=(MODEL,), vocab=(MODEL,)))
    violations = inspect_tiny(layout).verdict.violations
    assert any("the weight stack.layers.mlp.up.weight is replicated on every device" in v for v in violations)


@pytest.mark.long
def test_gathered_logits(monkeypatch):
    def naive(self, stream, batch, keys, options):
        with jax.named_scope("loss"):
            logits = reshard(full_logits(self, self.final_norm(stream.x)), PartitionSpec(None, None, None))
            picked = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
            return {"loss": jax.nn.logsumexp(logits, axis=-1) - picked}

    monkeypatch.setattr(GPT, "losses", naive)
    violations = inspect_tiny().verdict.violations
    assert any("extra all-gather over model in loss forward" in v and "the logits, unsharded" in v for v in violations)


# --- single lines, on collectives made by hand


RUN = tiny()


def collective(
    phase="layer forward", kind="all-reduce", axes=(MODEL,), count=12, arrays=((2, 64, 64),), dtype="bf16", narrow=()
):
    shapes, path = tuple(Array(dtype, dims) for dims in arrays), f"jit(step)/{phase}/dot"
    return Collective(kind, "c", axes, 4, 1, phase, path, True, count, True, shapes, False, (), narrow)


def whole_program() -> list[Collective]:
    """What the contract of `RUN` asks for."""
    gradients = next(required.elements for required in required_of(RUN) if required.line.pooled)
    return [
        collective(),
        collective("layer recompute", count=6),
        collective("layer backward", count=12),
        collective("embedding forward", count=2),
        collective("loss forward", count=2, arrays=((2, 64),), dtype="f32"),
        collective("loss forward", count=2, arrays=((256,),), dtype="f32"),
        collective("loss backward", count=2),
        collective("gradients", axes=(DATA,), count=1, arrays=((gradients + 1,),), dtype="f32"),
        collective("optimizer", count=1, arrays=((), ()), dtype="f32"),
    ]


def violations(collectives, is_gpu=True):
    landmarks = Landmarks({"mlp.up": (3, 64, 256)}, logits=2 * 64 * 256)
    return check(collectives, required_of(RUN), landmarks, is_gpu=is_gpu).violations


def test_the_whole_program_holds():
    assert violations(whole_program()) == ()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (collective(count=3), "3 extra all-reduce over model in layer forward: bf16[2,64,64], from op_name"),
        (collective("layer backward", "all-gather", arrays=((64, 256),)), "the weight mlp.up, unsharded"),
        (collective("other", "all-to-all", arrays=((9, 999),)), "12 extra all-to-all over model in other"),
        (collective("layer forward", arrays=((),)), "extra all-reduce over model in layer forward: bf16[]"),
        (collective("gradients", axes=(DATA, MODEL), arrays=((4000,),)), "extra all-reduce over data+model"),
        (collective("other", axes=None, count=1, arrays=((),)), "match no set of mesh axes"),
        (collective("other", "teleport", count=1, arrays=((),)), "is of an unknown kind"),
    ],
)
def test_what_is_too_much(extra, message):
    (found, *_) = violations([*whole_program(), extra])
    assert message in found


def test_what_is_missing():
    program = [c for c in whole_program() if c.phase != "layer recompute"]
    assert violations(program) == (
        "6 of 6 all-reduce over model missing in layer recompute: 8,192 elements each (batch*sequence*hidden)",
    )


def test_loops_of_different_lengths_add_up_to_each_line():
    """Phases of a pipeline: of 72 and 42 executions, four of each are one line's, and a fifth of each is another's."""
    each = Expectation("layer forward", "all-gather", MODEL, "456", "64")
    pooled = Expectation("layer forward", "all-gather", MODEL, "228", "64", pooled=True, hoisted=True)
    asked = [Requirement(each, 456, 64, "bf16"), Requirement(pooled, 228, 64, "bf16")]
    program = [collective(kind="all-gather", count=n, arrays=((64,),)) for n in (72, 42) for _ in range(5)]
    assert check(program, asked, Landmarks(), is_gpu=True).violations == ()
    (found, *_) = check(program[3:], asked, Landmarks(), is_gpu=True).violations
    assert "of 456 all-gather over model missing in layer forward" in found


@pytest.mark.parametrize("order", [1, -1])
def test_sums_of_gradients_in_loops_and_once_a_step_are_counted_together(order):
    """Of 2 microbatches: 6 arrays of layers in a loop, and of an own layer 2, or 1 of their sum."""
    asked = [
        Requirement(Expectation("layer backward", "all-reduce", MODEL, "6", "64", pooled=True), 6, 64, "bf16"),
        Requirement(
            Expectation("layer backward", "all-reduce", MODEL, "2", "128", pooled=True, hoisted=True), 2, 128, "bf16"
        ),
    ][::order]
    looped = [collective("layer backward", count=6, arrays=((64,),))]
    for own in (
        collective("layer backward", count=2, arrays=((128,),)),
        collective("gradients", count=1, arrays=((128,),)),
    ):
        assert check([*looped, own], asked, Landmarks(), is_gpu=True).violations == ()
    (found,) = check(looped, asked, Landmarks(), is_gpu=True).violations
    assert "sends 384 elements per step instead of 640" in found


@pytest.mark.parametrize("order", [1, -1])
def test_of_sums_counted_together_one_may_be_in_another_phase(order):
    """Of adapters in the recompute, beside gradients of matrices that several ranks hold alike."""
    line = partial(Expectation, "layer backward", "all-reduce", MODEL, "6", pooled=True)
    again = Requirement(line("64", also="layer recompute"), 6, 64, "bf16")
    asked = [again, Requirement(line("128"), 6, 128, "bf16")][::order]
    found = (("layer recompute", 64), ("layer backward", 128))
    program = [collective(phase, count=6, arrays=((elements,),)) for phase, elements in found]
    assert check(program, asked, Landmarks(), is_gpu=True).violations == ()


def test_numbers_are_counted_apart_from_wide_arrays_of_another_type():
    """Largest values for scales in 8 bits, of the compute dtype, beside sums of norms' gradients in float32."""
    line = partial(Expectation, "layer backward", "all-reduce", MODEL, pooled=True)
    asked = [
        Requirement(line("1", "512"), 1, 512, "bf16"),
        Requirement(line("1", "8192", hoisted=True), 1, 8192, "f32"),
    ]
    scalars = collective("layer backward", count=512, arrays=((),))
    arrays = collective("layer backward", count=2, arrays=((4096,),), dtype="f32")
    assert check([scalars, arrays], asked, Landmarks(), is_gpu=True).violations == ()
    fewer = replace(scalars, count=500)
    assert "sends f32 instead of bf16" in check([fewer, arrays], asked, Landmarks(), is_gpu=True).violations[0]


def test_wider_types_break_bytes_on_gpus_and_are_noted_on_cpus():
    wide = [collective(dtype="f32"), *whole_program()[1:]]
    (found,) = violations(wide)
    assert "sends f32 instead of bf16, 2x the bytes" in found
    assert violations(wide, is_gpu=False) == ()


def test_gradients_summed_in_bf16_are_seen_in_programs_for_cpus_too():
    """XLA widens them there; all of them, or one of two."""
    program, rest = whole_program(), whole_program()[8:]
    size = program[7].elements - 1
    all_narrow = collective("gradients", axes=(DATA,), count=1, arrays=((size,),), dtype="f32", narrow=(True,))
    (found,) = violations([*program[:7], all_narrow, *rest], is_gpu=False)
    assert found.startswith("all-reduce over data in gradients reduces bf16 instead of f32: f32[")
    halves = ((size - 2000,), (2000,))
    one = collective("gradients", axes=(DATA,), count=1, arrays=halves, dtype="f32", narrow=(False, True))
    few, extra = violations([*program[:7], one, *rest], is_gpu=False)
    assert "2,000 too few" in few and "1 extra all-reduce over data in gradients: f32[2000]" in extra


@pytest.mark.long
def test_layers_gathered_all_at_once_are_called_that(monkeypatch):
    def early(records, wrapped):
        def one(record, leaf):
            if record.is_stacked and is_wrapped(leaf):
                leaf = replace(leaf, names=record.logical_axes, reduction=record.grad_reduction)
            return materialize(leaf)

        return jax.tree.map(one, records, wrapped, is_leaf=is_wrapped)

    monkeypatch.setattr(gradients, "materialize_outside_stacks", early)
    (found,) = inspect_tiny(replace(TENSOR, zero=3), zero=3, microbatch_size=None).verdict.violations
    assert found.startswith("all-gather over data in parameters gathers all layers at once, outside the loop")
    assert "stack.layers.mlp.up.weight (f32[2,64,64])" in found and "too few" not in found


def test_three_summed_cotangents_are_not_one():
    """Operations may be right and the traffic threefold: every array counts."""
    threefold = [*whole_program()[:2], collective("layer backward", count=12, arrays=((2, 64, 64),) * 3)]
    found = violations([*threefold, *whole_program()[3:]])
    assert any("24 extra all-reduce over model in layer backward" in v for v in found)


def test_gradients_reduced_once_per_microbatch_are_too_many():
    program = whole_program()
    program[7] = collective("gradients", axes=(DATA,), count=2, arrays=((program[7].elements,),), dtype="f32")
    (found,) = violations(program)
    assert "too many" in found


def test_cpu_programs_may_write_a_reduce_scatter_as_all_reduce_and_slice():
    line = Expectation("layer forward", "reduce-scatter", MODEL, "2*layers*microbatches", "batch*sequence*hidden")
    asked = required_of(RUN, Contract("sequence", (line,)))
    whole = [collective(kind="all-reduce", dtype="f32")]
    on_cpu = check(whole, asked, Landmarks(), is_gpu=False)
    assert on_cpu.holds
    assert any("all-reduce and slice" in note for note in on_cpu.lines[0].notes)
    on_gpu = check(whole, asked, Landmarks(), is_gpu=True)
    assert [v.split(" in ")[0] for v in on_gpu.violations] == [
        "12 of 12 reduce-scatter over model missing",
        "12 extra all-reduce over model",
    ]
