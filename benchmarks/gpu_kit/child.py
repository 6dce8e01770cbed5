"""The processes of a part, and how they report results."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Config


@dataclass(frozen=True)
class Child:
    """A process of a part; its results are in `FOLDER/NAME.json`, which every update rewrites, so that none is lost."""

    name: str
    folder: Path
    rehearse: bool

    def answer(self, found: dict[str, Any]) -> None:
        """Writes the results so far."""
        path = self.folder / f"{self.name}.json"
        path.with_suffix(".new").write_text(json.dumps(found, indent=1))
        path.with_suffix(".new").replace(path)

    def wait_for_turn(self) -> None:
        """Signals that compilation is done, and waits until no other process uses the GPU."""
        (self.folder / f"{self.name}.ready").touch()
        while not (self.folder / f"{self.name}.go").exists():
            time.sleep(0.05)


def next_tokens(config: Config, step: int) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens for GPT and Llama."""
    size, length = config.training.global_batch_size, config.model.sequence_length
    vocab = config.model.vocab_size or 50257
    text = np.random.default_rng(step).integers(0, vocab, (size, length + 1), dtype=np.int32)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": np.ones((size, length), np.float32),
        "sample_index": np.arange(step * size, (step + 1) * size, dtype=np.uint32),
    }
