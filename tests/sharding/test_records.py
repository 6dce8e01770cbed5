"""Records say over which axes a gradient is summed, and which dimension ZeRO splits; no device is needed to tell."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.layout.layouts import NOT_SHARDED, TENSOR_RULES, Layout
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.rules import Axes, Rules
from mtjax.sharding.axes import partition_spec, spec, use_rules
from mtjax.sharding.gradients import Accumulate, ManualRegion, distributed_gradients
from mtjax.sharding.param_comm import GradReduction
from mtjax.sharding.param_specs import param_specs
from mtjax.sharding.zero import StepReduction
from tests.tiny import Whole, mesh_of, program_of

STAGED = dataclasses.replace(TENSOR_RULES, layers=("stage",))
GROUPED = dataclasses.replace(TENSOR_RULES, batch=("data", "shard"))
WITH_EXPERTS = dataclasses.replace(TENSOR_RULES, batch=("data", "expert"), features=("expert",))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("rules", "mesh", "names", "total", "stored"),
    [
        (TENSOR_RULES, "2x4", ("vocab", "embed"), GradReduction(("data",), 1, ("data",), 2), P("model", "data")),
        (TENSOR_RULES, "1x4", ("vocab", "embed"), GradReduction((), NOT_SHARDED, (), 1), P("model", None)),
        (STAGED, "2x2x2", ("layers", "embed"), GradReduction(("data",), 1, ("data",), 2), P("stage", "data")),
        (STAGED, "2x2x2", ("embed",), GradReduction(("data",), 0, ("data",), 2), P("data")),
        (STAGED, "1x2x2", ("embed",), GradReduction((), NOT_SHARDED, (), 1), P(None)),
        (
            GROUPED,
            "data=2,shard=2,model=2",
            ("vocab", "embed"),
            GradReduction(("shard",), 1, ("shard",), 2),
            P("model", "shard"),
        ),
        (GROUPED, "data=2,shard=3", ("embed",), GradReduction(("data", "shard"), NOT_SHARDED, (), 1), P(None)),
        (
            WITH_EXPERTS,
            "data=2,expert=2",
            ("features", "mlp"),
            GradReduction(("data",), NOT_SHARDED, (), 1),
            P("expert", "model"),
        ),
        (
            WITH_EXPERTS,
            "data=2,expert=2",
            ("embed",),
            GradReduction(("data", "expert"), 0, ("data", "expert"), 4),
            P(("data", "expert")),
        ),
    ],
)
def test_a_gradient_is_summed_over_the_axes_that_do_not_split_its_parameter(rules, mesh, names, total, stored):
    shape = parse_mesh(mesh)
    (record,) = param_specs([names], [array(*[8] * len(names))], Layout(rules, zero=3), shape, "bfloat16")
    assert record.grad_reduction == total
    assert record.storage_spec == stored
    assert (record.gather_dtype is None) == (total.dim == NOT_SHARDED)
    assert record.deferred_axes == (("stage",) if shape.stage > 1 and "layers" not in names else ())


def test_a_record_of_a_stack_knows_one_layer():
    records = program_of("2x4", zero=3).records
    up = records["stack"]["layers"]["mlp"]["up"]["weight"]
    assert (up.name, up.logical_axes, up.shape) == (
        "stack.layers.mlp.up.weight",
        ("layers", "embed", "mlp"),
        (2, 32, 128),
    )
    assert up.is_stacked and up.is_matrix
    assert (up.layer_logical_axes, up.grad_reduction.dim, up.layer_grad_reduction.dim) == (("embed", "mlp"), 1, 0)
    assert (up.compute_spec, up.storage_spec) == (P(None, None, "model"), P(None, "data", "model"))
    embedding = records["embedding"]
    assert not embedding.is_stacked and embedding.layer_grad_reduction == embedding.grad_reduction


@dataclasses.dataclass(frozen=True)
class WithStates(Rules):
    """A new logical name is one line; here over two mesh axes."""

    states: Axes = ("data", "model")


def test_a_new_name_may_be_split_over_two_mesh_axes():
    """Spec, shards, and gradients: every data rank has rows of its own, so nothing is summed over `data`."""
    rules, mesh, shape = WithStates(**vars(TENSOR_RULES)), mesh_of("2x4"), MeshShape(data=2, model=4)
    random = np.random.default_rng(0)
    table, x = (random.normal(size=size).astype(np.float32) for size in ((16, 3), (8, 3)))
    with use_rules(rules):
        assert spec("states", "embed") == P(("data", "model"), None)

    place = NamedSharding(mesh, partition_spec(rules, ("states", "embed")))
    parameters = {"table": jax.device_put(table, place)}
    assert {shard.data.shape for shard in parameters["table"].addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(np.asarray(parameters["table"]), table)

    records = param_specs({"table": ("states", "embed")}, parameters, Layout(rules), shape, "float32")
    assert records["table"].grad_reduction.axes == () and records["table"].compute_spec == P(("data", "model"), None)

    def loss_sum(parameters, batch):
        with use_rules(rules):
            out = jax.numpy.einsum("sh,bh->bs", parameters["table"], batch, out_sharding=spec("batch", "states"))
        return (out**2).sum()

    region, reduction = ManualRegion(shape, rules, records), StepReduction(records, zero=0, num_microbatches=2)
    with jax.set_mesh(mesh):
        batch = jax.device_put(x, NamedSharding(mesh, partition_spec(rules, ("batch",))))
        gradients_of = distributed_gradients(Whole(loss_sum), batch, region, Accumulate(2), reduction)
        losses, gradients = jax.jit(gradients_of)(parameters, region.shard_batch(batch))
    products = [rows @ samples.T for rows, samples in zip(np.split(table, 2), np.split(x, 2), strict=True)]
    expected = [2 * product @ samples for product, samples in zip(products, np.split(x, 2), strict=True)]
    np.testing.assert_allclose(losses["loss"], sum((product**2).sum() for product in products), rtol=1e-5)
    np.testing.assert_allclose(gradients["table"], np.concatenate(expected), rtol=1e-4)
    assert gradients["table"].sharding.spec == P(("data", "model"), None)
