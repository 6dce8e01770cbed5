"""Makes megatron_retro.npz: logits, losses and gradients of the RetroModel of Megatron-Core 0.15, the last that has it.

    pip download --no-deps megatron-core==0.15.0 && unzip -d MCORE megatron_core-0.15.0-*.whl
    PYTHONPATH=MCORE:. python -m tests.parity.megatron_retro

It runs on a CPU with five patches. Weights are not in the file: `weights` draws them by their names.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
SIZES = {"layers": 9, "hidden": 16, "heads": 2, "vocab": 32, "sequence": 16, "chunk": 4, "neighbours": 2, "samples": 2}
"""Chunked cross-attention is in layers 6 and 9; a neighbour is two chunks."""


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Random weights by Megatron's names: matrices large enough for every part to matter."""
    found = {}
    for name, shape in shapes.items():
        drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        is_scale = len(shape) == 1 and "norm" in name and name.endswith("weight")
        found[name] = (1 + 0.1 * drawn if is_scale else 0.1 * drawn if len(shape) == 1 else 0.25 * drawn).astype("f4")
    return found


def batch() -> dict[str, np.ndarray]:
    """Tokens, labels and neighbours."""
    z, random = SIZES, np.random.default_rng(1)
    shape, chunks = (z["samples"], z["sequence"]), z["sequence"] // z["chunk"]
    found = {name: random.integers(0, z["vocab"], shape) for name in ("tokens", "labels")}
    found["neighbours"] = random.integers(0, z["vocab"], (z["samples"], chunks, z["neighbours"], 2 * z["chunk"]))
    return {name: array.astype(np.int32) for name, array in found.items()}


def model() -> tuple[Any, Any]:
    """Returns torch and the RetroModel, on a CPU without Transformer Engine."""
    import torch
    import torch.nn.functional as F

    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.models.retro import config as retro_config  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel import random  # pyright: ignore[reportMissingImports]

    parallel_state.initialize_model_parallel(1, 1)
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    retro_config.is_te_min_version = lambda version: False  # it compares None with a version
    from megatron.core.models.retro import RetroConfig, RetroModel  # pyright: ignore[reportMissingImports]
    from megatron.core.models.retro.decoder_spec import (  # pyright: ignore[reportMissingImports]
        get_retro_decoder_block_spec,
    )

    z = SIZES
    off = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")
    without = {f"{side}{part}_dropout": 0.0 for side in ("", "retro_encoder_") for part in ("hidden", "attention")}
    config = RetroConfig(
        num_layers=z["layers"],
        hidden_size=z["hidden"],
        num_attention_heads=z["heads"],
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        activation_func=lambda x: F.gelu(x, approximate="tanh"),
        retro_chunk_length=z["chunk"],
        retro_num_neighbors=z["neighbours"],
        retro_num_retrieved_chunks=2,
        retro_split_preprocessing="1,0,0",
        **dict.fromkeys((*off, "persist_layer_norm"), False),
        **without,
    )
    spec = get_retro_decoder_block_spec(config, use_transformer_engine=False)
    sizes = {"vocab_size": z["vocab"], "max_sequence_length": z["sequence"]}
    made = RetroModel(config, spec, **sizes, share_embeddings_and_output_weights=True)
    drawn = weights({name: tuple(p.shape) for name, p in made.named_parameters()})
    for name, parameter in made.named_parameters():
        parameter.data = torch.from_numpy(drawn[name])
    return torch, made


def main() -> None:
    """Writes the file."""
    torch, made = model()
    arrays = {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch().items()}
    rows = arrays["neighbours"].reshape(-1, arrays["neighbours"].shape[-1])
    places = [torch.arange(ids.shape[-1])[None].expand(len(ids), -1) for ids in (arrays["tokens"], rows)]
    mask = torch.triu(torch.ones(1, 1, SIZES["sequence"], SIZES["sequence"], dtype=torch.bool), 1)

    def run(**settings: Any) -> Any:
        read = {"context_input_ids": rows, "context_position_ids": places[1], "context_mask": None}
        return made(arrays["tokens"], places[0], mask, **read, **settings)

    with torch.no_grad():
        logits = run().numpy()
    losses = run(labels=arrays["labels"])
    losses.mean().backward()
    gradients = {name: p.grad.numpy() for name, p in made.named_parameters()}
    np.savez_compressed(FILE, logits=logits, losses=losses.detach().numpy(), **gradients)
    print(FILE, FILE.stat().st_size, "bytes;", len(gradients), "gradients")


if __name__ == "__main__":
    main()
