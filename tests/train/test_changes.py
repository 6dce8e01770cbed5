"""What a resumed run keeps of its schedules, whatever its new number of steps; what it says and refuses."""

import dataclasses

import numpy as np
import pytest

from mtjax.config import Config, replace, to_dict
from mtjax.config.horizon import Horizon, horizon_of
from mtjax.data import DataPosition, SampleOrder, TrainingText
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.past import Past, RunRecord
from mtjax.train import changes
from mtjax.train.changes import find_changes, parse_allowed, position_of, table
from mtjax.train.objective import PRETRAINING
from mtjax.train.optimizer import make_learning_rate
from mtjax.train.weight_decay import make_weight_decay

TEXT = TrainingText("book.txt", "abc", 90)
RATES = {"learning_rate": 1e-2, "min_learning_rate": 1e-3, "warmup_steps": 5}


def config_of(**fields) -> Config:
    return replace(Config(), **({"steps": 40, "global_batch_size": 8, "mesh": "1x1"} | RATES | fields))


def past_of(config: Config, step: int = 40) -> Past:
    horizon = horizon_of(config.optimizer, config.training.steps)
    record = RunRecord(DataPosition(SampleOrder(0, (320,)), (TEXT,)), horizon, "/somewhere")
    return Past(step, 8 * step, to_dict(config), record)


def with_horizon(config: Config, past: Past) -> Config:
    return changes.with_horizon(config, PRETRAINING.horizon(config, past))


STYLES = [
    {"decay_style": "linear"},
    {"decay_style": "cosine"},
    {"decay_style": "constant"},
    {"decay_style": "inverse-square-root"},
    {"decay_style": "WSD", "wsd_decay_steps": 10},
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style["decay_style"])
@pytest.mark.parametrize("with_record", [True, False])
def test_more_steps_do_not_let_the_learning_rate_jump(style, with_record):
    past = past_of(config_of(**style))
    if not with_record:
        past = Past(past.step, past.consumed_samples, past.tables)
    now = with_horizon(config_of(**style, steps=80), past)
    before, after = (make_learning_rate(c.optimizer, c.training.steps) for c in (past.config, now))
    rates = np.array([float(after(k)) for k in range(80)])
    np.testing.assert_allclose(rates[:41], [float(before(k)) for k in range(41)], rtol=1e-6)
    assert np.all(np.diff(rates[35:]) <= 1e-9)
    assert abs(rates[41] - rates[40]) < 5e-4


def test_a_run_within_its_warmup_decays_over_its_new_steps():
    past = past_of(config_of(steps=4), step=4)
    assert past.horizon == Horizon(None, 4)
    now = with_horizon(config_of(steps=80), past)
    assert now.optimizer.decay_steps == 80
    assert with_horizon(config_of(steps=80, decay_steps=60), past_of(config_of())).optimizer.decay_steps == 60


def test_the_growth_of_weight_decay_is_kept():
    growing = {"start_weight_decay": 0.01, "weight_decay": 0.1, "weight_decay_style": "linear"}
    now = with_horizon(config_of(**growing, steps=80), past_of(config_of(**growing)))
    decay = make_weight_decay(now.optimizer, now.training.steps)
    assert callable(decay)
    assert [float(decay(k)) for k in (20, 40, 60)] == pytest.approx([0.055, 0.1, 0.1])


def test_the_table_has_what_has_changed_and_nothing_else():
    past, position = past_of(config_of()), DataPosition(SampleOrder(0, (320, 640)), (TEXT,))
    same = config_of(log_every=3, num_workers=2, mesh="data=1,model=1")
    assert find_changes(past, same, with_horizon(same, past), position) == []
    config = config_of(steps=80, mesh="2x1", hidden_dropout=0.2)
    rows = find_changes(past, config, with_horizon(config, past), position)
    assert [(row.setting, row.then, row.now) for row in rows] == [
        ("hidden_dropout", "0.1", "0.2"),
        ("mesh", "1x1", "2x1"),
        ("steps", "40", "80"),
        ("learning rate, last step", "1.02e-03 (step 40)", "1.00e-03 (step 80)"),
    ]
    older = dataclasses.replace(past, dropout_bits=32)  # saved before its number was recorded
    rows_of_older = find_changes(older, config, with_horizon(config, older), position)
    assert [(r.setting, r.then, r.now) for r in rows_of_older if r not in rows] == [
        ("dropout's random numbers", "32 bits an element", "16 bits an element")
    ]
    assert table(past, rows).splitlines()[0] == "changed since step 40 was saved:"
    assert len(table(past, rows).splitlines()) == 6


def test_only_what_is_named_is_allowed():
    past, grown = past_of(config_of(), 20), TrainingText("book.txt", "abd", 95)
    other = config_of(seed=7)
    kinds = {"order_settings": ("seed",), "allowed": ()}
    for config, text, kind in ((other, TEXT, "order"), (config_of(), grown, "data"), (other, grown, "order,data")):
        with pytest.raises(UserError, match=f"begin a new order after sample 160, .*: --allow-changed {kind}$"):
            position_of(past, config, [text], 320, **kinds)
    with pytest.raises(UserError, match="training text was .*90 documents.* and is .*95 documents"):
        position_of(past, other, [grown], 320, **kinds | {"allowed": ("order",)})
    begun = position_of(past, other, [grown], 320, **kinds | {"allowed": ("order", "data")})
    assert begun.order == SampleOrder(160, (320,))
    moved = TrainingText("elsewhere/book.txt", "abc", 90)
    assert position_of(past, config_of(), [moved], 640, **kinds).order == SampleOrder(0, (320, 640))


@pytest.mark.parametrize(("weights", "is_same"), [((30.0, 70.0), True), ((3.0, 7.1), False), ((None, None), False)])
def test_a_blend_is_compared_by_its_shares(weights, is_same):
    past = past_of(config_of(), 20)
    assert past.record is not None
    both = [dataclasses.replace(TEXT, weight=0.3), TrainingText("b.txt", "b", 9, weight=0.7)]
    record = dataclasses.replace(past.record, position=DataPosition(past.record.position.order, tuple(both)))
    past = dataclasses.replace(past, record=record)
    now = [dataclasses.replace(text, weight=weight) for text, weight in zip(both, weights, strict=True)]
    kinds = {"order_settings": ("seed",), "allowed": ()}
    if is_same:
        assert position_of(past, config_of(), now, 640, **kinds).order == SampleOrder(0, (320, 640))
    else:
        with pytest.raises(UserError, match="training text was 0.3 book.txt"):
            position_of(past, config_of(), now, 640, **kinds)


def test_kinds_are_words_that_are_known():
    assert parse_allowed(None) == frozenset()
    assert parse_allowed("order, data") == {"order", "data"}
    with pytest.raises(UserError, match="--allow-changed 'mesh' is not one of order, data"):
        parse_allowed("order,mesh")
