"""A model on a mesh, without an optimizer: the basis of conversion, generation, evaluation and training."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from mtjax.config import Config, replace
from mtjax.config.adapters import is_trainable
from mtjax.config.sizes import output_shape
from mtjax.layout.attention_kernel import Kernel, choose_kernel
from mtjax.layout.divisibility import check_config
from mtjax.layout.layouts import Layout
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.stages import Orders, layer_orders
from mtjax.models.language_model import LanguageModel, TrunkLossFunction, model_class
from mtjax.sharding.axes import use_rules
from mtjax.sharding.gradients import Accumulate, ManualRegion, MicrobatchSchedule
from mtjax.sharding.param_specs import (
    batch_sharding,
    first_dimensions,
    logical_axes,
    param_specs,
    partition_specs,
    shardings,
    with_sharding,
)
from mtjax.sharding.vocab import LossOptions
from mtjax.sharding.zero import gather_for_inference

if TYPE_CHECKING:
    from mtjax.models.evaluation import Evaluation

Tree = Any
GlobalBatch = dict[str, Any]
"""The arrays that `LanguageModel.batch_arrays` names, [batch, ...], and sample_index [batch] uint32: each sample's
number in the run, from which its dropout keys derive."""


class ShardedModel:
    """A config's model on a mesh: shapes and shardings, and functions of arrays; it holds no arrays.

    `records` has the `ParamSpec` of each parameter, `logical_axes` its logical names and `abstract_parameters` its
    shape and type, all in trees like the parameters'. `attention_fallback` is the reason why the attention kernel is
    not the requested one; None otherwise. `sections` names the stacks of layers in their order. With `trains`,
    parameters are sharded as in a training step, from ZeRO-1 on, and products are in 8 bits if the config says so;
    without it, only ZeRO-3 shards them.

    Raises:
      UserError: the model or its batch is not divisible by the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None, *, trains: bool = False) -> None:
        """Traces the model's shapes, and derives shardings."""
        self.mesh, self.mesh_shape, self.trains = mesh, MeshShape(**mesh.shape), trains
        kernel, self.attention_fallback = self._choose_kernel(config)
        check_config(config, self.mesh_shape)
        config = replace(config, attention=kernel, mesh=str(self.mesh_shape))
        plan = Plan.of(config, self.mesh_shape)
        on_gpus = mesh.devices.flat[0].platform != "cpu"
        self.config = config = replace(config, unroll_layers=plan.unrolls(config, on_gpus=on_gpus))
        layout = layout or plan.layout(config.model)
        self.layout = dataclasses.replace(layout, rules=layout.rules.restricted_to(self.mesh_shape.axes))
        self.model_class = model_class(config)
        # Shapes alone: a model that fits on the mesh may not fit on one device.
        with jax.set_mesh(mesh), use_rules(self.layout.rules):
            model = nnx.eval_shape(lambda: self.build(jax.random.key(0)))
        self.sections = tuple((name, *section.other_stacks) for name, section in model.sections.items())
        # Parameters are pure dicts of arrays everywhere; `model` merges them with this graph.
        self._graph, self._template = nnx.split(model)
        self.logical_axes = logical_axes(self._template)
        shapes = nnx.to_pure_dict(self._template)
        self.records = param_specs(
            self.logical_axes,
            shapes,
            self.layout,
            self.mesh_shape,
            compute_dtype=config.training.compute_dtype,
            grad_reduce_dtype=config.parallel.grad_reduce_dtype,
            is_trainable=lambda name: trains and self.is_trainable(name),
            master_dtype=config.optimizer.master_dtype,
        )
        as_stored = lambda array, record: array.update(dtype=record.dtype)  # noqa: E731
        self.abstract_parameters = jax.tree.map(as_stored, shapes, self.records)
        self.bind_records()

    def bind_records(self) -> None:
        """Builds `region`, in which models run, and `step_region`, with what only a step differentiates by, too."""
        self.region = self.step_region = ManualRegion(self.mesh_shape, self.layout.rules, self.records)

    def is_trainable(self, name: str) -> bool:
        """Returns whether a training step differentiates by the parameter of a dotted name."""
        return is_trainable(self.config.model, name)

    def _choose_kernel(self, config: Config) -> tuple[Kernel, str | None]:
        """Chooses the attention kernel for the mesh's devices."""
        device = self.mesh.devices.flat[0]
        # CPUs have no compute capability.
        major, minor = (int(part) for part in getattr(device, "compute_capability", "0.0").split("."))
        return choose_kernel(config, device.platform, (major, minor), self.mesh_shape)

    # --- parameters

    @property
    def stages(self) -> int:
        """Pipeline parallel degree; 1 without pipeline parallelism."""
        return self.mesh_shape.degree(self.layout.rules.layers)

    @property
    def layer_orders(self) -> Orders:
        """The order in which the layers of each stack are stored, where it differs from the model's order."""
        return layer_orders(self.config.model, self.config.parallel)

    @cached_property
    def parameter_sharding(self) -> Tree:
        """Sharding of each parameter between steps."""
        return shardings(partition_specs(self.records, "storage_spec"), self.mesh)

    @property
    def restore_target(self) -> Tree:
        """Shapes, types and shardings of the parameters: the target of restoring a checkpoint."""
        return with_sharding(self.abstract_parameters, self.parameter_sharding)

    def model(self, parameters: Tree) -> LanguageModel:
        """Builds the model with these parameters."""
        state = jax.tree.map(lambda v: v, self._template)  # a copy, as `replace_by_pure_dict` changes it
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._graph, state)

    def inference_model(self, parameters: Tree) -> LanguageModel:
        """Builds the model with parameters sharded as `storage_spec`, to be traced without differentiation."""
        return self.model(gather_for_inference(self.records, parameters))

    # --- batches

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch: by samples, and by tokens over `context`; see `first_dimensions`."""
        return batch_sharding(self.mesh, self.layout.rules)

    @property
    def batch_names(self) -> tuple[str, ...]:
        """Names of the arrays of a batch that the model reads."""
        return tuple(self.abstract_batch())

    def abstract_batch(self, global_batch_size: int | None = None) -> GlobalBatch:
        """Returns shapes, types and shardings of a batch."""
        samples = global_batch_size or self.config.training.global_batch_size
        each = self.model_class.batch_arrays(self.config) | {"sample_index": jax.ShapeDtypeStruct((), jnp.uint32)}
        arrays = {name: jax.ShapeDtypeStruct((samples, *a.shape), a.dtype) for name, a in each.items()}
        shardings = {name: first_dimensions(self.batch_sharding, a.ndim) for name, a in arrays.items()}
        return with_sharding(arrays, shardings)

    # --- losses

    @cached_property
    def evaluation(self) -> "Evaluation":
        """Computes the losses of a batch without dropout."""
        from mtjax.models.evaluation import Evaluation

        return Evaluation(self)

    def loss_function(self, options: LossOptions) -> TrunkLossFunction:
        """Returns the model's losses as a function of its parameters."""
        if self.stages == 1:
            return TrunkLossFunction(self.model, options, self.sections)
        from mtjax.models.pipeline_model import TrunkPipeline

        return TrunkPipeline(self.model, options, self.sections)

    def microbatch_schedule(self, num_microbatches: int) -> MicrobatchSchedule:
        """Returns the schedule: gradient accumulation, or the config's pipeline schedule."""
        training, stages = self.config.training, self.stages
        if stages > 1:
            from mtjax.sharding.pipeline.executor import PipelineSchedule

            platform = self.mesh.devices.flat[0].platform
            return PipelineSchedule.of(self.config, stages, num_microbatches, len(self.sections), platform)
        if training.unroll_layers:
            from mtjax.sharding.unstack import AccumulateUnrolled

            return AccumulateUnrolled(num_microbatches, training.compute_dtype, training.fp8 != "none")
        return Accumulate(num_microbatches)

    @property
    def loss_options(self) -> LossOptions:
        """Options of the training losses, from the config."""
        settings, vocab_size = self.config.optimizer, self.config.model.vocab_size
        assert vocab_size is not None  # check_config requires it
        return LossOptions(
            vocab_size,
            chunk=self.config.training.loss_chunk,
            label_smoothing=settings.label_smoothing,
            z_loss=settings.z_loss,
            fuses_gradient=Plan.of(self.config, self.mesh_shape).fuses_loss_gradient(self.config.model),
            **output_shape(self.config.model),
        )

    def on_mesh(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function with the mesh in force."""
        # Arguments are built without it, because optax puts scalars on a real device.
        with jax.set_mesh(self.mesh):
            return function(*arguments)

    # --- what is traced

    def draw(self, key: Array) -> Tree:
        """Draws parameters from one half of a run's key; dropout keys derive from the other half."""
        return jax.tree.map(lambda array, record: array.astype(record.dtype), self.draw_float32(key), self.records)

    def draw_float32(self, key: Array) -> Tree:
        """Draws parameters in float32."""
        model_key, _ = jax.random.split(key)
        with use_rules(self.layout.rules):
            return nnx.to_pure_dict(nnx.state(self.build(model_key)))

    def build(self, key: Array) -> LanguageModel:
        """Draws the model, with the rules in force."""
        model = self.model_class(self.config, key=key)
        if self.trains and self.config.training.fp8 != "none":
            from mtjax.models.float8 import quantize_products

            quantize_products(model, self.config)
        return model
