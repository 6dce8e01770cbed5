"""int8 and int4 weights, compared with the same weights rounded in the input files."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mtjax.commands import convert
from mtjax.config.storage import PLAIN, Storage
from mtjax.errors import UserError
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.int8 import to_int8
from mtjax.generate.request import Request, Sampling, Token
from mtjax.generate.weights import load_model
from tests.convert.hf_folders import (
    GPT2_CONFIG,
    HIDDEN,
    LLAMA_CONFIG,
    gpt2_shapes,
    llama_shapes,
    random_tensors,
    write_folder,
)

pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
NEW, LONGEST, GROUP = 8, 32, 4
PROMPTS = [np.random.default_rng(n).integers(0, 290, n).tolist() for n in (1, 9)]


STORED = {
    "int8": Storage("int8"),
    "int4": Storage("int4", weights_group=GROUP),
    "int4 with zero points": Storage("int4", weights_group=GROUP, weights_zero_point=True),
}


def rounded(matrix: np.ndarray, inputs: int, kind: str) -> np.ndarray:
    """Rounds to 255 values for each output channel, or to 15 or 16 for each group of its inputs."""
    if kind == "int8":
        scale = np.abs(matrix).max(inputs, keepdims=True) / 127
        return (np.rint(matrix / scale) * scale).astype(np.float32)
    moved = np.moveaxis(matrix, inputs, -1)
    groups = moved.astype(np.float64).reshape(-1, GROUP)
    for i, group in enumerate(groups):
        if kind == "int4":
            scale = np.float32(np.abs(group).max() / 7)
            groups[i] = np.rint(group / scale) * scale
        else:
            low, high = min(group.min(), 0), max(group.max(), 0)
            scale = np.float32((high - low) / 15)
            zero = np.rint(-low / scale)
            groups[i] = (np.clip(np.rint(group / scale) + zero, 0, 15) - zero) * scale
    return np.ascontiguousarray(np.moveaxis(groups.reshape(moved.shape), -1, inputs), np.float32)


def gpt2(kind: str) -> tuple[dict, dict, dict]:
    tensors = random_tensors(gpt2_shapes() | {"transformer.wpe.weight": (LONGEST, HIDDEN)})
    matrices = {name: a for name, a in tensors.items() if a.ndim == 2 and "wpe" not in name}
    by_hand = {
        name: rounded(a, 1 if "wte" in name else 0, kind)
        for name, a in matrices.items()
        if kind == "int8" or "wte" not in name
    }
    return tensors, by_hand, GPT2_CONFIG | {"n_positions": LONGEST}


def llama(kind: str) -> tuple[dict, dict, dict]:
    tensors = random_tensors(llama_shapes())
    outside = ("embed_tokens",) if kind == "int8" else ("embed_tokens", "lm_head")
    matrices = {name: a for name, a in tensors.items() if a.ndim == 2 and not any(each in name for each in outside)}
    return tensors, {name: rounded(a, 1, kind) for name, a in matrices.items()}, LLAMA_CONFIG


def greedy_texts(folder, mesh: str, storage: Storage = PLAIN) -> list[tuple[list[int], np.ndarray]]:
    loaded = load_model(f"hf:{folder}", mesh, storage=storage)
    decoder = Decoder(loaded.placed, loaded.parameters, storage=storage, grids=loaded.grids)
    engine = Engine(decoder, 2, chunks=(8, 16), min_cache_length=32)
    texts: list[list[Token]] = [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, texts, strict=True):
        listen = {"on_prompt": tokens.extend, "on_token": tokens.append, "logprobs": True, "echo": True}
        engine.submit(Request(tuple(prompt), Sampling(NEW), **listen))
    engine.run()
    return [([t.id for t in tokens], np.array([t.logprob for t in tokens[1:]])) for tokens in texts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "meshes", "kind"),
    [
        (gpt2, ("1x1", "1x4"), "int8"),
        (llama, ("2x2", "1x8"), "int8"),
        (gpt2, ("1x4",), "int4 with zero points"),
        (llama, ("1x1", "2x2"), "int4"),
    ],
)
def test_texts_are_those_of_rounded_weights(family, meshes: tuple[str, ...], kind: str, tmp_path) -> None:
    """Also with a sharded or tied table, and with fewer key heads than the tensor parallel degree."""
    assert len(jax.devices()) >= 8  # in use: their number is fixed
    tensors, by_hand, config = family(kind)
    for name, own in (("whole", tensors), ("rounded", tensors | by_hand)):
        write_folder(tmp_path / name, own, config, tokenizer=True)
    expected = greedy_texts(tmp_path / "rounded", "1x1")
    for mesh in meshes:
        for (ids, logprobs), (own, theirs) in zip(
            greedy_texts(tmp_path / "whole", mesh, STORED[kind]), expected, strict=True
        ):
            assert ids == own, mesh
            np.testing.assert_allclose(logprobs, theirs, atol=2e-5)
    assert any(
        np.abs(a - b).max() > 1e-3
        for (_, a), (_, b) in zip(expected, greedy_texts(tmp_path / "whole", "1x1"), strict=True)
    )


def test_a_quantized_folder_keeps_its_numbers(tmp_path) -> None:
    """GPTQ's numbers are not those that rounding to the nearest would find again; other settings are refused."""
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog, and runs away from all the bears. " * 20)
    write_folder(tmp_path / "whole", random_tensors(llama_shapes()), LLAMA_CONFIG, tokenizer=True)
    how = ["--quantize", "int4", "--group-size", str(GROUP), "--zero-point", "--calibration", str(text)]
    names = ["--from", f"hf:{tmp_path / 'whole'}", "--to", f"hf:{tmp_path / 'quantized'}"]
    assert convert.main([*names, *how, "--calibration-samples", "2"]) == 0
    storage = STORED["int4 with zero points"]
    expected = greedy_texts(tmp_path / "quantized", "1x1")
    for (ids, logprobs), (own, theirs) in zip(
        greedy_texts(tmp_path / "quantized", "1x2", storage), expected, strict=True
    ):
        assert ids == own
        np.testing.assert_allclose(logprobs, theirs, atol=2e-5)
    for other in (STORED["int8"], STORED["int4"], replace(storage, weights_group=8)):
        with pytest.raises(UserError, match="would round again"):
            load_model(f"hf:{tmp_path / 'quantized'}", storage=other)


def test_int8_matrix() -> None:
    matrix = np.random.default_rng(0).standard_normal((5, 4, 3)).astype(np.float32)
    matrix[:, 1, 2] = 0
    found = to_int8(jax.numpy.asarray(matrix), (0,))
    assert found.values.dtype == "int8" and found.scales.shape == (4, 3)
    assert np.abs(np.asarray(found.values)).max(0)[matrix.any(0)].min() == 127
    error = np.abs(np.asarray(found.values) * np.asarray(found.scales) - matrix)
    assert (error <= np.asarray(found.scales) / 2 + 1e-6).all()
