"""The hardware table: consistent with itself, found by every name, and readable for XLA."""

import re

import pytest

from mtjax.analysis import hardware, target
from mtjax.analysis.hardware import GPUS, SERVERS
from mtjax.errors import UserError

TENSOR_FLOPS_PER_CLOCK = {"v100": 1024, "a100-40": 2048, "a100-80": 2048, "h100": 4096, "h200": 4096, "b200": 8192}
"""Dense 16-bit FLOPs of a multiprocessor and clock, from the architecture white papers."""
TENSOR_CLOCK = {"v100": 1.597, "a100-40": 1.41, "a100-80": 1.41, "h100": 1.83, "h200": 1.83, "b200": 1.86}
"""GHz that tensor-core peaks are stated at (lower than the boost clock from H100 on)."""


@pytest.mark.parametrize("name", GPUS)
def test_peak_is_multiprocessors_times_clock(name):
    gpu = GPUS[name]
    peak = gpu.multiprocessors * TENSOR_FLOPS_PER_CLOCK[name] * TENSOR_CLOCK[name] * 1e9
    assert gpu.peak["float16"] == pytest.approx(peak, rel=0.01)
    lanes = gpu.multiprocessors * gpu.cores_per_multiprocessor * 2 * gpu.clock * 1e9
    assert gpu.peak["float32"] == pytest.approx(lanes, rel=0.02)


def test_the_papers_30_percent():
    assert 39e12 / GPUS["v100"].peak_flops("float16") == pytest.approx(0.30, abs=0.005)


def test_float32_means_tf32_where_there_is_one():
    assert GPUS["h100"].peak_flops("float32") == GPUS["h100"].peak["tensorfloat32"]
    assert GPUS["v100"].peak_flops("float32") == GPUS["v100"].peak["float32"]
    with pytest.raises(UserError, match="no peak is known for bfloat16 on v100"):
        GPUS["v100"].peak_flops("bfloat16")


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_found_by_what_jax_calls_it(kind):
    gpu = hardware.by_device_kind(kind)
    assert gpu is not None and kind in (gpu.description, *gpu.other_names)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 MIG 1g.18gb", "NVIDIA A100-PCIE-40GB"])
def test_other_parts_are_not_guessed(kind):
    assert hardware.by_device_kind(kind) is None


@pytest.mark.parametrize(
    ("text", "name", "gpus"),
    [
        ("h100x8", "h100", 8),
        ("H100x4", "h100", 4),
        ("a100-40x8", "a100-40", 8),
        ("v100x16", "v100", 16),
        ("h200", "h200", 8),
    ],
)
def test_targets(text, name, gpus):
    server = target.parse(text)
    assert (server.gpu.name, server.gpus) == (name, gpus)
    assert server.link == SERVERS[name].link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h101x8", "no GPU kind is called 'h101' - did you mean 'h100'"),
        ("h100x0", "0 GPUs in a server"),
        ("", "is not KINDxGPUS"),
        ("h100x8x8", "no GPU kind|is not KINDxGPUS"),
        ("nowhere.toml", "no target file"),
    ],
)
def test_wrong_targets(text, message):
    with pytest.raises(UserError, match=message):
        target.parse(text)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'gpu = "h100"\ngpus = 4\nnetwork = 12.5e9\n[gpu_facts]\nmemory = 94000000000\npeak = {bfloat16 = 8e14}\n'
    )
    server = target.parse(str(path))
    assert (server.gpus, server.network, server.gpu.memory) == (4, 12.5e9, 94_000_000_000)
    assert server.gpu.peak_flops("bfloat16") == 8e14
    assert server.link == SERVERS["h100"].link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus = 8", "has no gpu: add a known GPU"),
        ('gpu = "h100"\nlnik = 1', "unknown key 'lnik' - did you mean 'link'"),
        ('gpu = "h100"\nlink = -1', "link = -1 should be a number above 0"),
        ('gpu = "h100"\ngpus = 2.5', "gpus = 2.5 should be an integer"),
        ("gpu = [", "is not valid TOML"),
        ('gpu = "h100"\ngpu_facts = 3', "gpu_facts is a table"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        target.parse(str(path))


@pytest.mark.parametrize("name", [n for n in GPUS if n != "v100"])
def test_descriptions_for_xla_hold_the_facts(name):
    gpu = GPUS[name]
    text = gpu.target_description()
    facts = dict(re.findall(r"^  (\w+): (\S+)$", text, re.MULTILINE))
    assert int(facts["core_count"]) == gpu.multiprocessors
    assert int(facts["device_memory_size"]) == gpu.memory
    assert float(facts["memory_bandwidth"]) == gpu.bandwidth
    assert f"major: {gpu.compute_capability[0]}" in text
    assert text.count("{") == text.count("}")


def test_volta_is_refused_for_compiling():
    with pytest.raises(UserError, match=r"compute capability 7\.0"):
        GPUS["v100"].target_description()
