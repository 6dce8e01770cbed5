"""A plan: mesh, microbatch size, recompute, sharding and precision of a run, or of a run that the search considers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mtjax.config import Config, Model
from mtjax.config.families import is_decoder
from mtjax.config.float8 import scale_digits
from mtjax.layout.attention_kernel import HOPPER, Capability, ContextMethod, ContextParallelism, choose_kernel
from mtjax.layout.layouts import Layout, layout_of, zero_axes_of
from mtjax.layout.mesh import MeshShape
from mtjax.layout.optimizer_states import ADAMW, BYTES, OptimizerStates, optimizer_states
from mtjax.layout.stacks import stacks_of
from mtjax.layout.timetable import ScheduleName

Recompute = Literal["none", "selective", "full"]
"""What the backward pass recomputes: nothing, the attention core, or entire layers."""
Residuals = Literal["jax", "megatron"]
ExpertDispatch = Literal["all-gather", "all-to-all"]

GPUS_OF_A_SERVER = 8
MOST_UNROLLED = 100
"""Layers up to which they are unrolled by default: compiling 32 takes about a minute on two cores."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of the model's states."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    """Moments, and master weights where the weights are 16-bit."""
    reduced: int
    """Bytes per element of gradients in their reduction."""
    gathered: int | None = None
    """Bytes per element in the all-gather of updated parameters; None: the compute dtype's for matrices, else 4."""
    matrices: int = 4
    """Of the stored trained matrices and tables, where weights are masters."""
    are_masters: bool = False
    """Whether weights are the master weights: then ZeRO shards them from stage 1 on, and gathers copies once a step."""


MTJAX = Precision("mtjax", weights=4, gradients=4, optimizer=8, reduced=4, are_masters=True)
"""float32 parameters are the master weights; matmuls cast them."""
MTJAX_BF16_WIRE = replace(MTJAX, reduced=2)
MEGATRON_BF16 = Precision("Megatron bf16", weights=2, gradients=4, optimizer=12, reduced=4, gathered=2)
MEGATRON_FP16 = Precision("Megatron fp16", weights=2, gradients=2, optimizer=16, reduced=2, gathered=2)
"""The float32 copy of the gradients counts with the optimizer."""


@dataclass(frozen=True)
class Plan:
    """How a model is sharded and trained, as far as communication, time and memory depend on it."""

    mesh: MeshShape
    global_batch_size: int
    microbatch_size: int
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    splits_width: bool = False
    """Whether tensor parallelism is 2D: the residual stream is sharded along its width."""
    zero: int = 0
    """ZeRO stage: 1 shards the optimizer state and master weights; 2 also gradients, 3 also parameters in use."""
    pipeline_schedule: ScheduleName = "1f1b"
    chunks: int = 1
    """Chunks of layers per stage of the interleaved schedule."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage; equal shares when None."""
    context_method: ContextMethod = "ring"
    keeps_documents_apart: bool = False
    """Whether attention is masked at document boundaries, or, with the same communication, at padding."""
    flash_attention: bool = False
    """Whether scores stay inside a kernel, cuDNN's or our own."""
    pallas_attention: bool = False
    """Whether this kernel is our own (`models/kernels/pallas.py`)."""
    attention_in_blocks: bool = False
    """Whether XLA's kernel holds the scores of a few queries at a time also without context parallelism."""
    dropout: bool = True
    attention_dropout: bool | None = None
    """Whether attention probabilities have dropout; the value of `dropout` when None."""
    joins_parallel: bool = True
    """Whether the compiler adds the outputs of a parallel layer's sublayers, and those of routed and shared experts,
    before it reduces them over tensor parallel ranks, and their input gradients: on GPUs."""
    adapter_dropout: bool = False
    """Whether the inputs of LoRA adapters have dropout."""
    label_smoothing: bool = False
    teacher_width: int = 0
    """Width of the teacher's hidden states in a distillation; 0 without a teacher."""
    teacher: Model | None = None
    """The teacher's model, where known: then its memory, FLOPs and traffic outside the step are counted too
    (`mtjax.analysis.teacher_cost`)."""
    expert_dispatch: ExpertDispatch = "all-gather"
    expert_imbalance: float = 1.0
    """Load of the busiest expert parallel rank over the mean load; only formulas of time use it."""
    loss_chunk: int | None = None
    """Tokens per chunk of the loss, whose logits are alive together; all of the microbatch's when None."""
    optimizer: OptimizerStates = ADAMW
    offloads_optimizer: bool = False
    """Whether AdamW's moments are in the host's memory."""
    offloads_parameters: bool = False
    """Whether master weights are there, too."""
    precision: Precision = MTJAX
    element_bytes: int = 2
    """Bytes of an activation."""
    recompute_group: int = 1
    """Layers of full recompute that share one saved input; formulas of time ignore this and the next two fields."""
    recompute_first: int | None = None
    """Full recompute of this many layers and none of the others; of all when None."""
    recompute_offload: bool = False
    """Whether saved layer inputs are offloaded to host memory."""
    fp8: Literal["none", "tensorwise", "delayed", "rowwise"] = "none"
    """Recipe by which layers multiply in 8-bit floats."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """Types of these: gradients are E5M2 or, as all else, E4M3."""
    fp8_digits: int = 1
    """Binary digits of inverse scales: with one, scales are powers of two."""
    fp8_ends: tuple[int, int] = (0, 0)
    """Numbers of first and of last layers that multiply in the compute type."""
    unrolled: bool = False
    """Whether layers are compiled one after the other, without a loop."""
    residuals: Residuals = "jax"
    """Whether the activations saved for the backward pass are those of JAX's autodiff of mtjax's model, or those of
    Megatron's kernels."""
    drops_last_reduction: bool = True
    """Whether the recompute of a layer omits its last matmul with the reduction, whose result is not needed (XLA does;
    PyTorch's checkpoint does not)."""

    @cached_property
    def shards(self) -> "Plan":
        """The plan as far as it says which parameters a device holds: a key for caches of what follows from these."""
        names = ("sequence_parallel", "splits_width", "zero", "chunks", "layers_per_stage", "residuals")
        return Plan(self.mesh, 1, 1, **{name: getattr(self, name) for name in names})

    @property
    def splits_stream(self) -> bool:
        """Whether the residual stream is sharded over the tensor parallel ranks: along the sequence, or its width."""
        return self.sequence_parallel or self.splits_width

    @property
    def context_parallelism(self) -> ContextParallelism | None:
        """How attention is computed over context parallel ranks; None without context parallelism."""
        degree = self.mesh.context
        rounded = self.flash_attention and degree == 2
        return ContextParallelism(self.context_method, self.keeps_documents_apart, rounded) if degree > 1 else None

    @property
    def keeps_scores(self) -> bool:
        """Whether all scores of a sample are alive at once, and their probabilities are saved."""
        return not (self.flash_attention or self.attention_in_blocks or self.context_parallelism)

    @property
    def core_again(self) -> float:
        """How much of attention's forward products the backward pass computes again: scores, and in our own kernel,
        which has two backward passes, twice, and the gradients of probabilities twice."""
        return 1.5 if self.pallas_attention else 0.5 if not self.keeps_scores or self.recompute == "selective" else 0.0

    @property
    def packs_documents(self) -> bool:
        """Whether cuDNN's attention is within documents."""
        is_cudnn = self.flash_attention and not self.pallas_attention
        return is_cudnn and self.keeps_documents_apart and not self.context_parallelism

    def local_tokens(self, tokens: float) -> float:
        """Returns the tokens of a microbatch on a context parallel rank, of samples with `tokens` tokens."""
        return self.microbatch_size * tokens / self.mesh.context

    @property
    def zero_degree(self) -> int:
        """Ranks over which ZeRO shards what is replicated otherwise."""
        return self.mesh.degree(zero_axes_of(self.mesh.axes))

    @property
    def expert_zero_degree(self) -> int:
        """Ranks over which ZeRO shards experts' matrices."""
        return self.zero_degree // self.mesh.expert

    @property
    def data_degree(self) -> int:
        """Ranks over which the batch is sharded: data and expert parallel ones, and those of a sharding group."""
        return self.mesh.batch_degree

    @property
    def expert_degree(self) -> int:
        """The expert parallel degree."""
        return self.mesh.expert

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.stage

    @property
    def is_staged(self) -> bool:
        """Whether stages run in lockstep, by `mtjax.layout.timetable`: mtjax's do, Megatron's do not."""
        return self.mesh.has_pipeline and self.residuals == "jax"

    @property
    def tensor_degree(self) -> int:
        """The tensor parallel degree."""
        return self.mesh.model

    @property
    def microbatches(self) -> int:
        """Microbatches that a data parallel rank accumulates in a step."""
        return self.global_batch_size // (self.data_degree * self.microbatch_size)

    @property
    def has_attention_dropout(self) -> bool:
        """Whether attention probabilities have dropout."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def grad_reduce_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype in which gradients are reduced over ranks."""
        return "float32" if self.precision.reduced == 4 else "bfloat16"

    @property
    def reduces_in_backward(self) -> bool:
        """Whether the backward pass reduces gradients over data parallel ranks, and with ZeRO keeps a shard only."""
        return self.zero >= 2 or (self.residuals == "jax" and self.microbatches == 1 and not self.is_staged)

    @property
    def gathers_per_step(self) -> bool:
        """Whether sharded parameters are all-gathered once a step (ZeRO-1 and 2), not for each use (ZeRO-3)."""
        return self.zero in (1, 2) and self.precision.are_masters and self.zero_degree > 1

    @property
    def forward_only(self) -> "Plan":
        """The plan of the teacher of a distillation, on the mesh of its student: of forward passes only."""
        return replace(
            self,
            teacher=None,
            teacher_width=0,
            layers_per_stage=None,
            label_smoothing=False,
            recompute="none",
            recompute_group=1,
            recompute_first=None,
            recompute_offload=False,
            unrolled=False,
            fp8="none",
            fp8_ends=(0, 0),
            dropout=False,
            attention_dropout=False,
            adapter_dropout=False,
        )

    def prefetches(self, model: Model) -> bool:
        """Returns whether a layer's all-gathers and gradient reductions overlap with the computation of another layer,
        as `mtjax.sharding.prefetch` does in loops over single layers, and patterns: in one of the model's loops."""
        stacks, first = stacks_of(model), self.recompute_first
        in_loops = not (self.recompute_group > 1 or self.recompute_offload or self.unrolled or self.is_staged)
        in_loops = in_loops and all(stack.has_own_loop or stack.pattern for stack in stacks)
        alike = [s for s in stacks if first is None or (s.has_own_loop and first >= s.layers)]
        sends = self.data_degree * self.mesh.context > 1 and self.reduces_in_backward and self.residuals == "jax"
        return in_loops and sends and any(stack.can_prefetch for stack in alike)

    def overlaps_data(self, model: Model) -> bool:
        """Returns whether other layers compute while a layer's parameters are gathered and its gradients reduced: where
        loops prefetch, and without a loop, whose collectives XLA schedules."""
        unrolled = self.unrolled and self.reduces_in_backward and self.residuals == "jax"
        return unrolled or self.prefetches(model)

    def fuses_loss_gradient(self, model: Model) -> bool:
        """Returns whether the gradients of the loss are computed with it, so that no logits are recomputed: in unrolled
        steps, where a rank has a token's logits of the entire vocabulary."""
        is_alone = is_decoder(model) and not model.mtp_num_layers and not self.teacher_width
        return self.unrolled and is_alone and self.mesh.model == 1 and not self.is_staged

    def unrolls(self, run: Config, *, on_gpus: bool = True) -> bool:
        """Returns whether a run with this plan unrolls its layers: by default on GPUs, where that is possible and not
        slower.

        Args:
          run: the config, whose `unroll_layers` decides where it is set.
          on_gpus: whether the devices are GPUs. On CPUs a loop compiles sooner, and its copies cost little.
        """
        if run.training.unroll_layers is not None:
            return run.training.unroll_layers
        # Each batch size of a ramp is a program to compile.
        is_one_program = run.training.rampup_batch_size is None
        is_short = sum(stack.layers for stack in stacks_of(run.model)) <= MOST_UNROLLED
        return on_gpus and is_one_program and is_short and self.gains_by_unrolling(run.model)

    def gains_by_unrolling(self, model: Model) -> bool:
        """Returns whether unrolled layers are the default: possible, and not worse than a loop in time or memory."""
        # Full recompute is for the least memory, and a loop holds less. XLA keeps more of an unrolled step in 8 bits or
        # with experts alive than the formulas of memory know; with experts it is slower, too (docs/notes/speed.md).
        holds_more = self.recompute == "full" or self.fp8 != "none" or model.num_experts > 0
        if holds_more or any(self.unrolling_problems(model)):
            return False
        # XLA: its scheduler begins an unrolled layer's gathers too late for links between servers. Llama 2 7B with
        # ZeRO-3 on 256x2 H100s is predicted at 964 ms unrolled, of which 258 are exposed, and at 841 ms in the loop.
        return self.mesh.size <= GPUS_OF_A_SERVER or not replace(self, unrolled=False).prefetches(model)

    def unrolling_problems(self, model: Model) -> Iterator[str]:
        """Yields what unrolled layers are not compatible with."""
        if self.splits_width:
            yield "unroll_layers does not support tensor_layout 2d: remove one of the two"
        if model.layer_pattern:
            yield f"unroll_layers does not support layer_pattern {model.layer_pattern!r}: remove one of the two"
        if self.mesh.has_pipeline:
            yield (
                f"unroll_layers does not support pipeline parallelism, and mesh {self.mesh} has {self.stages} stages, "
                "which save activations in slots that a loop indexes: remove it"
            )
        if self.recompute == "full" and self.recompute_group > 1:
            yield (
                f"unroll_layers does not support recompute_num_layers {self.recompute_group}, which recomputes layers "
                "in groups: remove one of the two"
            )
        if self.recompute_offload:
            yield "unroll_layers does not support recompute_offload: remove one of the two"
        if self.recompute == "selective" and self.keeps_scores:
            yield (
                "unroll_layers with recompute selective needs attention that holds no scores of all queries, and here "
                "XLA's kernel does, whose scores XLA would recompute for several layers at the same time: use "
                "--attention blocks, a setting that allows cuDNN's kernel, or recompute none"
            )
        if len(stacks_of(model)) > 1:
            yield (
                f"unroll_layers needs a model with one stack of layers, and this one of family {model.family} has "
                "several: remove it"
            )

    def layout(self, model: Model) -> Layout:
        """Returns the mesh axes over which the dimensions of a model are sharded."""
        settings = {"sequence_parallel": self.sequence_parallel, "splits_width": self.splits_width}
        return layout_of(model, self.mesh, zero=self.zero, **settings)

    def recomputed_layers(self, count: int) -> int:
        """Returns how many of `count` layers are recomputed from their input."""
        if self.recompute != "full":
            return 0
        return count if self.recompute_first is None else min(self.recompute_first, count)

    def grouped_layers(self, count: int) -> int:
        """Returns how many of `count` layers are recomputed in groups of several.

        JAX recomputes a layer of a group twice: with its group, up to the last matmul, and by itself.
        """
        return self.recomputed_layers(count) if self.recompute_group > 1 else 0

    @classmethod
    def of(cls, run: Config, mesh: MeshShape, capability: Capability = HOPPER, **settings: object) -> "Plan":
        """Returns the plan of a config on this mesh of GPUs; `settings` are fields that override the config's."""
        training, states = run.training, optimizer_states(run)
        kernel, _ = choose_kernel(run, "gpu", capability, mesh)
        plan = cls(
            mesh,
            training.global_batch_size,
            training.microbatch_size or max(training.global_batch_size // mesh.batch_degree, 1),
            recompute=training.recompute,
            sequence_parallel=run.parallel.sequence_parallel,
            splits_width=run.parallel.tensor_layout == "2d",
            zero=run.parallel.zero,
            pipeline_schedule=run.parallel.pipeline_schedule,
            chunks=run.parallel.chunks,
            layers_per_stage=run.parallel.layers_per_stage,
            recompute_group=training.recompute_num_layers if training.recompute_method == "uniform" else 1,
            recompute_first=training.recompute_num_layers if training.recompute_method == "block" else None,
            recompute_offload=training.recompute_offload,
            fp8=training.fp8,
            fp8_format=training.fp8_format,
            fp8_digits=scale_digits(training.fp8, training.fp8_scales),
            fp8_ends=(training.fp8_bf16_first_layers, training.fp8_bf16_last_layers),
            context_method=run.parallel.context_method,
            expert_dispatch=run.parallel.expert_dispatch,
            keeps_documents_apart=run.data.reset_attention_mask or run.model.family == "bert",
            flash_attention=kernel in ("cudnn", "pallas"),
            pallas_attention=kernel == "pallas",
            attention_in_blocks=kernel == "blocks",
            dropout=run.model.hidden_dropout > 0,
            attention_dropout=run.model.attention_dropout > 0,
            adapter_dropout=run.model.lora_dropout > 0,
            label_smoothing=run.optimizer.label_smoothing > 0,
            teacher_width=run.finetuning.teacher_width or 0,
            loss_chunk=training.loss_chunk,
            optimizer=states,
            offloads_optimizer=run.parallel.offload != "none",
            offloads_parameters=run.parallel.offload == "optimizer,parameters",
            precision=_precision(run, states),
            element_bytes=4 if training.compute_dtype == "float32" else 2,
        )
        plan = replace(plan, **settings)  # pyright: ignore[reportArgumentType]
        return plan if "unrolled" in settings else replace(plan, unrolled=plan.unrolls(run))


def _precision(run: Config, states: OptimizerStates) -> Precision:
    """Returns the bytes of a run's states: the types of AdamW's moments and of matrices may be set, and that of the
    reduction."""
    precision = MTJAX if run.parallel.grad_reduce_dtype == "float32" else MTJAX_BF16_WIRE
    # Of offloaded master weights the device has copies in the compute dtype, of 16 bits.
    matrices = 2 if run.parallel.offload == "optimizer,parameters" else BYTES[run.optimizer.master_dtype]
    return replace(precision, optimizer=states.mu_bytes + states.nu_bytes, matrices=matrices)
