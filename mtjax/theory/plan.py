"""A plan: the mesh, the microbatch, and what is recomputed, sharded and kept - of a run, or of one considered."""

from dataclasses import dataclass, replace
from typing import Literal

from mtjax.config import Config, Model
from mtjax.theory.attention import choose_kernel
from mtjax.theory.layout import ZERO_AXES, Layout, layout_of
from mtjax.theory.mesh import MeshShape
from mtjax.theory.timetable import ScheduleName

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, the attention core, or entire layers."""
Residuals = Literal["jax", "megatron"]
ContextMethod = Literal["ring", "all-gather"]
ExpertDispatch = Literal["all-gather", "all-to-all"]


@dataclass(frozen=True)
class ContextParallelism:
    """Attention across the ranks that share the tokens of a sample."""

    method: ContextMethod
    keeps_documents_apart: bool = False
    sends_rounded: bool = False
    """Whether all gradients of keys that travel are as a kernel gave them, in the compute type: where a ring of two
    passes on those of cuDNN's, of which XLA notices that widening them can wait."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of the model's states."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    """Moments, and master weights where the weights are 16-bit."""
    reduced: int
    """Bytes per element of gradients on the wire."""
    gathered: int | None = None
    """Bytes per element of updated parameters on the wire; None: the compute type's for matrices, 4 for others."""
    are_masters: bool = False
    """Whether weights are their own masters: then ZeRO splits them from stage 1 on, and gathers copies once a step."""


MTJAX = Precision("mtjax", weights=4, gradients=4, optimizer=8, reduced=4, are_masters=True)
"""float32 parameters are their own master; products cast them."""
MTJAX_BF16_WIRE = replace(MTJAX, reduced=2)
MEGATRON_BF16 = Precision("Megatron bf16", weights=2, gradients=4, optimizer=12, reduced=4, gathered=2)
MEGATRON_FP16 = Precision("Megatron fp16", weights=2, gradients=2, optimizer=16, reduced=2, gathered=2)
"""The float32 copy of the gradients counts with the optimizer."""
FP32 = Precision("fp32", weights=4, gradients=4, optimizer=8, reduced=4, gathered=4)


@dataclass(frozen=True)
class Plan:
    """How a model is spread and trained, as far as communication, time and memory are concerned."""

    mesh: MeshShape
    global_batch_size: int
    microbatch_size: int
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    """ZeRO stage over the data ways: 1 shards the optimizer, and weights that are their own masters; 2 also gradients,
    3 also parameters in use."""
    pipeline_schedule: ScheduleName = "1f1b"
    chunks: int = 1
    """Chunks of layers per stage of the interleaved schedule."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage; equal shares when None."""
    context_method: ContextMethod = "ring"
    keeps_documents_apart: bool = False
    """Whether tokens see those of their own document only, or, which sends as much, none of the padding."""
    flash_attention: bool = False
    dropout: bool = True
    attention_dropout: bool | None = None
    """Whether probabilities are dropped; as `dropout` says when None."""
    adapter_dropout: bool = False
    """Whether what low-rank adapters read has masks of dropout."""
    label_smoothing: bool = False
    teacher_width: int = 0
    """Of a teacher's hidden states, whose probabilities of tokens are learnt; 0 without one."""
    teacher: Model | None = None
    """The teacher itself, where its weights have been asked what they are: what it holds and computes beside the step
    counts too (`mtjax.theory.teacher_cost`)."""
    expert_dispatch: ExpertDispatch = "all-gather"
    expert_imbalance: float = 1.0
    """Load of the rank whose experts have most, beside the mean; formulas of time know it alone."""
    loss_chunk: int | None = None
    """Tokens whose logits are alive at a time; the microbatch's when None."""
    precision: Precision = MTJAX
    element_bytes: int = 2
    """Bytes of an activation."""
    recompute_group: int = 1
    """Layers of full recompute that share one kept input; formulas of time ignore this and the next two fields."""
    recompute_first: int | None = None
    """Full recompute of this many layers and none of the others; of all when None."""
    recompute_offload: bool = False
    """Layer inputs wait in the host's memory."""
    unrolled: bool = False
    """Whether layers are compiled one after the other, without a loop."""
    residuals: Residuals = "jax"
    """What waits for the backward pass: what JAX's autodiff keeps of mtjax's model, or what Megatron's kernels keep."""
    drops_last_reduction: bool = True
    """The recomputed forward pass leaves out its last product and that one's reduction, whose result nobody needs (XLA
    does; PyTorch's checkpoint does not)."""

    @property
    def context_parallelism(self) -> ContextParallelism | None:
        """How keys and values come to other ranks' queries; None where a rank has all tokens of its samples."""
        ways = self.mesh.context
        rounded = self.flash_attention and ways == 2
        return ContextParallelism(self.context_method, self.keeps_documents_apart, rounded) if ways > 1 else None

    def local_tokens(self, tokens: float) -> float:
        """Tokens of a microbatch on a rank, of samples with so many."""
        return self.microbatch_size * tokens / self.mesh.context

    @property
    def zero_degree(self) -> int:
        """Ranks that hold the same parameters but for what ZeRO splits among them."""
        return self.mesh.degree(ZERO_AXES)

    @property
    def expert_zero_degree(self) -> int:
        """Those of them that hold the same experts."""
        return self.zero_degree // self.mesh.expert

    @property
    def data_degree(self) -> int:
        """Ranks that share the batch."""
        return self.mesh.batch_degree

    @property
    def expert_degree(self) -> int:
        """Ranks that share the experts of each layer."""
        return self.mesh.expert

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.stage

    @property
    def is_staged(self) -> bool:
        """Whether stages work in lock step, by `mtjax.theory.timetable`: mtjax's do, Megatron's do not."""
        return self.mesh.has_pipeline and self.residuals == "jax"

    @property
    def tensor_degree(self) -> int:
        """Ranks that share each layer."""
        return self.mesh.model

    @property
    def microbatches(self) -> int:
        """Microbatches that a data rank accumulates in a step."""
        return self.global_batch_size // (self.data_degree * self.microbatch_size)

    @property
    def has_attention_dropout(self) -> bool:
        """Whether attention's probabilities have masks of dropout."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def grad_reduce_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type in which gradients are summed over ranks."""
        return "float32" if self.precision.reduced == 4 else "bfloat16"

    @property
    def reduces_in_backward(self) -> bool:
        """Whether the backward pass sums gradients over data ranks: with ZeRO none then keeps the others' part."""
        return self.zero >= 2 or (self.residuals == "jax" and self.microbatches == 1 and not self.is_staged)

    @property
    def gathers_per_step(self) -> bool:
        """Whether parameters, of which ZeRO keeps parts between steps, are gathered once a step, not for each use."""
        return self.zero in (1, 2) and self.precision.are_masters and self.zero_degree > 1

    def prefetches(self, model: Model) -> bool:
        """Whether what a layer's passes gather and sum travels while another layer computes: in loops over single
        layers."""
        alone = self.recompute_group == model.moe_every == 1 and self.recompute_first is None
        alone = alone and not self.recompute_offload and not self.unrolled and not self.is_staged
        return self.reduces_in_backward and self.residuals == "jax" and alone

    def layout(self, model: Model) -> Layout:
        """Which mesh axes split which dimensions of a model."""
        return layout_of(model, self.mesh, sequence_parallel=self.sequence_parallel, zero=self.zero)

    def recomputed_layers(self, count: int) -> int:
        """How many of `count` layers the backward pass computes again from their input."""
        if self.recompute != "full":
            return 0
        return count if self.recompute_first is None else min(self.recompute_first, count)

    def grouped_layers(self, count: int) -> int:
        """How many of them it computes again in groups of several.

        JAX computes a layer of a group twice again: with its group, up to the last product, and by itself.
        """
        return self.recomputed_layers(count) if self.recompute_group > 1 else 0

    @classmethod
    def of(cls, run: Config, mesh: MeshShape, **settings: object) -> "Plan":
        """The plan of a config on this mesh; `settings` are fields of the plan that no config has, or over its own."""
        training = run.training
        plan = cls(
            mesh,
            training.global_batch_size,
            training.microbatch_size or max(training.global_batch_size // mesh.batch_degree, 1),
            recompute=training.recompute,
            sequence_parallel=run.parallel.sequence_parallel,
            zero=run.parallel.zero,
            pipeline_schedule=run.parallel.pipeline_schedule,
            chunks=run.parallel.chunks,
            layers_per_stage=run.parallel.layers_per_stage,
            recompute_group=training.recompute_num_layers if training.recompute_method == "uniform" else 1,
            recompute_first=training.recompute_num_layers if training.recompute_method == "block" else None,
            recompute_offload=training.recompute_offload,
            unrolled=training.unroll_layers,
            context_method=run.parallel.context_method,
            expert_dispatch=run.parallel.expert_dispatch,
            keeps_documents_apart=run.data.reset_attention_mask or run.model.family == "bert",
            flash_attention=choose_kernel(run, "gpu")[0] == "cudnn",
            dropout=run.model.hidden_dropout > 0,
            attention_dropout=run.model.attention_dropout > 0,
            adapter_dropout=run.model.lora_dropout > 0,
            label_smoothing=run.optimizer.label_smoothing > 0,
            teacher_width=run.finetuning.teacher_width or 0,
            loss_chunk=training.loss_chunk,
            precision=MTJAX if run.parallel.grad_reduce_dtype == "float32" else MTJAX_BF16_WIRE,
            element_bytes=4 if training.compute_dtype == "float32" else 2,
        )
        return replace(plan, **settings)  # pyright: ignore[reportArgumentType]
