"""What code bases do with the hardware: mtjax, and those whose published runs the planner predicts."""

from dataclasses import dataclass

from mtjax.theory.kernels import FUSED, UNFUSED, ElementWise


@dataclass(frozen=True)
class Software:
    """What the program does with the hardware; facts of a code base, not of a run."""

    name: str
    kernels: ElementWise
    overlaps_model_axis: bool = False
    """Collectives inside a layer overlap with the products that use them, in t pieces."""
    overlaps_data_axis: bool = False
    """Gradients are reduced during the backward pass, parameters gathered during the forward pass."""
    drops_last_reduction: bool = True
    recomputes_logits: bool = False
    loops_over_layers: bool = False
    """Whether layers are iterations of a compiled loop, with the copies of `mtjax.theory.copies`."""


MTJAX = Software("mtjax", FUSED, recomputes_logits=True, loops_over_layers=True)
"""XLA fuses element-wise work; one reduction of the gradients after the last microbatch."""
MEGATRON_2019 = Software("Megatron-LM of 2019", UNFUSED, drops_last_reduction=False)
"""PyTorch kernels one by one; gradients all-reduced after the backward pass (`USE_TORCH_DDP = False`)."""
MEGATRON_2021 = Software("Megatron-LM of 2021", FUSED, drops_last_reduction=False)
"""Fused bias, GELU, dropout, softmax; scores written out; gradients all-reduced at the end (arXiv 2104.04473)."""
MEGATRON_CORE = Software("Megatron-Core", FUSED, overlaps_model_axis=True, overlaps_data_axis=True)
"""`--tp-comm-overlap --overlap-grad-reduce --overlap-param-gather`, as its published runs used."""


COMPOSER = Software("Composer", UNFUSED, overlaps_data_axis=True, drops_last_reduction=False)
"""PyTorch's FSDP, kernels one by one, parameters gathered ahead (github.com/mosaicml/llm-foundry)."""
