"""Checkpoints in Megatron-LM's layout, written by hand from its published sources: of a GPT given in GPT-2's names.

Rows of query_key_value: [3, heads, width] in version 0, [heads, width, 3] in version 1, [heads, 3, width] since 2.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

HEADS = 8


def query_key_value(merged: np.ndarray, version: float, rank: int, ranks: int) -> np.ndarray:
    """GPT-2's [inputs, 3 x hidden], or its bias [3 x hidden], as the rows of one rank."""
    rows = merged.T.reshape(3, HEADS, -1, *merged.T.shape[1:])
    mine = rows[:, rank * HEADS // ranks : (rank + 1) * HEADS // ranks]
    inner = tuple(range(3, mine.ndim))
    order = {0: (0, 1, 2), 1: (1, 2, 0)}.get(int(version), (1, 0, 2))
    return mine.transpose(*order, *inner).reshape(-1, *merged.T.shape[1:])


def rows_of_rank(array: np.ndarray, rank: int, ranks: int, axis: int = 0) -> np.ndarray:
    return np.split(array, ranks, axis)[rank]


def layer(tensors: dict[str, np.ndarray], i: int, version: float, rank: int, ranks: int) -> dict[str, np.ndarray]:
    t = {name: tensors[f"transformer.h.{i}.{name}"] for name in _names(tensors)}
    return {
        "input_layernorm.weight": t["ln_1.weight"],
        "input_layernorm.bias": t["ln_1.bias"],
        "attention.query_key_value.weight": query_key_value(t["attn.c_attn.weight"], version, rank, ranks),
        "attention.query_key_value.bias": query_key_value(t["attn.c_attn.bias"], version, rank, ranks),
        "attention.dense.weight": rows_of_rank(t["attn.c_proj.weight"].T, rank, ranks, 1),
        "attention.dense.bias": t["attn.c_proj.bias"],
        "post_attention_layernorm.weight": t["ln_2.weight"],
        "post_attention_layernorm.bias": t["ln_2.bias"],
        "mlp.dense_h_to_4h.weight": rows_of_rank(t["mlp.c_fc.weight"].T, rank, ranks),
        "mlp.dense_h_to_4h.bias": rows_of_rank(t["mlp.c_fc.bias"], rank, ranks),
        "mlp.dense_4h_to_h.weight": rows_of_rank(t["mlp.c_proj.weight"].T, rank, ranks, 1),
        "mlp.dense_4h_to_h.bias": t["mlp.c_proj.bias"],
    }


def _names(tensors: dict[str, np.ndarray]) -> list[str]:
    return [n.removeprefix("transformer.h.0.") for n in tensors if n.startswith("transformer.h.0.")]


def arguments(version: float, tensor: int, pipeline: int, rows: int, num_layers: int) -> argparse.Namespace:
    split = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    return argparse.Namespace(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=HEADS,
        max_position_embeddings=16,
        padded_vocab_size=rows,
        layernorm_epsilon=1e-6,
        **({"ffn_hidden_size": 80, "kv_channels": 4} if version >= 2 else {}),
        **(split if version >= 3 else {"model_parallel_size": tensor}),
    )


def write_gpt(
    folder: Path,
    tensors: dict[str, np.ndarray],
    version: float,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    chunks: int = 1,
    rows: int = 384,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A GPT as a version's `save_checkpoint` leaves it, with what else stands in such a file.

    `chunks` interleaved stages are written as `model0`, `model1`, ...
    """
    import torch

    num_layers = sum(name.endswith("ln_1.weight") for name in tensors)
    per_chunk = num_layers // (pipeline * chunks)
    table = np.pad(tensors["transformer.wte.weight"], [(0, rows - len(tensors["transformer.wte.weight"])), (0, 0)])
    table[300:] = 7.0  # what training left in the padding
    key = "encoder" if version >= 2 else "transformer"
    iteration = folder / "iter_0000042"
    for rank in range(tensor):
        for stage in range(pipeline):
            models = []
            for chunk in range(chunks):
                position = chunk * pipeline + stage
                first, last = position == 0, position == pipeline * chunks - 1
                inner: dict[str, np.ndarray] = {}
                for local in range(per_chunk):
                    found = layer(tensors, position * per_chunk + local, version, rank, tensor)
                    names = {n: n.replace("attention.", "self_attention.", 1) for n in found if n[:9] == "attention"}
                    names = names if version >= 3 else {}
                    inner |= {f"layers.{local}.{names.get(n, n)}": a for n, a in found.items()}
                if last:
                    inner |= {f"final_layernorm.{x}": tensors[f"transformer.ln_f.{x}"] for x in ("weight", "bias")}
                shard = rows_of_rank(table, rank, tensor)
                language: dict[str, Any] = {key: inner}
                if first:
                    positions = {"weight": tensors["transformer.wpe.weight"]}
                    language["embedding"] = {"word_embeddings": {"weight": shard}, "position_embeddings": positions}
                model: dict[str, Any] = {"language_model": language}
                if last and not first:
                    model["word_embeddings_for_head"] = {"weight": shard}
                models.append(_as_torch(model))
            content: dict[str, Any] = {"args": arguments(version, tensor, pipeline, rows, num_layers), "iteration": 42}
            content |= {"checkpoint_version": version} if version else {}  # the first version did not say
            content |= {"model": models[0]} if chunks == 1 else {f"model{i}": m for i, m in enumerate(models)}
            content |= {"rng_state": [{"np_rng_state": np.random.default_rng(0).bit_generator.state}], **(extra or {})}
            suffix = f"_{stage:03}" if pipeline > 1 else ""
            path = iteration / f"mp_rank_{rank:02}{suffix}"
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("42")
    return folder


def _as_torch(tree: Any) -> Any:
    import torch

    if isinstance(tree, dict):
        return {name: _as_torch(value) for name, value in tree.items()}
    return torch.from_numpy(np.ascontiguousarray(tree))


def write_bert(folder: Path, tensors: dict[str, np.ndarray], tensor: int, pipeline: int, *, rows: int = 384) -> Path:
    """A BERT as version 3 leaves it, of one given in transformers' names of its pre-LN BERT, with exact GELU."""
    import torch

    t = {name.removeprefix("bert."): array for name, array in tensors.items()}
    num_layers = sum(name.endswith("attention.ln.weight") for name in t)
    each = num_layers // pipeline
    for rank in range(tensor):

        def mine(array: np.ndarray, axis: int = 0, rank: int = rank) -> np.ndarray:
            return rows_of_rank(array, rank, tensor, axis)

        for stage in range(pipeline):
            inner: dict[str, np.ndarray] = {}
            for local in range(each):
                block = f"encoder.layer.{stage * each + local}"
                for kind in ("weight", "bias"):
                    parts = [t[f"{block}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
                    merged = np.concatenate([p.T for p in parts], -1)
                    out, down = (t[f"{block}.{x}.{kind}"] for x in ("attention.output.dense", "output.dense"))
                    up = t[f"{block}.intermediate.dense.{kind}"]
                    found = {
                        "input_layernorm": t[f"{block}.attention.ln.{kind}"],
                        "self_attention.query_key_value": query_key_value(merged, 3.0, rank, tensor),
                        "self_attention.dense": mine(out, 1) if kind == "weight" else out,
                        "post_attention_layernorm": t[f"{block}.ln.{kind}"],
                        "mlp.dense_h_to_4h": mine(up),
                        "mlp.dense_4h_to_h": mine(down, 1) if kind == "weight" else down,
                    }
                    inner |= {f"layers.{local}.{name}.{kind}": array for name, array in found.items()}
            language: dict[str, Any] = {"encoder": inner}
            model: dict[str, Any] = {"language_model": language}

            def padded(array: np.ndarray) -> np.ndarray:
                return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))

            table = mine(padded(t["embeddings.word_embeddings.weight"]))
            if stage == 0:
                language["embedding"] = {
                    "word_embeddings": {"weight": table},
                    "position_embeddings": {"weight": t["embeddings.position_embeddings.weight"]},
                    "tokentype_embeddings": {"weight": t["embeddings.token_type_embeddings.weight"]},
                }
            if stage == pipeline - 1:
                both = ("weight", "bias")
                inner |= {f"final_layernorm.{x}": t[f"encoder.ln.{x}"] for x in both}
                language["pooler"] = {f"dense.{x}": t[f"pooler.dense.{x}"] for x in both}
                transform = "cls.predictions.transform"
                model["lm_head"] = {
                    "bias": mine(padded(t["cls.predictions.bias"])),
                    **{f"dense.{x}": t[f"{transform}.dense.{x}"] for x in both},
                    **{f"layernorm.{x}": t[f"{transform}.LayerNorm.{x}"] for x in both},
                }
                model["binary_head"] = {x: t[f"cls.seq_relationship.{x}"] for x in both}
                model |= {"word_embeddings_for_head": {"weight": table}} if stage else {}
            args = arguments(3.0, tensor, pipeline, rows, num_layers)
            args.bias_gelu_fusion, args.layernorm_epsilon = False, 1e-12
            content = {"args": args, "checkpoint_version": 3.0, "iteration": 42, "model": _as_torch(model)}
            path = folder / f"mp_rank_{rank:02}{f'_{stage:03}' if pipeline > 1 else ''}"
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    return folder
