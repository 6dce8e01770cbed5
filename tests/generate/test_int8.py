"""int8 weights, compared with the same weights rounded to int8 in the input files."""

import jax
import numpy as np
import pytest

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
NEW, LONGEST = 8, 32
PROMPTS = [np.random.default_rng(n).integers(0, 290, n).tolist() for n in (1, 9)]


def rounded(matrix: np.ndarray, inputs: int) -> np.ndarray:
    """Rounds symmetrically to 255 values for each output channel."""
    scale = np.abs(matrix).max(inputs, keepdims=True) / 127
    return (np.rint(matrix / scale) * scale).astype(np.float32)


def gpt2() -> tuple[dict, dict, dict]:
    tensors = random_tensors(gpt2_shapes() | {"transformer.wpe.weight": (LONGEST, HIDDEN)})
    matrices = {name: a for name, a in tensors.items() if a.ndim == 2 and "wpe" not in name}
    by_hand = {name: rounded(a, 1 if "wte" in name else 0) for name, a in matrices.items()}
    return tensors, by_hand, GPT2_CONFIG | {"n_positions": LONGEST}


def llama() -> tuple[dict, dict, dict]:
    tensors = random_tensors(llama_shapes())
    matrices = {name: a for name, a in tensors.items() if a.ndim == 2 and "embed_tokens" not in name}
    return tensors, {name: rounded(a, 1) for name, a in matrices.items()}, LLAMA_CONFIG


def greedy_texts(folder, mesh: str, *, int8: bool) -> list[tuple[list[int], np.ndarray]]:
    loaded = load_model(f"hf:{folder}", mesh)
    engine = Engine(Decoder(loaded.placed, loaded.parameters, int8=int8), 2, chunks=(8, 16), min_cache_length=32)
    texts: list[list[Token]] = [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, texts, strict=True):
        listen = {"on_prompt": tokens.extend, "on_token": tokens.append, "logprobs": True, "echo": True}
        engine.submit(Request(tuple(prompt), Sampling(NEW), **listen))
    engine.run()
    return [([t.id for t in tokens], np.array([t.logprob for t in tokens[1:]])) for tokens in texts]


@pytest.mark.long
@pytest.mark.parametrize(("family", "meshes"), [(gpt2, ("1x1", "1x4")), (llama, ("2x2", "1x8"))])
def test_texts_are_those_of_rounded_weights(family, meshes: tuple[str, ...], tmp_path) -> None:
    """Also with a sharded or tied table, and with fewer key heads than the tensor parallel degree."""
    assert len(jax.devices()) >= 8  # in use: their number is fixed
    tensors, by_hand, config = family()
    for name, own in (("whole", tensors), ("rounded", tensors | by_hand)):
        write_folder(tmp_path / name, own, config, tokenizer=True)
    expected = greedy_texts(tmp_path / "rounded", "1x1", int8=False)
    for mesh in meshes:
        for (ids, logprobs), (own, theirs) in zip(
            greedy_texts(tmp_path / "whole", mesh, int8=True), expected, strict=True
        ):
            assert ids == own, mesh
            np.testing.assert_allclose(logprobs, theirs, atol=2e-5)
    assert any(
        np.abs(a - b).max() > 1e-3
        for (_, a), (_, b) in zip(expected, greedy_texts(tmp_path / "whole", "1x1", int8=False), strict=True)
    )


def test_int8_matrix() -> None:
    matrix = np.random.default_rng(0).standard_normal((5, 4, 3)).astype(np.float32)
    matrix[:, 1, 2] = 0
    found = to_int8(jax.numpy.asarray(matrix), (0,))
    assert found.values.dtype == "int8" and found.scales.shape == (4, 3)
    assert np.abs(np.asarray(found.values)).max(0)[matrix.any(0)].min() == 127
    error = np.abs(np.asarray(found.values) * np.asarray(found.scales) - matrix)
    assert (error <= np.asarray(found.scales) / 2 + 1e-6).all()
