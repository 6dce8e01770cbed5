"""Code bases by kernels and overlap: mtjax, and those whose published runs the planner predicts."""

from dataclasses import dataclass

from mtjax.analysis.kernels import FUSED, UNFUSED, XLA, ElementWise


@dataclass(frozen=True)
class Software:
    """How a code base uses the hardware; independent of a run."""

    name: str
    kernels: ElementWise
    overlaps_model_axis: bool = False
    """Whether a layer's tensor parallel collectives overlap with the matmuls that use them, in t pieces."""
    overlaps_data_axis: bool = False
    """Whether gradients are reduced during the backward pass, and parameters gathered during the forward pass."""
    drops_last_reduction: bool = True
    recomputes_logits: bool = False
    loops_over_layers: bool = False
    """Whether layers are compiled as a loop, with the copies of `mtjax.analysis.copies`."""


MTJAX = Software("mtjax", XLA, recomputes_logits=True, loops_over_layers=True)
"""XLA fuses element-wise work; one reduction of the gradients after the last microbatch."""
MEGATRON_2019 = Software("Megatron-LM of 2019", UNFUSED, drops_last_reduction=False)
"""Unfused PyTorch kernels; gradients all-reduced after the backward pass (`USE_TORCH_DDP = False`)."""
MEGATRON_2021 = Software("Megatron-LM of 2021", FUSED, drops_last_reduction=False)
"""Fused bias, GELU, dropout, softmax; no flash attention; gradients all-reduced at the end (arXiv 2104.04473)."""
MEGATRON_CORE = Software("Megatron-Core", FUSED, overlaps_model_axis=True, overlaps_data_axis=True)
"""`--tp-comm-overlap --overlap-grad-reduce --overlap-param-gather`, as its published runs used."""


COMPOSER = Software("Composer", UNFUSED, overlaps_data_axis=True, drops_last_reduction=False)
"""PyTorch's FSDP, unfused kernels, parameters prefetched (github.com/mosaicml/llm-foundry)."""
