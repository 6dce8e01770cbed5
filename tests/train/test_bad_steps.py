"""Steps with numbers that are not finite: found, named, skipped by every replica; they end the run if they persist."""

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtjax.config import Training, replace, validate
from mtjax.errors import UserError
from mtjax.models.pipeline_model import TrunkPipeline
from mtjax.sharding.param_specs import shardings
from mtjax.train import loop, setup
from mtjax.train.optimizer import ALL_FINITE, CheckedTensor
from mtjax.train.skipped_steps import NonfiniteSteps, bad_parameter, first_bad, tensors, tensors_of
from mtjax.train.step import TrainStep
from tests.tiny import batch_of, initial_state, mesh_of, program_of, records_like, run_steps, tiny_config

PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Without masks programs compile in two thirds of the time."""
UP = ("stack", "layers", "mlp", "up", "weight")


@dataclass(frozen=True)
class SpoiltCut(TrunkPipeline):
    """A model with a sample whose loss is NaN."""

    sample: int

    def loss_sums(self, parameters, microbatch):
        return self.spoilt(super().loss_sums(parameters, microbatch), microbatch)

    def head_losses(self, parameters, boundary, microbatch):
        return self.spoilt(super().head_losses(parameters, boundary, microbatch), microbatch)

    def spoilt(self, sums, microbatch):
        here = (microbatch[0]["sample_index"] == self.sample).any()
        return {name: jnp.where(here, math.nan, 1.0) * value for name, value in sums.items()}


class SpoiltGradient(TrainStep):
    """A program with a finite loss and one gradient, of one layer of one parameter, that is infinite from a step on."""

    first_sample = 40
    value, places = math.inf, (slice(None), slice(None))

    def gradients(self, parameters, batch, key, scale=None):
        loss, parts, gradients = super().gradients(parameters, batch, key, scale)
        late = (batch["sample_index"] >= self.first_sample).all()
        node = gradients
        for name in UP[:-1]:
            node = node[name]
        here = np.zeros(node[UP[-1]].shape, bool)
        here[1, *self.places] = True
        node[UP[-1]] = jnp.where(late & here, self.value, node[UP[-1]])
        return loss, parts, gradients


class Spoilt(SpoiltGradient):
    """A program in which one sample's loss is NaN, so that one data rank's gradients are.

    Later two elements, on two devices, have squares that are finite, and whose sum is not.
    """

    sample = 13
    value, places = 1.5e19, (0, [0, -1])

    def loss_function(self, options):
        return SpoiltCut(**vars(super().loss_function(options)), sample=self.sample)


@cache
def spoilt(kind, **fields):
    config = tiny_config(**PLAIN, **fields)
    return kind(config, mesh_of("2x4"))


def exact(program):
    """`program` with XLA's own kernels: those that the tests ask for round a fused sum in another order."""
    options = program.xla.options | {"xla_cpu_use_fusion_emitters": True}
    program.xla = dataclasses.replace(program.xla, options=options)
    return program


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    "fields",
    [{"compute_dtype": "float32"}, {"compute_dtype": "bfloat16", "zero": 3, "microbatch_size": 2}],
    ids=["float32", "bfloat16, ZeRO-3"],
)
def test_a_nan_of_one_replica_skips_its_step_on_all_and_no_other(fields):
    program = spoilt(Spoilt, **fields)
    state, first = run_steps(program, 1)
    before = flat((state.parameters, state.optimizer))
    state, metrics = program.step(state, batch_of(program, 1))
    assert math.isnan(float(metrics["loss"]))
    assert float(metrics["skipped"]) == 1 and float(metrics["grad_norm"]) == 0
    assert tensors_of(program)[int(metrics["first_bad"])].layer == 1  # the last of two: all of them are spoilt
    assert int(state.step) == 2
    after = flat((state.parameters, state.optimizer))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    for leaf in jax.tree.leaves(state.parameters):
        by_place = {}
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(by_place.setdefault(str(shard.index), shard.data), shard.data)
    state, later = run_steps(program, 1, state)
    assert [m["skipped"] for m in (*first, *later)] == [0, 0]
    assert [m["first_bad"] for m in (*first, *later)] == [ALL_FINITE, ALL_FINITE]
    moved = flat((state.parameters, state.optimizer))
    assert all((moved[name] != value).any() for name, value in before.items())


@pytest.mark.long
def test_good_steps_are_those_of_a_program_that_never_skips():
    """The spoilt sample never comes: every number is that of the plain program."""
    found = run_steps(exact(spoilt(SpoiltGradient)), 3)
    expected = run_steps(exact(spoilt(TrainStep)), 3)
    assert [m["loss"] for m in found[1]] == [m["loss"] for m in expected[1]]
    jax.tree.map(np.testing.assert_array_equal, flat(found[0].parameters), flat(expected[0].parameters))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_the_first_bad_tensor_is_the_one_that_was_spoilt(bad):
    program = program_of("2x4", zero=1)
    values = jax.tree.map(np.asarray, initial_state(program).parameters)
    named = tensors_of(program)
    assert len(named) == len(set(named))
    find = jax.jit(lambda loss, tree: first_bad(loss, tree, program.records))

    def found(loss, tree):
        with jax.set_mesh(program.mesh):
            placed = jax.device_put(tree, program.state_sharding.parameters)
            return int(find(jnp.float32(loss), placed))

    assert found(1.0, values) == ALL_FINITE
    assert found(math.nan, values) == len(named)
    random = np.random.default_rng(0)
    leaves, tree = jax.tree_util.tree_flatten_with_path(values)
    for number, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        place = tuple(int(random.integers(n)) for n in leaf.shape)
        changed = leaf.copy()
        changed[place] = bad
        spoilt = jax.tree.unflatten(tree, [changed if i == number else a for i, (_, a) in enumerate(leaves)])
        layer = place[0] if ".layers." in name else None
        assert named[found(1.0, spoilt)] == CheckedTensor(name, layer), name


def test_one_scalar_crosses_the_mesh_though_a_device_has_some_of_the_layers():
    """300 layers, a part of each device's own: stage 1 of ZeRO may split stacks so."""
    mesh = mesh_of("2x4")
    axes = {"stack": {"layers": {"a": ("layers", "mlp")}}, "b": ("embed",)}
    values = {"stack": {"layers": {"a": np.ones((300, 8), np.float32)}}, "b": np.ones(3, np.float32)}
    places = {"stack": {"layers": {"a": P("data", "model")}}, "b": P()}
    records = records_like(axes, values)
    find = jax.jit(lambda tree: first_bad(jnp.float32(0), tree, records))
    for spoilt in ([], [3], [170], [170, 3]):
        values["stack"]["layers"]["a"][...] = 1
        values["stack"]["layers"]["a"][spoilt, 5] = np.nan
        with jax.set_mesh(mesh):
            placed = jax.device_put(values, shardings(places, mesh))
            place = int(find(placed))
            text = find.lower(placed).compile().as_text()
        expected = CheckedTensor("stack.layers.a", max(spoilt)) if spoilt else None
        assert (None if place == ALL_FINITE else tensors(records)[place]) == expected
        assert re.findall(r"= (\S+) all-(?:reduce|gather)\(", text or "") == ["s32[]"]


def test_a_parameter_that_is_not_finite_is_found_and_a_large_one_is_not():
    program = program_of("2x4")
    parameters = initial_state(program).parameters
    norm, up = parameters["final_norm"], parameters["stack"]["layers"]["mlp"]["up"]
    norm["scale"] = jax.device_put(np.full(norm["scale"].shape, 1e38, np.float32), norm["scale"].sharding)
    assert bad_parameter(program, parameters) is None
    weight = np.array(up["weight"])
    weight[0, 3, 17] = math.nan
    up["weight"] = jax.device_put(weight, up["weight"].sharding)
    assert str(bad_parameter(program, parameters)) == "stack.layers.mlp.up.weight, layer 0"


@pytest.mark.parametrize(("one", "other"), [("stack", "dense"), ("mamba", "attention")])
def test_tensors_come_as_the_backward_pass_meets_them(one, other):
    """Layers of two stacks take turns."""
    axes = {
        one: {"layers": {"a": ("layers", "embed"), "b": ("layers", "embed")}},
        "embedding": ("vocab", "embed"),
        "encoder": {"layers": {"a": ("layers", "embed")}},
        other: {"layers": {"a": ("layers", "embed")}},
    }
    stack = np.zeros((2, 3), np.float32)
    values = {
        one: {"layers": {"a": stack, "b": stack}},
        "embedding": np.zeros((5, 3), np.float32),
        "encoder": {"layers": {"a": stack}},
        other: {"layers": {"a": stack}},
    }
    records = records_like(axes, values)
    numbers_of = lambda name: {one: (1, 3), other: (0, 2)}.get(name.partition(".")[0], ())  # noqa: E731
    order = tensors(records, numbers_of)
    assert list(map(str, order)) == [
        f"{one}.layers.a, layer 3",
        f"{one}.layers.b, layer 3",
        f"{other}.layers.a, layer 2",
        f"{one}.layers.a, layer 1",
        f"{one}.layers.b, layer 1",
        f"{other}.layers.a, layer 0",
        "encoder.layers.a, layer 1",
        "encoder.layers.a, layer 0",
        "embedding",
    ]
    values["encoder"]["layers"]["a"] = np.full((2, 3), np.nan, np.float32)
    values[one]["layers"]["b"] = np.array([[0, np.inf, 0], [0, 0, 0]], np.float32)
    with jax.set_mesh(mesh_of("1x1")):
        assert int(first_bad(jnp.float32(0), values, records, numbers_of)) == 4


def follow(results, **fields):
    """(step, tensor) of what was skipped, and whether that is too many; batches of 8."""
    follower = NonfiniteSteps(Training(**fields), [CheckedTensor("a", 1), CheckedTensor("a", 0), CheckedTensor("b")])
    found = []
    for step, result in enumerate(results, 1):
        follower.add(step, range(8 * step - 8, 8 * step), {"loss": 1.0, **result})
        if step % 4 == 0 or step == len(results):
            found += follower.check()
        if follower.are_too_many:
            break
    return found, follower


def test_steps_in_a_row_are_counted_over_the_places_where_the_host_looks():
    good, bad = {"first_bad": ALL_FINITE}, {"first_bad": 1}
    found, follower = follow([good, bad, bad, good, bad, bad, bad, bad, good], max_nonfinite_steps=3)
    assert [s.step for s in found] == [2, 3, 5, 6, 7]  # and no further: 5, 6 and 7 are three in a row
    assert follower.are_too_many
    assert [s.step for s in follower.in_a_row] == [5, 6, 7]
    assert str(found[0]) == (
        "its loss is 1 and the first gradient that is not finite is that of a, layer 0 (samples 8 to 15)"
    )
    found, follower = follow([bad, bad, good, bad, bad, good], max_nonfinite_steps=3)
    assert len(found) == 4 and not follower.are_too_many and not follower.in_a_row


def test_a_norm_that_overflows_skips_its_step():
    program = spoilt(Spoilt, compute_dtype="float32")
    metrics = program.step(initial_state(program), batch_of(program, 5))[1]
    assert metrics["skipped"] == 1 and metrics["first_bad"] == len(tensors_of(program)) and metrics["grad_norm"] == 0
    (skipped,), _ = follow([{"first_bad": 3}])
    assert str(skipped) == "its loss is 1, with finite gradients of a norm that is not (samples 0 to 7)"


def test_a_bad_loss_with_finite_gradients_is_named():
    (skipped,), _ = follow([{"first_bad": 3, "loss": math.inf}])
    assert str(skipped) == "its loss is inf, with finite gradients (samples 0 to 7)"


def test_a_loss_scale_that_can_still_shrink_ends_no_run():
    """Of float16: 2^32 halves step by step, and only what overflows at the minimum is bad; so is a bad loss."""
    fields = {"compute_dtype": "float16", "max_nonfinite_steps": 3, "min_loss_scale": 4.0}
    shrinking = [{"first_bad": 0, "loss_scale": 2.0**n} for n in range(32, 2, -1)]
    found, follower = follow(shrinking, **fields)
    assert not found and not follower.are_too_many
    found, follower = follow([*shrinking, *3 * [{"first_bad": 0, "loss_scale": 4.0}]], **fields)
    assert [s.step for s in found] == [31, 32, 33] and follower.are_too_many
    found, follower = follow(3 * [{"first_bad": 3, "loss": math.nan, "loss_scale": 2.0**32}], **fields)
    assert len(found) == 3 and follower.are_too_many
    found, _ = follow(2 * [{"first_bad": 0, "loss_scale": 8.0}], loss_scale=8.0, **fields)
    assert len(found) == 2


def test_a_run_of_bad_steps_ends_with_step_samples_and_tensor(tmp_path, monkeypatch, capsys):
    """Logged every 4 steps; the first bad step is the 6th, the run goes on to the 8th, where it is seen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(f"a few words, number {i}, and some more" for i in range(400)))
    monkeypatch.setattr(setup, "make_train_step", SpoiltGradient)
    config = replace(
        tiny_config(**PLAIN, vocab_size=None, steps=20, mesh="2x4", max_nonfinite_steps=3),
        data="text.txt",
        cache_dir=tmp_path / "cache",
        log_every=4,
        checkpoint_every=5,
        valid_every=0,
    )
    with pytest.raises(UserError) as ended:
        loop.train(config, "tiny")
    assert re.fullmatch(
        r"3 steps in a row were skipped, from step 6 on: its loss is [\d.]+ and the first gradient that is not finite "
        r"is that of stack\.layers\.mlp\.up\.weight, layer 1 \(samples 40 to 47\); the last good checkpoint is "
        r"runs/tiny-1/checkpoints/5: lower --learning-rate, raise --warmup-steps, or look at these samples",
        str(ended.value),
    )
    said = capsys.readouterr().out
    assert "step 6 skipped: its loss is" in said and "step 8 skipped: its loss is" in said
    assert "step 5 skipped" not in said


def test_no_bad_steps_at_all_are_refused():
    with pytest.raises(UserError, match="max_nonfinite_steps is 0, and must be at least 1"):
        validate(tiny_config(max_nonfinite_steps=0))
