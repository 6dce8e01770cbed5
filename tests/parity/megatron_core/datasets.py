"""megatron-core's indexed files, GPT samples and blends."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from tests.parity.megatron_core.cases import CORPORA, DATASETS, EOD, SEQUENCE, VOCAB
from tests.parity.megatron_core.world import world

TOKENIZER = SimpleNamespace(vocab_size=VOCAB, eod=EOD, pad=-1, unique_identifiers={"class": "none"})


def write_corpora(folder: Path) -> None:
    """`NAME.bin` and `NAME.idx`: documents of random length, each with an end."""
    for seed, (name, (documents, longest)) in enumerate(CORPORA.items()):
        random = np.random.default_rng(seed)
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        for _ in range(documents):
            text = [*random.integers(1, VOCAB, random.integers(longest)), EOD]
            builder.add_document(torch.tensor(text), [len(text)])
        builder.finalize(f"{folder / name}.idx")


def read_back(ours: Path) -> dict[str, Any]:
    """What its IndexedDataset reads from the files of ours in a folder."""
    found: dict[str, Any] = {}
    for name in CORPORA:
        data = IndexedDataset(str(ours / name))
        found[f"{name} documents"] = np.array(data.document_indices)  # what it has is gone with its map of the file
        found[f"{name} lengths"] = np.array(data.sequence_lengths)
        found[f"{name} tokens"] = np.concatenate([data[i] for i in range(len(data))])
    return found


def _datasets(case: dict[str, Any], corpora: Path, cache: Path) -> list[Any]:
    """Train, validation and test, None where the split has none."""
    is_reset = case.get("reset", False)
    config = GPTDatasetConfig(
        random_seed=case.get("seed", 1234),
        sequence_length=SEQUENCE,
        blend=([str(corpora / name) for name in case["blend"]], case.get("weights")),
        split=case.get("split", "60,25,15"),
        path_to_cache=str(cache),
        tokenizer=TOKENIZER,  # pyright: ignore[reportArgumentType]
        reset_position_ids=is_reset,
        reset_attention_mask=is_reset,
        eod_mask_loss=is_reset,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(case["samples"]), lambda: True, config).build()


def _arrays(dataset: Any) -> dict[str, np.ndarray]:
    """Its indices, and every sample."""
    names = ("document_index", "sample_index", "shuffle_index")
    if isinstance(dataset, BlendedDataset):
        names = ("dataset_index", "dataset_sample_index")
    found = {name: getattr(dataset, name) for name in names}
    samples = [dataset[i] for i in range(len(dataset))]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
        found[name] = np.stack([sample[name].numpy() for sample in samples])
    return found


def write_datasets(folder: Path, corpora: Path) -> None:
    """`CASE.npz` of each case, arrays by split and name."""
    with world():
        for name, case in DATASETS.items():
            found = zip(("train", "valid", "test"), _datasets(case, corpora, folder / "cache"), strict=True)
            arrays = {f"{split} {kind}": a for split, d in found if d is not None for kind, a in _arrays(d).items()}
            np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)
