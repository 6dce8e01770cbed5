import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.config import Training
from mtjax.data.batches.batch_schedule import batch_schedule, constant, train_samples, train_steps
from mtjax.errors import UserError


def ramp(start, increment, samples, size=64, **more):
    return Training(global_batch_size=size, rampup_batch_size=(start, increment, samples), **more)


def by_stepping(training, steps):
    """Megatron's rule, step by step: (consumed before, batch size) of each step."""
    (start, increment, samples), size = training.rampup_batch_size, training.global_batch_size
    increments, consumed, rows = (size - start) // increment, 0, []
    for _ in range(steps):
        if increments == 0 or consumed > samples:
            batch = size
        else:
            batch = min(size, start + int(consumed / (samples / increments)) * increment)
        rows.append((consumed, batch))
        consumed += batch
    return rows


@given(
    start=st.integers(1, 8),
    increment=st.integers(1, 8),
    increments=st.integers(0, 8),
    samples=st.integers(8, 3000),
)
def test_the_ramp_is_megatrons(start, increment, increments, samples):
    training = ramp(start, increment, samples, start + increment * increments)
    schedule = batch_schedule(training)
    for step, (consumed, batch) in enumerate(by_stepping(training, 200)):
        assert schedule.advance(0, step) == consumed
        assert schedule.batch_size(consumed) == batch
        assert schedule.steps_between(0, consumed) == step
        assert schedule.steps_between(0, consumed + batch - 1) == step
        assert batch in schedule.batch_sizes()


@given(start=st.integers(0, 5000), steps=st.integers(0, 100), more=st.integers(0, 100))
def test_advancing_in_parts_is_advancing(start, steps, more):
    schedule = batch_schedule(ramp(8, 8, 2000))
    assert schedule.advance(schedule.advance(start, steps), more) == schedule.advance(start, steps + more)
    assert schedule.steps_between(start, schedule.advance(start, steps)) == steps


def test_constant():
    schedule = constant(16)
    assert (schedule.advance(0, 5), schedule.steps_between(0, 80), schedule.batch_size(10**9)) == (80, 5, 16)


def test_samples_and_steps():
    assert train_samples(Training(steps=10, global_batch_size=8)) == 80
    assert train_steps(Training(steps=10, global_batch_size=8, train_samples=100)) == 12
    assert train_samples(Training(steps=10, global_batch_size=8, train_samples=100)) == 96
    ramped = ramp(8, 8, 256, 16, train_samples=1000)
    assert train_steps(ramped) == 256 // 8 + (1000 - 256) // 16


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (ramp(8, 10, 100), "56 is not divisible by 10"),
        (ramp(100, 8, 100), "is not a ramp up to global_batch_size 64"),
        (ramp(8, 0, 100), "INCREMENT at least 1"),
        (Training(global_batch_size=64, train_samples=63), "less than the first global batch, 64"),
    ],
)
def test_ramps_that_cannot_be(training, message):
    with pytest.raises(UserError, match=message):
        train_steps(training)
        batch_schedule(training)
