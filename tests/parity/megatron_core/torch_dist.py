"""`torch_dist` checkpoints by the real megatron-core: saved and loaded in processes that communicate by gloo.

`python -m tests.parity.megatron_core.torch_dist MODE FOLDER`, once for each of four ranks, with RANK, WORLD_SIZE
and RANKS_STORE (a file's URL) set. `save` writes every case's folder, its logits, and the same model in the format
torch; `load` loads strictly the folders that mtjax wrote, and compares every tensor with the model's. `tiny` writes
what `tests/convert/torch_dist.zip` holds.
"""

import argparse
import contextlib
import os
import queue
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.parity.megatron_core.world import without_cuda

without_cuda()
torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async

from tests.parity.megatron_core.cases import DISTRIBUTED, MODELS, TINY, TOKENS, VOCAB, Degrees
from tests.parity.megatron_core.models import ITERATION, build, fill, logits_of, shaken, sharded
from tests.parity.megatron_core.models import save as save_legacy

# Else every rank would start a process, which imports torch and megatron-core, for a queue that saves in the background
# need, and these have none.
filesystem_async._results_queue = queue.Queue()

PATIENCE = 4
"""Minutes that a rank waits for the others."""


def init_ranks(anew: Path | None = None) -> None:
    """Makes the group of all processes; removes the folder `anew`, which an earlier start may have left."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    waits = timedelta(minutes=PATIENCE)
    dist.init_process_group("gloo", os.environ["RANKS_STORE"], rank=rank, world_size=ranks, timeout=waits)
    if anew and rank == 0:
        shutil.rmtree(anew, ignore_errors=True)
    dist.barrier()


@contextlib.contextmanager
def groups(tensor: int = 1, pipeline: int = 1, chunks: int | None = None, expert: int = 1) -> Iterator[None]:
    """Megatron's process groups over all processes; those that are left are data parallel ranks."""
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=tensor if expert > 1 else None,
        distributed_timeout_minutes=PATIENCE,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def models_of(a: dict[str, Any], degrees: Degrees) -> list[Any]:
    """A rank's models, one for each chunk of interleaved stages."""
    tensor, pipeline, chunks, expert = degrees
    return [build(a, tensor, pipeline, expert, chunks, c if chunks else None) for c in range(chunks or 1)]


def state_of(models: list[Any]) -> dict[str, Any]:
    """What Megatron-LM's `generate_state_dict` calls a rank's models."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    names = [f"model{i}" for i in range(len(models))] if len(models) > 1 else ["model"]
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in zip(names, models, strict=True)}


def save(folder: Path, name: str, degrees: Degrees) -> None:
    """As `save_checkpoint` writes it: the tensors, and arguments in the common state."""
    a = MODELS[name]
    with groups(), torch.no_grad():
        model = shaken(a)
        whole = sharded(model)
        if dist.get_rank() == 0:
            save_legacy(model, a, folder / "torch" / name, (1, 1, 1))
            tokens = np.random.default_rng(1).integers(0, VOCAB - 6, (2, TOKENS))
            np.savez(folder / f"{name}.npz", tokens=tokens, logits=logits_of(model, tokens).numpy())
    save_sharded(folder / "saved" / name, a, degrees, whole)


def save_sharded(folder: Path, a: dict[str, Any], degrees: Degrees, whole: Mapping[Any, ShardedTensor]) -> None:
    """A checkpoint of these degrees, of the full model's tensors."""
    tensor, pipeline, _, expert = degrees
    with groups(*degrees):
        models = models_of(a, degrees)
        for model in models:
            with torch.no_grad():
                fill(model, whole)
        sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        sizes |= {"expert_model_parallel_size": expert} if "num_experts" in a else {}
        args = argparse.Namespace(**a, **sizes, params_dtype=torch.float32, layernorm_epsilon=a["norm_epsilon"])
        common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
        target = folder / f"iter_{ITERATION:07}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        dist.barrier()
        content = {"singleton_local_shards": False, "non_homogeneous_layers": isinstance(a.get("moe_layer_freq"), list)}
        dist_checkpointing.save(common | state_of(models), str(target), content_metadata=content)


def load(folder: Path, name: str, degrees: Degrees) -> None:
    """Loads strictly, and compares with the model; the padding of the vocabulary may differ."""
    a = MODELS[name]
    with groups():
        whole = sharded(shaken(a))
    with groups(*degrees):
        models, expected = models_of(a, degrees), models_of(a, degrees)
        for model in expected:
            with torch.no_grad():
                fill(model, whole)
        loaded, missing, unexpected = dist_checkpointing.load(state_of(models), str(folder), strict="return_all")
        assert not missing and not unexpected, (name, missing, unexpected)
        common = dist_checkpointing.load_common_state_dict(str(folder))
        for argument, value in a.items():
            assert getattr(common["args"], argument) == value, argument
        for i, (model, other) in enumerate(zip(models, expected, strict=True)):
            model.load_state_dict(loaded[f"model{i}" if len(models) > 1 else "model"])
            for tensor, value in model.state_dict().items():
                if torch.is_tensor(value):
                    wanted, rows = other.state_dict()[tensor], len(value)
                    if tensor in ("embedding.word_embeddings.weight", "output_layer.weight"):
                        first = parallel_state.get_tensor_model_parallel_rank() * len(value)
                        rows = max(0, min(rows, a["vocab_size"] - first))
                    if not torch.equal(value[:rows], wanted[:rows]):
                        raise ValueError(f"{name}: {tensor} differs")


def main(mode: str, folder: Path) -> None:
    """All cases."""
    init_ranks(folder / "saved" if mode == "save" else None)
    if mode == "tiny":
        with groups():
            whole = sharded(build(TINY))
        for (key, index, half), part in whole.items():
            first = zlib.crc32(f"{key} {index} {half}".encode()) % 1000
            numbers = torch.arange(first, first + part.data.numel()) % 1000
            part.data.detach().copy_(numbers.reshape(part.data.shape))
        save_sharded(folder, TINY, (2, 2, None, 1), whole)
    for name, saved, loaded in DISTRIBUTED if mode != "tiny" else ():
        if mode == "save":
            save(folder, name, saved)
        else:
            load(folder / "written" / name / "release", name, loaded)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
