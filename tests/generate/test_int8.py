"""int8 and int4 weights, compared with the same weights rounded in the input files."""

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import reshard

from mtjax import config
from mtjax.commands import convert
from mtjax.config.storage import PLAIN, Storage, check_storage
from mtjax.errors import UserError
from mtjax.generate.byte_matrix import to_bytes
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.generate.weights import load_model
from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import MeshShape
from mtjax.models.kernels.cached import attend_cached
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.kv_cache import CachePositions, KVCache
from mtjax.models.quantized_cache import QuantizedKVCache
from mtjax.sharding.axes import spec, use_rules
from mtjax.sharding.device_mesh import make_mesh
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
    "fp8": Storage("fp8"),
    "int4": Storage("int4", weights_group=GROUP),
    "int4 with zero points": Storage("int4", weights_group=GROUP, weights_zero_point=True),
}


def rounded(matrix: np.ndarray, inputs: int, kind: str) -> np.ndarray:
    """Rounds to 255 integers or floats for each output channel, or to 15 or 16 for each group of its inputs."""
    if kind == "fp8":
        scale = np.abs(matrix).max(inputs, keepdims=True) / np.float32(448)
        return (np.float32(matrix / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).astype(
            np.float32
        )
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
        if kind in ("int8", "fp8") or "wte" not in name
    }
    return tensors, by_hand, GPT2_CONFIG | {"n_positions": LONGEST}


def llama(kind: str) -> tuple[dict, dict, dict]:
    tensors = random_tensors(llama_shapes())
    outside = ("embed_tokens",) if kind in ("int8", "fp8") else ("embed_tokens", "lm_head")
    matrices = {name: a for name, a in tensors.items() if a.ndim == 2 and not any(each in name for each in outside)}
    return tensors, {name: rounded(a, 1, kind) for name, a in matrices.items()}, LLAMA_CONFIG


def greedy_texts(folder, mesh: str, storage: Storage = PLAIN) -> list[tuple[list[int], np.ndarray]]:
    loaded = load_model(f"hf:{folder}", mesh, storage=storage)
    decoder = GenerationPrograms(loaded.sharded_model, loaded.parameters, storage=storage, grids=loaded.grids)
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
        (gpt2, ("1x4",), "int8"),
        (llama, ("1x8",), "fp8"),
        (gpt2, ("1x4",), "int4 with zero points"),
        (llama, ("2x2",), "int4"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (gpt2, ("1x1",), "int8"),
                (llama, ("2x2", "1x8"), "int8"),
                (gpt2, ("1x1", "1x4"), "fp8"),
                (llama, ("2x2",), "fp8"),
                (llama, ("1x1",), "int4"),
            )
        ),
    ],
)
def test_texts_are_those_of_rounded_weights(family, meshes: tuple[str, ...], kind: str, tmp_path) -> None:
    """Also with a sharded or tied table, and with fewer key heads than the tensor parallel degree."""
    assert len(jax.devices()) >= 8  # in use: their number is fixed
    tensors, by_hand, settings = family(kind)
    for name, own in (("whole", tensors), ("rounded", tensors | by_hand)):
        write_folder(tmp_path / name, own, settings, tokenizer=True)
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


@pytest.mark.long
def test_a_quantized_folder_keeps_its_numbers(tmp_path, capsys) -> None:
    """GPTQ's numbers are not those that rounding to the nearest would find again; other settings are refused."""
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog, and runs away from all the bears. " * 20)
    write_folder(tmp_path / "whole", random_tensors(llama_shapes()), LLAMA_CONFIG, tokenizer=True)
    how = ["--quantize", "int4", "--group-size", str(GROUP), "--zero-point", "--calibration", str(text)]
    names = ["--from", f"hf:{tmp_path / 'whole'}", "--to", f"hf:{tmp_path / 'quantized'}"]
    # A group that does not fit is refused before the text is read.
    assert convert.main([*names, *how[:2], "--group-size", "5", "--calibration", str(tmp_path / "missing")]) == 2
    assert "--group-size is 5" in capsys.readouterr().err and not (tmp_path / "quantized").exists()
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


@pytest.mark.long
def test_a_folder_in_fp8_keeps_its_numbers(tmp_path) -> None:
    """The output table is rounded in addition."""
    from safetensors.numpy import load_file, save_file

    write_folder(tmp_path / "whole", random_tensors(llama_shapes()), LLAMA_CONFIG, tokenizer=True)
    for source, target, *options in (("whole", "fp8", "--quantize", "fp8"), ("fp8", "floats")):
        names = ["--from", f"hf:{tmp_path / source}", "--to", f"hf:{tmp_path / target}"]
        assert convert.main([*names, *options, "--dtype", "float32"]) == 0
    (file,) = (tmp_path / "floats").glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = rounded(tensors["lm_head.weight"], 1, "fp8")
    save_file(tensors, file)
    expected = greedy_texts(tmp_path / "floats", "1x1")
    for (ids, logprobs), (own, theirs) in zip(
        greedy_texts(tmp_path / "fp8", "1x2", STORED["fp8"]), expected, strict=True
    ):
        assert ids == own
        np.testing.assert_allclose(logprobs, theirs, atol=2e-5)
    with pytest.raises(UserError, match="would round again"):
        load_model(f"hf:{tmp_path / 'fp8'}", storage=STORED["int8"])


def test_matrices_of_8_bits() -> None:
    matrix = np.random.default_rng(0).standard_normal((5, 4, 3)).astype(np.float32)
    floats = to_bytes(jax.numpy.asarray(matrix), (0,), "fp8")
    np.testing.assert_allclose(floats.scales, np.abs(matrix).max(0) / 448, rtol=2e-7)
    expected = (matrix / np.asarray(floats.scales)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(floats.values).astype(np.float32), expected)
    known = np.broadcast_to(2 * np.asarray(floats.scales), matrix.shape)
    again = to_bytes(jax.numpy.asarray(matrix), (0,), "fp8", jax.numpy.asarray(known))  # scales of a folder are kept
    expected = (matrix / known).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(again.values).astype(np.float32), expected)
    matrix[:, 1, 2] = 0
    found = to_bytes(jax.numpy.asarray(matrix), (0,))
    assert found.values.dtype == "int8" and found.scales.shape == (4, 3)
    assert np.abs(np.asarray(found.values)).max(0)[matrix.any(0)].min() == 127
    error = np.abs(np.asarray(found.values) * np.asarray(found.scales) - matrix)
    assert (error <= np.asarray(found.scales) / 2 + 1e-6).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_cache(kind) -> None:
    """Attention to keys and values that numpy has rounded; the empty positions behind them are not read."""
    random = np.random.default_rng(0)
    most, dtype = (127, np.int8) if kind == "int8" else (448, ml_dtypes.float8_e4m3fn)
    new = random.standard_normal((2, 1, 5, 2, 16)).astype(np.float32) * np.float32([1, 30])[:, None]
    new[0, 0, 1, 1] = 0
    scales = np.abs(new).max(-1, keepdims=True) / most
    scaled = new / np.where(scales > 0, scales, 1)
    exact = (np.rint(scaled) if kind == "int8" else scaled).astype(dtype).astype(np.float32) * scales
    query = random.standard_normal((1, 5, 4, 16)).astype(np.float32)
    options = AttentionOptions(0.0)
    positions = CachePositions(jax.numpy.arange(5)[None], jax.numpy.int32(1), jax.numpy.int32(5))
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])), use_rules(TENSOR.rules.with_replicated_activations):
        sizes = (3, 2, 8, 16)
        caches = ((QuantizedKVCache.empty(*sizes, kind), new), (KVCache.empty(*sizes, np.float32), exact))

        def attended(cache, arrays):
            asked, *new = (reshard(a, spec("batch", "seq", "heads", "head_dim")) for a in (query, *arrays))
            return attend_cached(asked, *cache.extended(*new, positions)[1:], positions, options)

        found, expected = (jax.jit(attended)(*each) for each in caches)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(exact - new).max() > 1e-3


@pytest.mark.long
def test_texts_with_a_quantized_cache(tmp_path) -> None:
    """Probabilities are near those with the whole cache, on every mesh the same."""
    write_folder(tmp_path / "hf", *llama("int8")[::2], tokenizer=True)
    storage = Storage(cache_dtype="int8")
    whole, quantized = (greedy_texts(tmp_path / "hf", "1x1", each) for each in (PLAIN, storage))
    for (_, a), (_, b) in zip(whole, quantized, strict=True):
        assert 1e-5 < np.abs(a[:4] - b[:4]).max() < 0.1
    for (ids, a), (own, b) in zip(greedy_texts(tmp_path / "hf", "1x8", storage), quantized, strict=True):
        assert ids == own
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_caches_of_windows_are_refused() -> None:
    model = replace(config.load("gemma2-9b").model, vocab_size=100)
    with pytest.raises(UserError, match="cache_dtype fp8 does not support a model with windows of 4096 tokens"):
        check_storage(model, Storage(cache_dtype="fp8"))
