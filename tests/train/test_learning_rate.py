"""Learning rates and weight decays of Megatron's OptimizerParamScheduler, from a table of its values.

    python -O -m tests.parity.megatron_core schedules > tests/train/megatron_schedules.json

wrote the table, with megatron-core 0.16.1; `tests/parity/test_megatron_core.py` compares it with the one installed.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Optimizer, replace, validate
from mtjax.train.optimizer import make_learning_rate
from mtjax.train.weight_decay import make_weight_decay
from tests.parity.megatron_core.cases import RATES, SCHEDULES, STEPS, our_settings
from tests.tiny import tiny_config

TABLE = json.loads((Path(__file__).parent / "megatron_schedules.json").read_text())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_update_has_megatrons_rate_and_decay(name):
    config = replace(tiny_config(), **our_settings(name), steps=STEPS)
    validate(config)
    counts = np.arange(STEPS + 2)
    rate = make_learning_rate(config.optimizer, STEPS)
    np.testing.assert_allclose(rate(counts), TABLE[name]["learning_rate"], rtol=1e-5)
    decay = make_weight_decay(config.optimizer, STEPS)
    found = [float(decay(k)) if callable(decay) else decay for k in counts]
    np.testing.assert_allclose(found, TABLE[name]["weight_decay"], rtol=1e-5)


def test_no_two_rows_of_the_table_are_alike():
    """Else a style that is not read would pass."""
    rows = [tuple(row["learning_rate"] + row["weight_decay"]) for row in TABLE.values()]
    assert len(set(rows)) == len(rows) == len(SCHEDULES)
    assert TABLE["cosine"]["learning_rate"][0] == 0.0
    assert TABLE["cosine"]["learning_rate"][RATES["lr_warmup_steps"]] == RATES["max_lr"]


def test_the_default_is_the_papers():
    """Warmup over 3k steps, one cosine cycle over the remaining 297k, floor 1e-5 (section 4.2)."""
    rate = make_learning_rate(Optimizer(), steps=300_000)
    assert float(rate(0)) == 0.0
    assert float(rate(1)) == pytest.approx(1.5e-4 / 3000)
    assert float(rate(3000)) == pytest.approx(1.5e-4)
    half = 3000 + 297_000 // 2
    assert float(rate(half)) == pytest.approx((1.5e-4 + 1e-5) / 2, rel=1e-4)
    for step in (3000, 50_000, 299_000):
        cosine = 1e-5 + (1.5e-4 - 1e-5) * (1 + np.cos(np.pi * (step - 3000) / 297_000)) / 2
        assert float(rate(step)) == pytest.approx(cosine, rel=1e-5)
    assert float(rate(300_000)) == float(rate(400_000)) == pytest.approx(1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_short_warmups(warmup):
    rate = make_learning_rate(Optimizer(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=warmup), steps=10)
    rates = np.asarray(rate(jnp.arange(11)))
    np.testing.assert_allclose(rates[:warmup], [k / max(warmup, 1) for k in range(warmup)], rtol=1e-6)
    assert rates[warmup] == 1.0 and rates[10] == pytest.approx(0.0, abs=1e-7)
    assert (np.diff(rates[warmup:]) <= 0).all()


def test_a_run_that_ends_in_its_warmup_climbs():
    rate = make_learning_rate(Optimizer(learning_rate=1.0, warmup_steps=100), steps=10)
    np.testing.assert_allclose(rate(jnp.arange(11)), np.arange(11) / 100, rtol=1e-6)
