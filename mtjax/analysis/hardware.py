"""GPUs and their servers: public datasheet numbers, each with its source.

Peaks are dense (datasheets often print the doubled, sparse number). `float32` is the CUDA cores' rate,
`tensorfloat32` the tensor cores'. Sustained shares: the table of maximum achievable matmul FLOPS in
stas00/ml-engineering (bfloat16), and mli/transformers-benchmarks for V100 (95 of 125 TFLOP/s). Link and network
speeds are per GPU and per direction: NVIDIA prints NVLink in both directions together, so "900 GB/s" is 450 GB/s here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mtjax.errors import UserError, nearest

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; bytes, bytes per second, FLOP per second, GHz."""

    name: str
    """Its name on the command line."""
    description: str
    """The vendor's name, as in jax's `device_kind`."""
    peak: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by type of the operands; accumulated in float32."""
    memory: int
    """Bytes that the device reports, a little below the rounded number of the datasheet."""
    bandwidth: float
    """Bytes per second of its memory."""
    multiprocessors: int
    clock: float
    """Boost clock, GHz."""
    compute_capability: tuple[int, int]
    l2_cache: int
    shared_memory: int
    """Bytes per multiprocessor."""
    shared_memory_optin: int
    """Most bytes of it per block."""
    cores_per_multiprocessor: int
    """float32 lanes of a multiprocessor."""
    sustained_products: float
    """Share of the peak that the best large matmuls sustain under the power limit, as measured by others."""
    source: str
    sustained_float8: float = 0.0
    """The same of products in 8-bit floats (github.com/stas00/ml-engineering, as for 16 bits); 0 where there are none,
    or not known."""
    other_names: tuple[str, ...] = ()
    """Further values of jax's `device_kind` for the same GPU."""

    def peak_flops(self, dtype: str) -> float:
        """Returns the dense peak in FLOP/s for matmuls of `dtype`.

        float32 is the TF32 rate where there is one: XLA's default precision lets float32 matmuls use it.

        Raises:
          UserError: no peak is known for that type.
        """
        if dtype == "float32" and "tensorfloat32" in self.peak:
            return self.peak["tensorfloat32"]
        if dtype not in self.peak:
            raise UserError(f"no peak is known for {dtype} on {self.name}; it has {', '.join(self.peak)}")
        return self.peak[dtype]

    def target_description(self) -> str:
        """Returns the device description that XLA compiles for (text form of its `GpuTargetConfigProto`).

        Raises:
          UserError: XLA's CUDA 13 plugin no longer compiles for this GPU.
        """
        if self.compute_capability < (7, 5):
            major, minor = self.compute_capability
            raise UserError(
                f"{self.name} has compute capability {major}.{minor}, and CUDA 13 compiles for 7.5 and up; "
                "plan for it without --verify, or compile for a100"
            )
        return _TARGET.format(gpu=self, major=self.compute_capability[0], minor=_minor(self.compute_capability[1]))


@dataclass(frozen=True)
class Server:
    """A server of GPUs with NVLink inside and network adapters between servers; rates per GPU and per direction."""

    name: str
    gpu: Gpu
    gpus: int
    """GPUs in one server."""
    link: float
    """Bytes per second of a GPU to other GPUs of its server (NVLink through NVSwitch)."""
    network: float
    """Bytes per second between servers, of the adapters divided by the GPUs that share them."""
    link_latency: float
    """Seconds of one step of a collective inside a server."""
    network_latency: float
    """Seconds of one step of a collective between servers."""
    source: str

    @property
    def target(self) -> str:
        """The value of `--target` for it."""
        return f"{self.gpu.name}x{self.gpus}"

    def each_of(self, count: int) -> int:
        """Returns the GPUs used in each server: `count` in a single one, or all of full servers.

        Raises:
          UserError: the last server would not be full.
        """
        each = min(self.gpus, count)
        # Formulas assume equally many consecutive ranks in every server: otherwise groups that they place inside a
        # server would span two.
        if count % each:
            raise UserError(
                f"{count} GPUs don't fill servers of {self.gpus}: choose a mesh that does, or another --target"
            )
        return each


_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: 2048
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.cores_per_multiprocessor}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_optin}
  cuda_compute_capability {{ major: {major}{minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.description}"
"""


def _minor(minor: int) -> str:
    return f" minor: {minor}" if minor else ""


def _peaks(**tflops: float) -> Mapping[str, float]:
    return MappingProxyType({name: value * TERA for name, value in tflops.items()})


V100 = Gpu(
    name="v100",
    description="Tesla V100-SXM3-32GB",
    # 80 multiprocessors x 8 tensor cores x 128 FLOP per clock x 1.597 GHz; DGX-2H: 16 of them "2.1 petaFLOPS".
    peak=_peaks(float16=130.8, float32=16.4),
    memory=34_359_738_368,
    bandwidth=900 * GB,
    multiprocessors=80,
    clock=1.597,
    compute_capability=(7, 0),
    l2_cache=6_291_456,
    shared_memory=98_304,
    shared_memory_optin=98_304,
    cores_per_multiprocessor=64,
    sustained_products=0.76,
    source="NVIDIA Tesla V100 datasheet (2020), DGX-2H datasheet (2018), Volta white paper",
    other_names=("Tesla V100-SXM3-32GB-H",),
)
A100_40 = Gpu(
    name="a100-40",
    description="NVIDIA A100-SXM4-40GB",
    peak=_peaks(bfloat16=312, float16=312, tensorfloat32=156, float32=19.5),
    memory=42_331_013_120,
    bandwidth=1_555_200_000_000,
    multiprocessors=108,
    clock=1.41,
    compute_capability=(8, 0),
    l2_cache=41_943_040,
    shared_memory=167_936,
    shared_memory_optin=166_912,
    cores_per_multiprocessor=64,
    sustained_products=0.869,
    source="NVIDIA A100 datasheet (2021), Ampere white paper; bytes as the driver reports (openxla/xla a100_sxm_40)",
)
A100_80 = Gpu(
    name="a100-80",
    description="NVIDIA A100-SXM4-80GB",
    peak=A100_40.peak,
    memory=85_100_068_864,
    bandwidth=2_039_040_000_000,
    multiprocessors=108,
    clock=1.41,
    compute_capability=(8, 0),
    l2_cache=41_943_040,
    shared_memory=167_936,
    shared_memory_optin=166_912,
    cores_per_multiprocessor=64,
    sustained_products=0.869,
    source="NVIDIA A100 80GB datasheet (2021); bytes as the driver reports (openxla/xla a100_sxm_80)",
)
H100 = Gpu(
    name="h100",
    description="NVIDIA H100 80GB HBM3",
    peak=_peaks(float8=1978.9, bfloat16=989.4, float16=989.4, tensorfloat32=494.7, float32=66.9),
    memory=84_929_347_584,
    bandwidth=3_352_320_000_000,
    multiprocessors=132,
    clock=1.98,
    compute_capability=(9, 0),
    l2_cache=52_428_800,
    shared_memory=233_472,
    shared_memory_optin=232_448,
    cores_per_multiprocessor=128,
    sustained_products=0.803,
    sustained_float8=0.709,
    source="NVIDIA H100 datasheet (SXM5), Hopper white paper; bytes as the driver reports (openxla/xla h100_sxm)",
)
H200 = Gpu(
    name="h200",
    description="NVIDIA H200",
    peak=H100.peak,
    memory=151_397_597_184,
    bandwidth=4_800_000_000_000,
    multiprocessors=132,
    clock=1.98,
    compute_capability=(9, 0),
    l2_cache=52_428_800,
    shared_memory=233_472,
    shared_memory_optin=232_448,
    cores_per_multiprocessor=128,
    sustained_products=0.803,
    sustained_float8=0.709,
    source="NVIDIA H200 datasheet (SXM); bytes as the driver reports (openxla/xla h200)",
    other_names=("NVIDIA H200 141GB HBM3e",),
)
B200 = Gpu(
    name="b200",
    description="NVIDIA B200",
    # No float8: no sustained rate is known, and `Machine.float8_rate` says so rather than guess.
    peak=_peaks(bfloat16=2250, float16=2250, tensorfloat32=1100, float32=75),
    memory=191_514_411_008,
    bandwidth=7_672_320_000_000,
    multiprocessors=148,
    clock=1.965,
    compute_capability=(10, 0),
    l2_cache=132_644_864,
    shared_memory=233_472,
    shared_memory_optin=232_448,
    cores_per_multiprocessor=128,
    sustained_products=0.776,
    source="NVIDIA HGX B200 datasheet (1,000 W); bytes as the driver reports (openxla/xla b200)",
)

GPUS: Mapping[str, Gpu] = MappingProxyType({g.name: g for g in (V100, A100_40, A100_80, H100, H200, B200)})

# For one step of a simple ring, from NCCL's published tuning model (mtjax.analysis.nccl).
_NVLINK_LATENCY = 3.4e-6
_NETWORK_LATENCY = 9.6e-6


def _server(name: str, gpu: Gpu, gpus: int, link: float, network: float, source: str) -> Server:
    return Server(name, gpu, gpus, link, network, _NVLINK_LATENCY, _NETWORK_LATENCY, source)


DGX_2H = _server(
    "DGX-2H",
    V100,
    16,
    150 * GB,
    100 * GB / 16,
    "section 5 of arXiv 1909.08053: 300 GB/s in both directions by NVSwitch, 8 x 100 Gb/s InfiniBand for 16 GPUs",
)
_DGX_A100 = "DGX A100 datasheet: NVLink 600 GB/s in both directions, 8 x 200 Gb/s InfiniBand"
DGX_A100_40 = _server("DGX A100 320GB", A100_40, 8, 300 * GB, 25 * GB, _DGX_A100)
DGX_A100_80 = _server("DGX A100 640GB", A100_80, 8, 300 * GB, 25 * GB, _DGX_A100)
_DGX_H100 = "DGX H100/H200 datasheet: NVLink 900 GB/s in both directions, 8 x 400 Gb/s InfiniBand"
DGX_H100 = _server("DGX H100", H100, 8, 450 * GB, 50 * GB, _DGX_H100)
DGX_H200 = _server("DGX H200", H200, 8, 450 * GB, 50 * GB, _DGX_H100)
DGX_B200 = _server(
    "DGX B200", B200, 8, 900 * GB, 50 * GB, "DGX B200 datasheet: NVLink 1.8 TB/s in both directions, 8 x 400 Gb/s"
)

SERVERS: Mapping[str, Server] = MappingProxyType(
    {s.gpu.name: s for s in (DGX_2H, DGX_A100_40, DGX_A100_80, DGX_H100, DGX_H200, DGX_B200)}
)


def find_gpu(name: str) -> Gpu:
    """Finds a GPU by its name on the command line, in upper or lower case.

    Raises:
      UserError: there is none; names the nearest.
    """
    gpu = GPUS.get({"a100": "a100-80"}.get(name.lower(), name.lower()))
    if gpu is None:
        raise UserError(f"no GPU kind is called {name!r}{nearest(name.lower(), GPUS)}; there are {', '.join(GPUS)}")
    return gpu


def by_device_kind(device_kind: str) -> Gpu | None:
    """Finds a GPU by jax's `device.device_kind`; None where it is not in the table (a CPU, a MIG slice)."""
    kinds = {name: gpu for gpu in GPUS.values() for name in (gpu.description, *gpu.other_names)}
    return kinds.get(device_kind)
