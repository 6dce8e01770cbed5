"""A conversion holds a few slices at a time, however many layers there are: counted, not hoped for."""

import tracemalloc
import weakref

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.convert import hugging_face, safetensors_files
from tests.convert.hf_folders import GPT2_CONFIG, random_tensors, write_folder

pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

LAYERS, HIDDEN = 24, 96
LARGEST = 4 * HIDDEN * 4 * HIDDEN
"""Bytes of the largest tensor, the MLP's."""


class CountingReader(safetensors_files.SafetensorsReader):
    """Counts the bytes of the tensors that were read and are still in use."""

    alive = most = 0

    def read(self, name: str) -> np.ndarray:
        tensor = super().read(name)
        cls, size = CountingReader, tensor.nbytes
        cls.alive += size
        cls.most = max(cls.most, cls.alive)

        def forget() -> None:
            cls.alive -= size

        weakref.finalize(tensor, forget)
        return tensor


def shapes() -> dict[str, tuple[int, ...]]:
    block = {
        "ln_1.weight": (HIDDEN,),
        "ln_1.bias": (HIDDEN,),
        "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
        "attn.c_attn.bias": (3 * HIDDEN,),
        "attn.c_proj.weight": (HIDDEN, HIDDEN),
        "attn.c_proj.bias": (HIDDEN,),
        "ln_2.weight": (HIDDEN,),
        "ln_2.bias": (HIDDEN,),
        "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.c_fc.bias": (4 * HIDDEN,),
        "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
        "mlp.c_proj.bias": (HIDDEN,),
    }
    outside = {
        "wte.weight": (256, HIDDEN),
        "wpe.weight": (16, HIDDEN),
        "ln_f.weight": (HIDDEN,),
        "ln_f.bias": (HIDDEN,),
    }
    return outside | {f"h.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}


def peak_of(*options: str) -> int:
    """Most bytes that numpy and Python held at once during a conversion."""
    tracemalloc.start()
    try:
        assert main(options) == 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_a_few_tensors_not_the_model(tmp_path, monkeypatch):
    tensors = random_tensors(shapes())
    total = sum(t.nbytes for t in tensors.values())
    config = GPT2_CONFIG | {"n_layer": LAYERS, "n_embd": HIDDEN, "n_inner": None, "vocab_size": 256}
    hf = write_folder(tmp_path / "hf", tensors, config)
    del tensors
    ours, back = tmp_path / "ours", tmp_path / "back"
    monkeypatch.setattr(hugging_face, "SafetensorsReader", CountingReader)
    assert main(["--from", f"hf:{hf}", "--to", f"hf:{tmp_path / 'warm'}"]) == 0  # imports and caches
    CountingReader.most = 0
    there = peak_of("--from", f"hf:{hf}", "--to", f"mtjax:{ours}", "--vocab-multiple", "256")
    again = peak_of("--from", f"mtjax:{ours}", "--to", f"hf:{back}")
    assert total > 60 * LARGEST
    assert 0 < CountingReader.most <= 2 * LARGEST
    # Beside slices: the abstract model, names and shapes: less than a megabyte of Python.
    assert max(there, again) < 4 * LARGEST + 1_000_000 < total / 6
