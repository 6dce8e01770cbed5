"""Models of the speed benchmarks, and their batch sizes."""

from dataclasses import dataclass, field
from typing import Any

from mtjax import config as configs
from mtjax.config import Config

LARGE_MEMORY = 120e9
"""GPUs with at least this many bytes use the batch sizes for 141 GB, others those for 80 GB."""


@dataclass(frozen=True)
class Shape:
    """A model and its batch size."""

    name: str
    preset: str
    microbatch: tuple[int, int]
    """Microbatch sizes that fit GPUs with 80 and with 141 GB, also in PyTorch."""
    microbatches: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the preset."""


_LLAMA_3 = {"num_layers": 4, "recompute": "selective", "sequence_length": 8192}
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_LLAMA_1B = {"num_layers": 22, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "mlp_size": 5632}
"""TinyLlama's 1.1 billion parameters (arXiv 2401.02385), with sequences twice as long."""

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt2-1.2b", "gpt2-1.2b", (8, 8), microbatches=4),
        Shape("llama-1b", "llama2-7b", (4, 8), changes=_LLAMA_1B | {"sequence_length": 4096}),
        Shape("gpt2-medium", "gpt2-medium", (16, 32)),
        Shape("gpt2-small", "gpt2-small", (32, 64)),
        Shape("gpt2-xl", "gpt2-xl", (8, 16)),
        Shape("llama-1b-fp8", "llama2-7b", (4, 8), changes=_LLAMA_1B | {"sequence_length": 4096, "fp8": "delayed"}),
        Shape("llama2-7b-layers", "llama2-7b", (2, 2), changes={"num_layers": 4, "recompute": "selective"}),
        Shape("llama2-7b-12-layers", "llama2-7b", (2, 2), changes={"num_layers": 12, "recompute": "selective"}),
        Shape("llama3-8b-layers", "llama3-8b", (1, 1), changes=_LLAMA_3),
        Shape("gpt2-medium-dropout", "gpt2-medium", (8, 8), changes=_DROPOUT | {"attention": "pallas"}),
        Shape("gpt2-medium-dropout-xla", "gpt2-medium", (8, 8), changes=_DROPOUT | {"attention": "xla"}),
        Shape("gpt2-medium-loop", "gpt2-medium", (16, 32), changes={"unroll_layers": False}),
    )
}
"""Shapes by name."""
REHEARSED = ("gpt2-1.2b", "llama-1b")
"""Models that `--rehearse` runs: one of each family."""
_TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 64, "vocab_size": 500}
_TINY_LLAMA = {"num_kv_heads": 2, "mlp_size": 128, "vocab_multiple": 128}


def config_of(shape: Shape, memory: float, *, rehearse: bool, **fields: Any) -> Config:
    """Returns the config of a shape on one GPU: bfloat16, no dropout, no recompute but where the shape says so.

    Args:
      shape: the model.
      memory: bytes of a GPU.
      rehearse: whether to use tiny sizes, for CPUs.
      fields: further changes, for example of the mesh.
    """
    size = shape.microbatch[memory >= LARGE_MEMORY]
    changes = dict(shape.changes)
    if rehearse:
        size, changes = 2, changes | _TINY | (_TINY_LLAMA if shape.preset.startswith("llama") else {})
    settings = {"mesh": "1x1", "recompute": "none", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    settings |= {"microbatch_size": size, "global_batch_size": size * shape.microbatches, "warmup_steps": 1}
    return configs.replace(configs.load(shape.preset), **(settings | changes | fields))
