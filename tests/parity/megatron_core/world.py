"""What lets megatron-core run where there is no CUDA, and process groups of any size in one process.

`python -O` leaves its assertions out, of which one asks for CUDA's tensors where gradients are clipped.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def without_cuda() -> None:
    """Puts on the CPU what Megatron puts on the current CUDA device, and leaves torch's compiler out; call it first."""
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.compile = lambda function: function  # the fused activations, as they are written
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it where Transformer Engine is not installed
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


def on_cuda_types() -> None:
    """Calls the CPU's tensor types what the distributed optimizer expects, and leaves streams out."""
    kind = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        found = kind(tensor, *args, **named)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = type_of  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> torch.Tensor:
        return make(*arguments, **(named | {"device": "cpu"} if named.get("device") == "cuda" else named))

    return made


@contextlib.contextmanager
def world(tensor: int = 1, pipeline: int = 1, expert: int = 1, rank: int = 0) -> Iterator[None]:
    """Megatron's process groups as `rank` of `tensor` x `expert` x `pipeline` sees them; data ranks share the experts.

    More than one rank is torch's fake backend: it builds a rank's model, and communicates nothing.
    """
    from megatron.core import parallel_state

    size = tensor * pipeline * expert
    store = dist.HashStore() if size == 1 else FakeStore()
    dist.init_process_group("gloo" if size == 1 else "fake", store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor, pipeline, expert_model_parallel_size=expert, create_gloo_process_groups=size == 1
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
