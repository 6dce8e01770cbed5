"""A mixer, a kind of layer and a family of a test's own, by rows in the registries; models cut; layers with a state."""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import reshard

from mtjax.config import Parallel
from mtjax.families.registry import FAMILIES
from mtjax.layout.layouts import TENSOR
from mtjax.layout.stacks import stacks_of
from mtjax.models.language_model import run_sections
from mtjax.models.layer import Stack, run_layer
from mtjax.models.layer_context import LayerContext
from mtjax.models.layer_loop import LayerLoopSettings, loop_over_layers
from mtjax.models.mixers.registry import KINDS, MIXERS
from mtjax.models.ops import Linear, draw_normal
from mtjax.sharding.axes import spec, use_rules
from mtjax.sharding.param_comm import LayerInputs
from mtjax.sharding.vocab import LossOptions
from mtjax.train.step import make_train_step
from tests.families.dummy import ROW
from tests.tiny import VOCAB, batch_of, mesh_of, num_carried, program_of, run_steps, tiny_config

LAYERS = 4


class Bilinear(nnx.Module):
    """Mixes nothing but the channels of a token: the product of two projections, projected back."""

    scope: ClassVar[str] = "mlp"
    init_number: ClassVar[int] = 7
    dropout_site: ClassVar[int] = 7

    def __init__(self, model: Any, *, output_std: float, key: Any) -> None:
        up, down = jax.random.split(key)
        embed, inner = {"embed": model.hidden_size}, {"mlp": 3 * model.hidden_size}
        self.up = Linear(embed, {"gate": 2, **inner}, std=1.0, key=up)
        self.down = Linear(inner, embed, std=1.0, sequence="act_seq", key=down)

    def __call__(self, x: Any, context: LayerContext, state: Any) -> tuple[Any, Any]:
        x = self.up(reshard(x, spec("batch", "seq", "embed")))
        return self.down(x[:, :, 0] * x[:, :, 1]), state


class Meter(nnx.Module):
    """Adds what its state says, or 1, to the stream; hands on how often it ran, and the stream's mean."""

    scope: ClassVar[str] = "meter"
    init_number: ClassVar[int] = 8
    dropout_site: ClassVar[int] = 8

    def __init__(self, model: Any, *, output_std: float, key: Any) -> None:
        self.gain = draw_normal(key, {"embed": model.hidden_size}, 1.0)

    def __call__(self, x: Any, context: LayerContext, state: Any) -> tuple[Any, Any]:
        before = {"runs": jnp.int32(0), "shift": jnp.float32(1)} if state is None else state
        after = before | {"runs": before["runs"] + 1, "mean": (x**2).mean()}
        return x * self.gain[...] + before["shift"], after


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that make the mixers, the kinds of layer and the family known, until the test ends."""
    for registry, name, row in (
        (MIXERS, "bilinear", lambda _: Bilinear),
        (MIXERS, "meter", lambda _: Meter),
        (KINDS, "plain", ("attention", "bilinear")),
        (KINDS, "metered", ("meter", "mlp")),
        (FAMILIES, "dummy", ROW),
    ):
        monkeypatch.setitem(registry, name, row)


@pytest.mark.long
@pytest.mark.usefixtures("rows")
def test_a_mixer_and_a_family_are_a_class_and_a_row_each():
    results = {}
    for mesh, settings in (("1x1", {}), ("2x4", {"sequence_parallel": True, "zero": 1, "microbatch_size": 2})):
        program = make_train_step(tiny_config(family="dummy", **settings), mesh_of(mesh))
        results[mesh] = run_steps(program, 2)
    for name in ("loss", "grad_norm"):
        split, whole = ([m[name] for m in results[mesh][1]] for mesh in ("2x4", "1x1"))
        np.testing.assert_allclose(split, whole, rtol=1e-5, err_msg=name)
        assert len(set(whole)) == 2
    layers = results["2x4"][0].parameters["layers_of_mine"]["layers"]
    assert set(layers) == {"attention", "attention_norm", "bilinear", "bilinear_norm"}
    assert layers["bilinear"]["up"]["weight"].shape == (2, 32, 2, 96)


DENSE: dict[str, Any] = {"family": "llama", "num_experts": 4, "first_dense_layers": 1}


@pytest.mark.parametrize("fields", [*({"family": name} for name in ("gpt", "llama", "bert", "t5")), DENSE])
def test_sections_have_the_names_of_their_stacks_parameters(fields: dict[str, Any]):
    """What is stacked along `layers` is what the sections name, so that a schedule can give it to stages by name."""
    program = program_of("1x1", **fields)
    model = program.model(program.abstract_parameters)
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(program.logical_axes, is_leaf=is_names)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, axes in leaves if axes[0] == "layers"]
    stacks = {name for section, own in model.sections.items() for name in (section, *own.other_stacks)}
    assert {name.partition(".layers.")[0] for name in names} == stacks


def on_mesh(program: Any, function: Any) -> Any:
    """`function` on the program's mesh, compiled once."""

    @jax.jit
    def run(*arguments: Any) -> Any:
        with use_rules(program.layout.rules):
            return function(*arguments)

    def call(*arguments: Any) -> Any:
        with jax.set_mesh(program.mesh):
            return jax.tree.map(np.asarray, run(*arguments))

    return call


def run_layers(
    layers: Any, numbers: Any, x: Any, context: LayerContext, loop_settings: LayerLoopSettings, states: Any = None
) -> Any:
    return loop_over_layers(partial(run_layer, context), LayerInputs(layers, numbers, states), loop_settings)(x)


def cut(layers: Any, part: slice) -> Any:
    return jax.tree.map(lambda a: a[part], layers)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in ("gpt", "t5")])
def test_a_model_can_be_cut_into_embedding_layers_and_losses(family: str):
    """Every piece by itself, with nothing but the stream between them: the losses are those of the whole model."""
    program = program_of("1x4", family=family, num_layers=3)
    parameters, batch, options = program.initialize(0).parameters, batch_of(program, 0), LossOptions(VOCAB)

    def whole(parameters: Any, batch: Any, keys: Any) -> Any:
        model = program.model(parameters)
        return model.losses(run_sections(model, batch, keys)[0], batch, keys, options)

    def in_pieces(parameters: Any, batch: Any, keys: Any) -> Any:
        model, stream = program.model(parameters), None
        for section in model.sections.values():
            stream = section.embed(batch, keys, stream)
            for part in (slice(0, 1), slice(1, 3)):
                context = section.context(batch, keys, stream)
                layers, numbers = cut(section.stack.layers, part), jnp.arange(3)[part]
                stream = stream._replace(x=run_layers(layers, numbers, stream.x, context, LayerLoopSettings())[0])
        assert stream is not None
        return model.losses(stream, batch, keys, options)

    run, (keys, others) = on_mesh(program, whole), jax.random.split(jax.random.key(1), (2, 8))
    expected = run(parameters, batch, keys)["loss"]
    np.testing.assert_allclose(on_mesh(program, in_pieces)(parameters, batch, keys)["loss"], expected, rtol=1e-6)
    assert np.abs(run(parameters, batch, others)["loss"] - expected).max() > 1e-3  # dropout's keys go the whole way


RECOMPUTE = {
    "none": LayerLoopSettings(),
    "full": LayerLoopSettings("full"),
    "groups": LayerLoopSettings("full", "uniform", 2),
    "block": LayerLoopSettings("full", "block", 3),
}


def metered(loop_settings: LayerLoopSettings) -> Any:
    """(layers, states) -> (the stream, the states), of a stack of metered layers; and its layers."""
    model = tiny_config(num_layers=LAYERS, attention="xla").model
    own = dataclasses.replace(stacks_of(model)[0], kind="metered")
    stack = Stack(
        model, jnp.float32, layer_stack=own, loop_settings=loop_settings, parallel=Parallel(), key=jax.random.key(0)
    )
    x = jax.random.normal(jax.random.key(2), (2, 16, 32), out_sharding=spec("batch", "act_seq", "embed"))

    def run(layers: Any, states: Any) -> Any:
        return run_layers(layers, jnp.arange(LAYERS), x, LayerContext(), loop_settings, states)

    return run, stack.layers


def initial_states() -> Any:
    return {"meter": {"runs": jnp.arange(LAYERS) * 10, "shift": jnp.arange(LAYERS) * 0.5}}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("kind", RECOMPUTE)
def test_a_layer_passes_its_state_on(kind: str):
    """Each layer reads its own slice and hands on its own, whatever it computes again: as one layer at a time does."""
    with use_rules(TENSOR.rules), jax.set_mesh(mesh_of("1x4")):
        run, layers = metered(RECOMPUTE[kind])

        def one_by_one(layers: Any, states: Any) -> Any:
            x, after = jax.random.normal(jax.random.key(2), (2, 16, 32)), []
            for number in range(LAYERS):
                own = jax.tree.map(lambda a, number=number: a[number], (layers, states))
                x, state = own[0](x, LayerContext(), own[1])
                after.append(state)
            return x, jax.tree.map(lambda *a: jnp.stack(a), *after)

        (x, states), (expected, expected_states) = (
            jax.tree.map(np.asarray, jax.jit(f)(layers, initial_states())) for f in (run, one_by_one)
        )
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    np.testing.assert_array_equal(states["meter"]["runs"], np.arange(LAYERS) * 10 + 1)
    np.testing.assert_allclose(states["meter"]["mean"], expected_states["meter"]["mean"], rtol=1e-5)
    assert len(set(states["meter"]["mean"])) == LAYERS


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("kind", ["groups", "block"])
def test_what_a_state_says_can_be_differentiated(kind: str):
    """A loss of what layers hand on, such as experts' balance, has the same gradients whatever is recomputed."""
    with use_rules(TENSOR.rules), jax.set_mesh(mesh_of("1x1")):

        def gradients(loop_settings: LayerLoopSettings) -> Any:
            run, layers = metered(loop_settings)
            return jax.jit(jax.grad(lambda layers: run(layers, None)[1]["meter"]["mean"].sum(), allow_int=True))(layers)

        for found, expected in zip(
            *map(jax.tree.leaves, map(gradients, (RECOMPUTE[kind], LayerLoopSettings()))), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("rows")
def test_a_trunk_hands_each_section_its_states(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "plain", KINDS["metered"])
    program = make_train_step(tiny_config(family="dummy", num_layers=LAYERS), mesh_of("1x4"))
    parameters, batch = program.initialize(0).parameters, batch_of(program, 0)

    def run(parameters: Any, batch: Any) -> Any:
        return run_sections(program.model(parameters), batch, None, {"layers_of_mine": initial_states()})

    _, states = on_mesh(program, run)(parameters, batch)
    np.testing.assert_array_equal(states["layers_of_mine"]["meter"]["runs"], np.arange(LAYERS) * 10 + 1)


def test_layers_without_a_state_scan_the_stream_alone():
    """So that training compiles to what it would be if there were no states."""
    program = program_of("1x1")
    model = program.model(program.initialize(0).parameters)
    x = jnp.zeros((8, 16, 32))
    with use_rules(program.layout.rules), jax.set_mesh(program.mesh):
        traced = jax.make_jaxpr(lambda x: model.stack.over_layers(LayerContext())(x))(x)
        _, states = jax.eval_shape(model.stack.over_layers(LayerContext()), x)
    (scan,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "scan")
    assert states is None and len(scan.outvars) == num_carried(scan) == 1
