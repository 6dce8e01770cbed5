"""Tests of the full product of layouts release their programs."""

import jax
import pytest

from tests.tiny import forget_programs


@pytest.fixture(autouse=True)
def _forget_programs(request):
    """Programs of an exhaustive product, or Linux' limit of 65,530 memory maps ends the process after 64 of them."""
    yield
    if request.node.get_closest_marker("exhaustive"):
        forget_programs()
        jax.clear_caches()
