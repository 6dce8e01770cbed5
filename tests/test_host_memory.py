"""A step on one CPU device finds the pages of the step before."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import jax, jax.numpy as jnp
from mtjax.sharding.mesh import attach_devices, parse_mesh

with jax.set_mesh(attach_devices(parse_mesh("1x1"))):
    step = jax.jit(lambda x: jnp.sort(x[:, None] + x[None, :], axis=0).sum())  # 64 MB that are no output
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(jnp.arange(4096.0)).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
def test_a_second_step_clears_no_pages():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000, "64 MB of temporaries are 16,384 pages"
