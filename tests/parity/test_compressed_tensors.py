"""Folders with quantized weights: transformers' compressed-tensors loads what mtjax writes, and the reverse."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtjax.commands import convert
from mtjax.convert import gptq
from mtjax.generate.moments import input_moments
from mtjax.generate.weights import load_model
from mtjax.models.weight_grid import fitted_grid
from tests.convert.hf_folders import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder
from tests.parity.compare import relative
from tests.parity.converted import our_logits

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")
pytest.importorskip("compressed_tensors", reason="needs the extra parity")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]

IDS = np.random.default_rng(0).integers(0, 300, (1, 24))
KINDS = {
    "int8": ["--quantize", "int8"],
    "fp8": ["--quantize", "fp8"],
    "int4": ["--quantize", "int4", "--group-size", "16"],
    "int4 with zero points": ["--quantize", "int4", "--group-size", "32", "--zero-point"],
}
ERRORS = {"int8": 0.01, "fp8": 0.05, "int4": 0.2, "int4 with zero points": 0.2}
"""Largest difference of a weight, in units of the largest weight of the matrix."""


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("network") / "hf"
    model.save_pretrained(folder)
    return folder


def written(network: Path, target: Path, *options: str) -> Path:
    assert convert.main(["--from", f"hf:{network}", "--to", f"hf:{target}", *options]) == 0
    return target


def logits_of_transformers(folder: Path) -> np.ndarray:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    # transformers 5.24 with compressed-tensors 0.20 allocates zero points unpacked where it keeps weights packed.
    symmetric = settings["config_groups"]["group_0"]["weights"]["symmetric"]
    how = {} if symmetric else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(IDS)).logits.numpy()


def read_back(folder: Path) -> np.ndarray:
    target = folder.with_name(f"{folder.name}-mtjax")
    assert convert.main(["--from", f"hf:{folder}", "--to", f"mtjax:{target}"]) == 0
    return our_logits(target, IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_is_written(kind: str, network: Path, tmp_path: Path) -> None:
    """Equal logits: the weights that transformers unpacks, and those that mtjax reads back, are the same numbers."""
    folder = written(network, tmp_path / "quantized", *KINDS[kind])
    theirs = logits_of_transformers(folder)
    assert relative(read_back(folder), theirs) < 1e-5
    # Read as floats and written again without quantization, the numbers are the same.
    assert convert.main(["--from", f"hf:{folder}", "--to", f"hf:{tmp_path / 'floats'}"]) == 0
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    assert not hasattr(floats.config, "quantization_config")
    whole = transformers.AutoModelForCausalLM.from_pretrained(network, dtype=torch.float32)
    for (name, a), b in zip(whole.named_parameters(), floats.parameters(), strict=True):
        difference = ((a - b).abs().max() / a.abs().max()).item()
        assert difference <= ERRORS[kind] if "_proj" in name else difference == 0, name
        assert difference > 1e-4 or "_proj" not in name, name
    with torch.no_grad():
        assert relative(floats(torch.from_numpy(IDS)).logits.numpy(), theirs) < 1e-5


@pytest.mark.parametrize("kind", ["int4 with zero points", "fp8"])
def test_what_compressed_tensors_writes_is_read(kind: str, network: Path, tmp_path: Path) -> None:
    """Weights that the library itself packs, from scales by its observer's formula."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file, save_file

    ours = written(network, tmp_path / "ours", *KINDS[kind])
    config = json.loads((ours / "config.json").read_text())
    settings = config["quantization_config"]
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor, tensors = BaseCompressor.get_value_from_registry(settings["format"]), {}
    for name, weight in load_file(network / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = weight
            continue
        groups = weight.reshape(len(weight), -1, scheme.weights.group_size or weight.shape[1])
        state = {"weight": weight, "weight_scale": groups.abs().amax(2) / 400}
        if kind != "fp8":
            low, high = groups.amin(2), groups.amax(2)
            state["weight_scale"] = (high - low) / 15
            state["weight_zero_point"] = (-8 - low / state["weight_scale"]).round().clamp(-8, 7).to(torch.int8)
        parts = compressor.compress(state, scheme)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    (theirs / "config.json").write_text(json.dumps(config))
    assert relative(read_back(theirs), logits_of_transformers(theirs)) < 1e-5


def test_moments_are_those_of_transformers(tmp_path: Path) -> None:
    """What GPTQ knows of a matrix's inputs, against hooks on transformers' modules."""
    folder = write_folder(tmp_path / "hf", random_tensors(llama_shapes()), LLAMA_CONFIG, tokenizer=True)
    (tmp_path / "text").write_text(
        "The quick brown fox jumps over the lazy dog, and runs away from all the bears. " * 9
    )
    loaded, length = load_model(f"hf:{folder}", dtype="float32"), LLAMA_CONFIG["max_position_embeddings"]
    ids = np.array(loaded.tokenizer.encode((tmp_path / "text").read_text()))[: 2 * length].reshape(2, length)
    found = input_moments(loaded, ids.ravel().tolist(), 2)
    model, expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}

    def note(name: str, inputs: tuple) -> None:
        x = inputs[0].flatten(0, -2).double()
        expected[name] = expected.get(name, 0) + (x.T @ x).numpy()

    parts = {"attention.qkv": "self_attn.q_proj", "attention.output": "self_attn.o_proj"}
    parts |= {"mlp.up": "mlp.gate_proj", "mlp.down": "mlp.down_proj"}
    for name, module in model.named_modules():
        if name.endswith(tuple(parts.values())):
            module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
    with torch.no_grad():
        for row in ids:
            model(torch.from_numpy(row[None]))
    assert len(found) == len(expected) == 4 * LLAMA_CONFIG["num_hidden_layers"]
    for (name, layer), moments in found.items():
        part = next(theirs for ours, theirs in parts.items() if name.endswith(ours))
        assert relative(moments, expected[f"model.layers.{layer}.{part}"]) < 2e-6, (name, layer)
    # What is written has smaller errors on these inputs than the nearest numbers, in each matrix.
    how, errors = ["--quantize", "int4", "--group-size", "16"], {}
    for name, more in (
        ("gptq", ["--calibration", str(tmp_path / "text"), "--calibration-samples", "2"]),
        ("nearest", []),
    ):
        target = written(folder, tmp_path / name, *how, *more)
        assert convert.main(["--from", f"hf:{target}", "--to", f"hf:{target}-floats"]) == 0
        weights = transformers.AutoModelForCausalLM.from_pretrained(f"{target}-floats", dtype=torch.float32)
        for module, moments in expected.items():
            change = (
                (weights.get_submodule(module).weight - model.get_submodule(module).weight).detach().double().numpy()
            )
            errors[name, module] = np.einsum("oi,ij,oj", change, moments, change)
    assert all(errors["gptq", module] < 0.7 * errors["nearest", module] for module in expected), errors


def test_gptq_compensates_errors() -> None:
    """Errors of products fall to a fraction of rounding's, with groups that end within a block and behind it; inputs
    that don't correlate are rounded to the nearest."""
    random = np.random.default_rng(0)
    mix = random.standard_normal((256, 256)) * np.exp(-np.arange(256) / 20)[:, None]
    inputs = random.standard_normal((2000, 256)) @ mix
    weight = random.standard_normal((32, 256)).astype(np.float32)
    for group, zero_point in ((32, True), (64, False), (256, False)):
        blocks = weight.reshape(32, -1, group)
        grid = fitted_grid(blocks, 2, 4, np.float32, zero_point=zero_point)
        nearest = grid.values(grid.round(blocks)).reshape(32, 256)
        integers, own = gptq.quantize(weight, inputs.T @ inputs, 4, group, np.float32, zero_point)
        better = own.values(integers.reshape(32, -1, group)).reshape(32, 256)
        errors = [np.square((a - weight) @ inputs.T).mean() for a in (better, nearest)]
        assert errors[0] < errors[1] / 8
        apart, own = gptq.quantize(weight, np.diag(random.uniform(1, 9, 256)), 4, group, np.float32, zero_point)
        np.testing.assert_allclose(own.values(apart.reshape(32, -1, group)).reshape(32, 256), nearest, atol=1e-6)
