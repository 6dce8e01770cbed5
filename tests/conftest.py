"""Eight virtual CPU devices, and compiled programs kept between runs and shared between tests."""

import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
# Compiling is what tests spend their time on: LLVM's optimisations cost more than they save here.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
