"""mtjax/runtime/devices.py: what jax may take of a GPU."""

import os

import pytest
from jaxlib import xla_client

from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.plan.search import Space
from mtjax.runtime.devices import FRACTIONS, use_gpu_memory
from mtjax.runtime.xla_options import MEMORY


@pytest.mark.parametrize("name", [None, *FRACTIONS])
def test_jax_takes_as_much_of_a_gpu_as_plans_may_unless_the_user_says_otherwise(name, monkeypatch):
    others = {key: value for key, value in os.environ.items() if key not in FRACTIONS}
    monkeypatch.setattr(os, "environ", others | ({name: "0.5"} if name else {}))
    use_gpu_memory()
    taken = xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]
    assert taken == (0.5 if name else Space().usable)


def test_xla_computes_nothing_again_for_memory_that_plans_may_take():
    """Its limit is a percentage of 80% of the memory."""
    (limit,) = MEMORY
    assert USABLE_MEMORY - 0.01 < 0.8 * int(limit.value) / 100 <= USABLE_MEMORY
