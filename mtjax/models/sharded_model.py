"""A model on a mesh, without an optimizer: all that converting, sampling and evaluating need; training adds to it."""

import dataclasses
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtjax.config import Config, replace
from mtjax.models.families.registry import LanguageModel, model_class
from mtjax.models.layer_context import RESIDUAL, with_text_lengths
from mtjax.models.pipeline_model import TrunkPipeline
from mtjax.models.trunk import HiddenStates, run_sections
from mtjax.sharding import placement
from mtjax.sharding.axes import current_rules, partition_spec, use_rules
from mtjax.sharding.gradients import distributed_losses, distributed_output
from mtjax.sharding.manual_region import ManualRegion
from mtjax.sharding.param_specs import dotted, param_specs, partition_specs, replicated_names
from mtjax.sharding.schedules.accumulate import Accumulate
from mtjax.sharding.schedules.microbatch_schedule import MicrobatchSchedule
from mtjax.sharding.schedules.order import Order
from mtjax.sharding.schedules.pipeline import PipelineSchedule
from mtjax.sharding.vocab import LossOptions
from mtjax.sharding.zero import gather_for_inference
from mtjax.theory.adapters import is_trainable
from mtjax.theory.attention import choose_kernel
from mtjax.theory.divisibility import check_config, parts_of_samples
from mtjax.theory.layout import Layout
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plan import Plan
from mtjax.theory.stages import Orders, layer_orders
from mtjax.theory.timetable import forward_timetable, timetable

Tree = Any
Batch = dict[str, Any]
"""The arrays that the family's `batch_arrays` names, [batch, ...], and sample_index [batch] uint32: each sample's
number in the run, from which its dropout derives."""


class ShardedModel:
    """A config's model on a mesh: abstract until a method is called.

    `records` has a record per parameter, `axes` only their logical names and `abstract_parameters` their shapes and
    types, all in trees like the parameters'. `attention_fallback` says why cuDNN's attention is not used although the
    config asks for it; otherwise None. `sections` names the stacks of layers in their order. Where a run `trains` the
    model, parameters lie as in its steps: in parts from ZeRO-1 on; else with ZeRO-3 alone.

    Raises:
      UserError: the model or its batch does not divide over the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None, *, trains: bool = False) -> None:
        kernel, self.attention_fallback = choose_kernel(config, mesh.devices.flat[0].platform)
        self.mesh, self.shape = mesh, MeshShape(**mesh.shape)
        self.config = replace(config, attention=kernel, mesh=str(self.shape))
        check_config(config, self.shape)
        layout = layout or Plan.of(config, self.shape).layout(config.model)
        self.layout = dataclasses.replace(layout, rules=layout.rules.over(self.shape.axes))
        self.family = model_class(config)
        with jax.set_mesh(mesh):
            model = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        self.sections = tuple((name, *section.others) for name, section in model.sections.items())
        self._graph, self._template = nnx.split(model)
        self.axes = placement.logical_axes(self._template)
        self.abstract_parameters = nnx.to_pure_dict(self._template)
        types = config.training.compute_dtype, config.parallel.grad_reduce_dtype
        known = (self.axes, self.abstract_parameters, self.layout, self.shape, *types)
        self.records = param_specs(*known, lambda name: trains and is_trainable(config.model, name))
        self.region = ManualRegion(self.shape, self.layout.rules, self.records)

    # --- parameters

    @property
    def stages(self) -> int:
        """Stages of the pipeline; 1 without one."""
        return self.shape.degree(self.layout.rules.layers)

    @property
    def layer_orders(self) -> Orders:
        """In which order the layers of each stack lie, where it is not their own."""
        return layer_orders(self.config.model, self.config.parallel)

    @cached_property
    def parameter_sharding(self) -> Tree:
        """Where each parameter lives between steps."""
        return placement.shardings(partition_specs(self.records, "storage_spec"), self.mesh)

    @property
    def restore_target(self) -> Tree:
        """Shapes, types and shardings of the parameters, into which saved ones are restored."""
        return placement.with_sharding(self.abstract_parameters, self.parameter_sharding)

    @property
    def replicated_names(self) -> list[str]:
        """Names of parameters that ZeRO leaves replicated because none of their dimensions is divisible."""
        return replicated_names(self.records, self.layout.zero)

    def initialize_parameters(self, seed: int) -> Tree:
        """Random parameters, created where they live: those with which a training run of this seed begins."""
        return self.on_mesh(jax.jit(self._drawn, out_shardings=self.parameter_sharding), jax.random.key(seed))

    def initialize_named(self, seed: int, names: Collection[str]) -> dict[str, Array]:
        """Some of these random parameters alone, by their dotted names."""

        def chosen(tree: Tree) -> dict[str, Any]:
            named = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
            return {name: named[name] for name in names}

        draw = jax.jit(lambda key: chosen(self._drawn(key)), out_shardings=chosen(self.parameter_sharding))
        return self.on_mesh(draw, jax.random.key(seed))

    def model(self, parameters: Tree) -> LanguageModel:
        """The model with these parameters."""
        state = jax.tree.map(lambda v: v, self._template)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._graph, state)

    def inference_model(self, parameters: Tree) -> LanguageModel:
        """The model with parameters as they are stored, to be traced without differentiating."""
        return self.model(gather_for_inference(self.records, parameters))

    # --- batches

    @property
    def batch_sharding(self) -> NamedSharding:
        """Where a batch lives: split by samples, and over `context` by their tokens; see `placement.of_dimensions`."""
        return placement.batch_sharding(self.mesh, self.layout.rules)

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The arrays of a batch that the model reads."""
        return tuple(self.abstract_batch())

    @property
    def sample_length_multiple(self) -> int:
        """The length of every sample is a multiple of it."""
        return parts_of_samples(self.layout, self.shape)

    def abstract_batch(self, global_batch_size: int | None = None) -> Batch:
        """Shapes, types and shardings of a batch."""
        samples = global_batch_size or self.config.training.global_batch_size
        each = self.family.batch_arrays(self.config) | {"sample_index": jax.ShapeDtypeStruct((), jnp.uint32)}
        arrays = {name: jax.ShapeDtypeStruct((samples, *a.shape), a.dtype) for name, a in each.items()}
        places = {name: placement.of_dimensions(self.batch_sharding, a.ndim) for name, a in arrays.items()}
        return placement.with_sharding(arrays, places)

    # --- losses

    def evaluate(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Each loss of a batch without dropout: its weighted sum, and the sum of the weights."""
        return self.on_mesh(self._compiled_evaluate, parameters, batch)

    def lower_evaluate(self) -> jax.stages.Lowered:
        """The program of `evaluate`, lowered from abstract values."""
        return self.on_mesh(self._compiled_evaluate.lower, self.restore_target, self.abstract_batch())

    def final_hidden_states(self, parameters: Tree, batch: Batch, microbatches: int | None = None) -> Array:
        """The residual stream behind the last layer, to be traced by the rules in force; dropout is off.

        With `microbatches` each rank runs its own samples, so many parts of them one after the other; stages know how
        many by themselves.
        """
        rules, schedule = current_rules(), self.microbatch_schedule(microbatches or 1)
        region, batch = dataclasses.replace(self.region, rules=rules), with_text_lengths(self.config.model, batch)
        if isinstance(schedule, PipelineSchedule) or rules.seq or microbatches is not None:
            place: Any = HiddenStates(partition_spec(rules, RESIDUAL))  # pyright: ignore[reportArgumentType]
            part = (batch, {}, None)
            return distributed_output(
                self.pipeline_model(self.loss_options), parameters, part, region, schedule, place
            ).x
        return run_sections(self.inference_model(parameters), batch, None)[0].x

    def pipeline_model(self, options: LossOptions) -> TrunkPipeline:
        """The model as schedules run it, with these losses."""
        return TrunkPipeline(self.model, options, self.sections)

    def microbatch_schedule(self, num_microbatches: int) -> MicrobatchSchedule:
        """The order in which microbatches go through the model."""
        stages, parallel = self.stages, self.config.parallel
        if stages == 1:
            training = self.config.training
            return Accumulate(num_microbatches, training.unroll_layers, training.compute_dtype)
        chunks = parallel.chunks * len(self.sections)
        return PipelineSchedule(
            timetable(parallel.pipeline_schedule, stages, num_microbatches, chunks),
            partial(forward_timetable, stages, chunks=chunks),
            self.config.training.microbatch_size,
            keeps_inputs=self.config.training.recompute == "full",
            order=Order(is_needed=self.mesh.devices.flat[0].platform == "cpu"),
        )

    @property
    def loss_options(self) -> LossOptions:
        """How training computes losses, by the config."""
        options, vocab_size = self.config.optimizer, self.config.model.vocab_size
        assert vocab_size is not None  # check_config has asked for it
        return LossOptions(vocab_size, self.config.training.loss_chunk, options.label_smoothing, options.z_loss)

    def on_mesh(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls with the mesh in force. Arguments are built without it, because optax puts scalars on a real device."""
        with jax.set_mesh(self.mesh):
            return function(*arguments)

    # --- what is compiled

    @cached_property
    def _compiled_evaluate(self) -> Any:
        return jax.jit(self._evaluate)

    def _evaluate(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        plain = dataclasses.replace(self.loss_options, label_smoothing=0.0, z_loss=0.0)
        weights, batch = self.family.loss_weights(batch), with_text_lengths(self.config.model, batch)
        with use_rules(self.layout.rules):
            part, schedule = (batch, weights, None), self.microbatch_schedule(1)
            sums = distributed_losses(self.pipeline_model(plain), parameters, part, self.region, schedule)
            return {name: (total, weights[name].sum()) for name, total in sums.items()}

    def _drawn(self, key: Array) -> Tree:
        """Parameters drawn from half of a run's key; dropout derives from the other half."""
        model_key, _ = jax.random.split(key)
        return nnx.to_pure_dict(nnx.state(self._build(model_key)))

    def _build(self, key: Array) -> LanguageModel:
        with use_rules(self.layout.rules):
            return self.family(self.config, key=key)
