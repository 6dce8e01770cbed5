"""Changes of settings and data on --resume: which are allowed, which are refused, and the table of changes."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax import data
from mtjax.config import Config
from mtjax.config.horizon import Horizon
from mtjax.config.run import section_by_setting
from mtjax.data import DataPosition, NeighbourFile, SampleOrder, TrainingText
from mtjax.data.samples.blend import normalize
from mtjax.errors import UserError, shortened
from mtjax.layout.dropout import DROPOUT_BITS
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.optimizer_states import optimizer_states
from mtjax.runtime.checkpoints.past import Past
from mtjax.train.optimizer import make_learning_rate

ORDER, DATA, NEIGHBOURS = "order", "data", "neighbours"
KINDS = (ORDER, DATA, NEIGHBOURS)
"""Changes that need `--allow-changed`. The first two start a new order of samples in the middle of a run."""

COMPARED = ("model", "parallel", "data", "optimizer", "training", "finetuning")
"""Sections whose settings are compared."""
NOT_COMPARED = frozenset(
    {
        *(
            "coordinator",
            "num_processes",
            "process_id",
            "peer_timeout",
            "step_timeout",
        ),  # concern only this start of the run
        *("cache_dir", "num_workers", "loader_timeout", "check_replicas"),  # do not affect results
        *("init_from", "tokenizer", "eod_token", "vocab_size"),  # checked elsewhere
    }
)

EFFECT, EFFECT_ON_SUMS = "used from the next step on", "reductions run in another order: losses agree up to rounding"
"""Effect of a change; the second one of settings in `[parallel]` and in `AS_PARALLEL`."""
AS_PARALLEL = ("microbatch_size", "recompute", "loss_chunk", "unroll_layers", "attention")


@dataclass(frozen=True)
class Change:
    """A row of the table of changes."""

    setting: str
    then: str
    now: str
    effect: str


def parse_allowed(text: str | None) -> frozenset[str]:
    """Parses the kinds of changes in `--allow-changed`, separated by commas.

    Raises:
      UserError: a kind is unknown.
    """
    kinds = [kind.strip() for kind in (text or "").split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"--allow-changed {kind!r} is not one of {', '.join(KINDS)}")
    return frozenset(kinds)


def position_of(
    past: Past | None,
    config: Config,
    texts: Sequence[TrainingText],
    total: int,
    *,
    order_settings: Collection[str],
    allowed: Collection[str],
) -> DataPosition:
    """Returns the order of a run's samples: a new one for a new run, else the run's order, extended to `total` samples.

    Args:
      past: the run that is resumed; None for a new one.
      config: the config of the resumed run.
      texts: the training text from now on.
      total: number of samples at the end of the run.
      order_settings: names of the settings on which the order depends.
      allowed: kinds of changes that may begin a new order.

    Raises:
      UserError: the order can't be continued, and this change of the order was not allowed; or the run trained other
        parameters.
    """
    fresh = DataPosition(SampleOrder(0, (total,)), tuple(texts))
    if past is None:
        return fresh
    check_trained(past, config)
    reasons = {
        ORDER: [
            f"{name} was {then} and is {now}"
            for name in order_settings
            if (then := _value(past.config, name)) != (now := _value(config, name))
        ],
        DATA: _changed_texts(past, config, texts),
    }
    changed = [kind for kind, why in reasons.items() if why]
    if not changed:
        # The recorded order, not a new one of `total` samples: an order depends on its length, and a longer run would
        # shuffle what is read already.
        return DataPosition(past.order.extended(total), tuple(texts))
    if missing := [kind for kind in changed if kind not in allowed]:
        listed = "; ".join(reason for kind in missing for reason in reasons[kind])
        raise UserError(
            f"the run has read {past.consumed_samples:,} samples, and the order of its samples can't be continued: "
            f"{listed}. Resume with the earlier values, or begin a new order after sample {past.consumed_samples:,}, "
            f"which may repeat text that was read before: --allow-changed {','.join(changed)}"
        )
    # A new order begins where the old one was left: samples keep their numbers in the run, from which dropout's keys
    # follow.
    return DataPosition(SampleOrder(past.consumed_samples, (total,)), tuple(texts))


def check_trained(past: Past, config: Config) -> None:
    """Checks that a run trains the parameters whose optimizer states were saved.

    Raises:
      UserError: it trains others.
    """
    then, now = past.config.model.retro_frozen, config.model.retro_frozen
    if then != now:
        raise UserError(
            f"the run trained with retro_frozen {then}, and retro_frozen is {now}: resume with {then}, or start a new "
            "run from its weights with --init-from"
        )


def _changed_texts(past: Past, config: Config, texts: Sequence[TrainingText]) -> list[str]:
    """Describes how the training text differs from what the run has read; empty if that was not recorded."""
    if past.record is None:
        # Checkpoints of earlier versions did not record the text.
        then, now = past.config.data.split, config.data.split
        return [f"split was {then} and is {now}"] if then != now else []
    before = past.record.position.texts
    if len(before) == len(texts):
        pairs = zip(before, texts, _with_shares(before), _with_shares(texts), strict=True)
        return [
            f"training text was {_described(then)} and is {_described(now)}"
            for then, now, first, second in pairs
            if not first.is_same(second)
        ]
    return [f"training text was {' and '.join(map(_described, before))} and is {' and '.join(map(_described, texts))}"]


def neighbours_of(past: Past | None, config: Config, allowed: Collection[str]) -> tuple[NeighbourFile, ...]:
    """Returns the neighbours that a run reads from now on; none where the config names none.

    Raises:
      UserError: under the prefix that it has read there are others now, and this change was not allowed; or a file is
        missing or damaged.
    """
    # Under another prefix it is a change of the setting, which the table shows.
    if past is not None and config.data.neighbours == past.config.data.neighbours and NEIGHBOURS not in allowed:
        for then, now in _changed_neighbours(past, config):
            raise UserError(
                f"{config.data.neighbours}.{then.split}.npy holds other neighbours than the run has read: those of "
                f"{then.samples:,} samples were {then.content}, and those of {now.samples:,} are {now.content}. Take "
                "the earlier files back, or read the new ones from the next step on: --allow-changed neighbours"
            )
    return data.describe_neighbours(config)


def _changed_neighbours(past: Past, config: Config) -> list[tuple[NeighbourFile, NeighbourFile]]:
    """Returns the recorded neighbours that are others now, of the samples that had some then: a file may have grown."""
    recorded = past.record.position.neighbours if past.record is not None else ()
    found = {now.split: now for now in data.describe_neighbours(config, recorded)} if recorded else {}
    return [(then, now) for then in recorded if (now := found.get(then.split)) not in (None, then)]


def _with_shares(texts: Sequence[TrainingText]) -> list[TrainingText]:
    """Returns texts with weights that sum to 1, as a blend has them: 30 and 70 are 0.3 and 0.7."""
    weights = [text.weight for text in texts if text.weight is not None]
    if not weights or len(weights) < len(texts):
        return list(texts)
    return [dataclasses.replace(text, weight=share) for text, share in zip(texts, normalize(weights), strict=True)]


def _described(text: TrainingText) -> str:
    weight = "" if text.weight is None else f"{text.weight:g} "
    return f"{weight}{shortened(text.name)} ({text.documents:,} documents from number {text.first:,}, {text.content})"


def _value(config: Config, name: str) -> Any:
    return getattr(getattr(config, section_by_setting()[name]), name)


def with_horizon(config: Config, horizon: Horizon) -> Config:
    """Returns the config with the steps over which learning rate and weight decay change."""
    # Where no step so far depends on the end of the decay, it is the end of the run.
    decay_steps = horizon.decay_steps or max(config.training.steps, config.optimizer.warmup_steps + 1)
    return configs.replace(config, steps=horizon.steps, decay_steps=decay_steps)


def check_learning_rate(past: Past, config: Config, now: Config) -> None:
    """Checks that the remaining steps have a nonzero learning rate.

    Args:
      past: the run that is resumed.
      config: of the run.
      now: the same config with the horizon of its learning rate (`with_horizon`).

    Raises:
      UserError: the learning rate has decayed to 0 before.
    """
    steps, peak = config.training.steps, config.optimizer.learning_rate
    if past.step >= steps or peak == 0:
        return
    # First, middle and last: a schedule that is 0 at all of them is 0 between.
    if not any(_rate(now, step) for step in (past.step, (past.step + steps) // 2, steps - 1)):
        raise UserError(
            f"the learning rate is 0 in all steps from {past.step + 1} to {steps}, so they would not train the model: "
            f"it decays to min_learning_rate 0 by step {now.optimizer.decay_steps}; add --min-learning-rate "
            f"{peak / 10:g}, or --decay-steps {steps} to decay again, from {rate_of(_decaying(now, steps), past.step)}"
        )


def check_states(past: Past, config: Config) -> None:
    """Checks that a checkpoint holds the states of the run's optimizer.

    Raises:
      UserError: they are another optimizer's.
    """
    then, now = optimizer_states(past.config), optimizer_states(config)
    if then.name != now.name:
        raise UserError(
            f"the checkpoint of step {past.step} holds the states of optimizer {then.name}, and optimizer is "
            f"{now.name}: resume with --optimizer {then.name}, or begin a new run from its weights with --init-from"
        )
    if then.momentum != now.momentum:
        rates = past.config.optimizer.sgd_momentum, config.optimizer.sgd_momentum
        raise UserError(
            f"the checkpoint of step {past.step} was saved with sgd_momentum {rates[0]:g}, and sgd_momentum is "
            f"{rates[1]:g}: only one of them has momentum in its states; resume with --sgd-momentum {rates[0]:g}"
        )
    for name in ("adam_mu_dtype", "adam_nu_dtype", "master_dtype"):
        before, after = getattr(past.config.optimizer, name), getattr(config.optimizer, name)
        if before != after:
            raise UserError(
                f"the checkpoint of step {past.step} was saved with {name} {before}, and {name} is {after}: resume "
                f"with --{name.replace('_', '-')} {before}, or begin a new run from its weights with --init-from"
            )


def find_changes(past: Past, config: Config, now: Config, position: DataPosition) -> list[Change]:
    """Returns the rows of the table: differences to the run when its checkpoint was saved.

    Args:
      past: the run when it was saved.
      config: the config of the resumed run.
      now: the same config with the horizon of its learning rate (`with_horizon`).
      position: its order of samples from now on.
    """
    rows = [
        Change(name, _shown(then), _shown(here), _effect(section, name, past, config, position))
        for section in COMPARED
        for field in dataclasses.fields(getattr(config, section))
        if (name := field.name) not in NOT_COMPARED
        and not _same(name, then := _value(past.config, name), here := _value(config, name))
    ]
    if past.record is not None:
        for before, text in zip(past.record.position.texts, position.texts, strict=False):
            # A text may have grown under one name.
            if before.content != text.content:
                then, here = (f"{one.documents:,} documents" for one in (before, text))
                rows.append(Change(f"text {shortened(text.name)}", then, here, _new_order(position)))
    for then, here in _changed_neighbours(past, config):
        rows.append(Change(f"neighbours of {then.split}", then.content[:12], here.content[:12], EFFECT))
    return rows + _dropout_bits(past, config) + _rates(past, config, now)


def _dropout_bits(past: Past, config: Config) -> list[Change]:
    """Returns a row if the run uses dropout and drew other masks when it was saved."""
    model = config.model
    uses_dropout = any((model.hidden_dropout, model.attention_dropout, model.lora_dropout))
    if past.dropout_bits == DROPOUT_BITS or not uses_dropout or past.step == 0:
        return []
    then, here = (f"{bits} bits an element" for bits in (past.dropout_bits, DROPOUT_BITS))
    return [Change("dropout's random numbers", then, here, "other masks from the next step on")]


def _same(name: str, then: Any, now: Any) -> bool:
    # "2x4" and "data=2,model=4" are one mesh.
    if name == "mesh":
        return parse_mesh(then) == parse_mesh(now)
    return then == now


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, tuple) else shortened(value, 40)


def _new_order(position: DataPosition) -> str:
    return f"a new order of samples begins after sample {position.order.begins:,}"


def _effect(section: str, name: str, past: Past, config: Config, position: DataPosition) -> str:
    """Describes the effect of a changed setting."""
    training, restarted = config.training, position.order.begins != past.order.begins
    left = training.steps - past.step
    if name == "global_batch_size":
        return f"batches of {training.global_batch_size} from the next step on; schedules still count steps"
    if name in ("steps", "train_samples", "rampup_batch_size", "epochs"):
        total = data.train_samples(training, past.step, past.consumed_samples)
        return _reads(past, left, total, total > past.order.totals[-1] and not restarted)
    if name in ("seed", "sequence_length", "add_extra_token_to_sequence") and restarted:
        return _new_order(position) + (", and dropout draws from the new seed" if name == "seed" else "")
    if name in ("data", "train_data", "split"):
        if restarted:
            return _new_order(position)
        if past.record is None:
            return "the checkpoint does not record which text was read: the order continues if it is the same"
        return "the training text is the same: its order continues"
    return EFFECT_ON_SUMS if section == "parallel" or name in AS_PARALLEL else EFFECT


def _reads(past: Past, left: int, total: int, is_longer: bool) -> str:
    if total == past.consumed_samples:
        return "no steps left"
    samples = f"{left:,} steps left, which read samples {past.consumed_samples + 1:,} to {total:,}"
    return f"{samples}; the order of samples continues" if is_longer else samples


def _rates(past: Past, config: Config, now: Config) -> list[Change]:
    """Returns rows for the learning rate of the next and the last step, if either has changed or the run has another
    end."""
    steps, before = config.training.steps, past.config.training.steps
    if past.step >= steps:
        return []
    # As the run was trained: by the recorded horizon, which its config need not name.
    then = _decaying(past.config, past.horizon.decay_steps or past.horizon.steps)
    rows = []
    is_same_decay = now.optimizer.decay_steps == past.horizon.decay_steps and now.training.steps == past.horizon.steps
    hint = "follows from the settings above"
    if not is_same_decay and past.horizon.decay_steps and past.horizon.decay_steps > config.optimizer.warmup_steps:
        hint = f"--decay-steps {past.horizon.decay_steps} keeps the earlier decay"
    # Compared as they are printed: a difference that the table would not show is left out.
    if rate_of(then, past.step) != rate_of(now, past.step):
        rows.append(
            Change(f"learning rate, step {past.step + 1}", rate_of(then, past.step), rate_of(now, past.step), hint)
        )
    if steps != before or rate_of(then, before - 1) != rate_of(now, steps - 1):
        ends = (f"{rate_of(then, before - 1)} (step {before})", f"{rate_of(now, steps - 1)} (step {steps})")
        last = now.optimizer.decay_steps
        if past.horizon.decay_steps and last and last != steps and is_same_decay:
            again = rate_of(_decaying(config, steps), past.step)
            hint = f"decays until step {last}, as before; --decay-steps {steps}: {again} in step {past.step + 1}"
        rows.append(Change("learning rate, last step", *ends, hint))
    return rows


def _decaying(config: Config, steps: int) -> Config:
    """Returns the config with a learning rate that decays until step `steps`."""
    return configs.replace(config, decay_steps=steps, steps=steps)


def rate_of(config: Config, step: int) -> str:
    """Formats the learning rate of the step after `step` steps as in the log."""
    return f"{_rate(config, step):.2e}"


def _rate(config: Config, step: int) -> float:
    return float(np.asarray(make_learning_rate(config.optimizer, config.training.steps)(step)))


def table(past: Past, rows: Sequence[Change]) -> str:
    """Formats the rows as the lines of a table."""
    cells = [("setting", "then", "now", "effect"), *((r.setting, r.then, r.now, r.effect) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in cells
    ]
    return "\n".join([f"changed since step {past.step} was saved:", *(f"        {line}" for line in lines)])
