"""A run that is resumed with other settings reads on, says what has changed, or refuses; wherever its folder is."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mtjax import config as configs
from mtjax import data
from mtjax.data import SampleOrder
from mtjax.runtime.checkpoints.corruption import with_checksum
from mtjax.runtime.checkpoints.past import newest_past
from tests.end_to_end.runs import Finished, Launcher

pytestmark = pytest.mark.usefixtures("bare_end")
SMALL = ["--mesh", "1x1", "--num-layers", "1", "--log-every", "1"]
TABLE = "changed since step "


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """As `launcher`, with so little text that runs go through it more than once."""
    launcher = Launcher.prepare(tmp_path_factory.mktemp("changed"))
    words = (launcher.folder / "text.txt").read_text().split("\n\n")
    (launcher.folder / "text.txt").write_text("\n\n".join(words[:40]))
    config = (launcher.folder / "tiny.toml").read_text()
    (launcher.folder / "tiny.toml").write_text(config.replace("decay_steps = 40\n", ""))
    return launcher


@pytest.fixture(scope="module")
def run(short: Launcher) -> Finished:
    """20 steps of 8 samples, saved after 10 and 20."""
    return short.train_here("run", "--train-samples", "160", "--checkpoint-every", "10", *SMALL)


def copy(run: Finished, name: str, *without: int) -> Path:
    """The folder of a run, without the checkpoints of some steps."""
    folder = shutil.copytree(run.out, run.out.parent / name)
    for step in without:
        shutil.rmtree(folder / "checkpoints" / str(step))
    return folder


def resume(short: Launcher, name: str, *options: str) -> Finished:
    """Resumes the run in a folder by its own config.toml, and by nothing else."""
    return short.run_here(name, "--config", f"{name}/config.toml", "--resume", *options, is_told=False)


def with_paths(config: configs.Config, short: Launcher) -> configs.Config:
    """The config of a run, whose relative paths are meant from the launcher's folder, as other folders read it."""
    return configs.replace(config, cache_dir=short.folder / "cache", data=str(short.folder / "text.txt"))


def samples(short: Launcher, out: Path) -> np.ndarray:
    """The samples that a run has read by its newest checkpoint, int[samples, tokens], in its order."""
    past = newest_past(out / "checkpoints")
    assert past is not None
    dataset = data.open_in_order(with_paths(past.config, short), past.order)
    return np.array([dataset[i]["tokens"] for i in range(past.order.begins, past.consumed_samples)])


def counts(rows: np.ndarray) -> np.ndarray:
    return np.unique(rows, axis=0, return_counts=True)[1]


def test_more_samples_go_on_in_the_order_of_the_run(short: Launcher, run: Finished) -> None:
    """By the command that the run itself advises."""
    out = copy(run, "longer")
    assert "next    mtjax train --config run/config.toml --resume --train-samples 320" in run.stdout
    longer = resume(short, "longer", "--train-samples", "320")
    assert longer.code == 0, longer.stderr
    read, before = samples(short, out), samples(short, run.out)
    np.testing.assert_array_equal(read[:160], before)
    assert len(read) == 320
    past = newest_past(out / "checkpoints")
    assert past is not None and past.order == SampleOrder(0, (160, 320))
    at_once = data.open_dataset(with_paths(past.config, short), "train", 320)
    expected = counts(np.array([at_once[i]["tokens"] for i in range(320)]))
    assert np.ptp(counts(read)) <= np.ptp(expected) + 1  # as evenly as one long run
    assert len(counts(read)) >= len(expected) - 2
    assert TABLE + "20 was saved:" in longer.stdout
    assert "20 steps left, which read samples 161 to 320; the order of samples continues" in longer.stdout
    rates = [entry["learning_rate"] for entry in longer.metrics]
    assert rates[20:] == pytest.approx([2e-4] * 20)  # has decayed, and stays there
    assert longer.metrics[:20] == run.metrics


def test_nothing_changed_says_nothing_and_takes_the_same_steps(short: Launcher, run: Finished) -> None:
    copy(run, "same", 20)
    same = resume(short, "same")
    assert same.code == 0, same.stderr
    assert TABLE not in same.stdout
    assert same.losses == run.losses
    assert same.fingerprints(20) == run.fingerprints(20)


@pytest.mark.parametrize(("size", "steps"), [(16, 15), (4, 30), (24, 13)])
def test_another_batch_size_reads_the_samples_that_are_left(
    short: Launcher, run: Finished, size: int, steps: int
) -> None:
    out = copy(run, f"batch-{size}", 20)
    other = resume(short, out.name, "--global-batch-size", str(size))
    assert other.code == 0, other.stderr
    assert list(other.losses) == list(range(1, steps + 1))
    read = samples(short, out)
    np.testing.assert_array_equal(read, samples(short, run.out)[: 80 + (80 // size) * size])
    assert f"{steps - 10} steps left, which read samples 81 to {80 + (80 // size) * size}" in other.stdout


def test_a_ramp_of_batch_sizes_counts_the_samples_consumed(short: Launcher, run: Finished) -> None:
    out = copy(run, "ramp", 20)
    other = resume(short, "ramp", "--global-batch-size", "16", "--rampup-batch-size", "8", "8", "96")
    assert other.code == 0, other.stderr
    # The ramp is at 8 until sample 96, so two more steps of 8, and then four of 16.
    assert max(other.losses) == 16
    assert len(samples(short, out)) == 160


def test_steps_with_another_batch_size_are_all_taken(short: Launcher, run: Finished) -> None:
    out = copy(run, "steps", 20)
    other = resume(short, "steps", "--train-samples", "None", "--steps", "22", "--global-batch-size", "16")
    assert other.code == 0, other.stderr
    assert (max(other.losses), len(samples(short, out))) == (22, 80 + 12 * 16)


def test_a_finished_run_does_not_look_like_training(short: Launcher, run: Finished) -> None:
    out = copy(run, "done")
    kept = (out / "config.toml").read_text()
    again = resume(short, "done", "--train-samples", "100")
    assert again.code == 0
    assert (
        "nothing to do: the run in done has done 20 steps with 160 samples, and --train-samples is 100" in again.stdout
    )
    assert "sample  " not in again.stdout and "\ndone " not in again.stdout
    assert (out / "config.toml").read_text() == kept


@pytest.mark.parametrize(
    ("options", "reason", "kind"),
    [
        (["--seed", "7"], "seed was 1234 and is 7", "order"),
        (["--split", "90,10,0"], "training text was text.txt (39 documents", "data"),
        (["--data", "other.txt"], "training text was text.txt (39 documents", "data"),
    ],
)
def test_what_can_not_be_continued_asks_for_the_word(
    short: Launcher, run: Finished, options: list[str], reason: str, kind: str
) -> None:
    (short.folder / "other.txt").write_text((short.folder / "text.txt").read_text()[:8000])
    out = copy(run, f"asked{options[0]}", 20)
    options = [*options, "--tokenizer", f"hf:{run.out}/tokenizer.json"]
    refused = resume(short, out.name, *options)
    assert refused.code == 2
    assert "the run has read 80 samples, and the order of its samples can't be continued: " in refused.stderr
    assert reason in refused.stderr
    assert f"--allow-changed {kind}" in refused.stderr
    assert refused.checkpoints == {10} and refused.metrics == run.metrics
    allowed = resume(short, out.name, *options, "--allow-changed", kind)
    assert allowed.code == 0, allowed.stderr
    assert "a new order of samples begins after sample 80" in allowed.stdout
    past = newest_past(out / "checkpoints")
    assert past is not None and past.order == SampleOrder(80, (160,))
    again = resume(short, out.name, *options)  # is nothing new any more
    assert again.code == 0 and "nothing to do" in again.stdout


def test_text_that_grew_is_noticed(short: Launcher, run: Finished) -> None:
    copy(run, "grown", 20)
    text = short.folder / "text.txt"
    kept = text.read_text()
    try:
        text.write_text(kept + "\n\nmore of it")
        refused = resume(short, "grown", "--tokenizer", f"hf:{run.out}/tokenizer.json")
    finally:
        text.write_text(kept)
    assert refused.code == 2
    assert "training text was text.txt (39 documents from number 0, " in refused.stderr


def test_the_decay_of_the_run_is_kept_unless_another_is_typed(short: Launcher, run: Finished) -> None:
    copy(run, "decay")
    typed = resume(short, "decay", "--train-samples", "320", "--decay-steps", "40")
    assert typed.code == 0, typed.stderr
    # Megatron's cosine from the peak 2e-3 at step 4 to 2e-4 at step 40.
    expected = 2e-4 + 1.8e-3 * (1 + np.cos(np.pi * (20 - 4) / 36)) / 2
    assert typed.metrics[20]["learning_rate"] == pytest.approx(expected, rel=1e-5)
    assert re.search(rf"learning rate, step 21 +2\.00e-04 +{expected:.2e} ", typed.stdout)
    assert "--decay-steps 20 keeps the earlier decay" in typed.stdout


@pytest.mark.long
def test_steps_without_a_learning_rate_are_refused(short: Launcher) -> None:
    options = ["--min-learning-rate", "0", "--steps", "6", *SMALL]
    first = short.train_here("to-zero", *options)
    assert "--resume --steps 12 --min-learning-rate 0.0002" in first.stdout
    refused = resume(short, "to-zero", "--steps", "12")
    assert refused.code == 2
    assert "the learning rate is 0 in all steps from 7 to 12, so they would not train" in refused.stderr
    assert resume(short, "to-zero", "--steps", "8", "--min-learning-rate", "0.0002").code == 0


@pytest.mark.long
def test_a_moved_folder_and_a_copy_are_the_runs_that_go_on(short: Launcher, run: Finished) -> None:
    moved = copy(run, "moved-away", 20).rename(short.folder / "moved")
    here = resume(short, "moved")
    assert here.code == 0, here.stderr
    assert here.checkpoints == {10, 20}
    assert not (short.folder / "moved-away").exists()
    copied = shutil.copytree(moved, short.folder / "copied")
    before = sorted((path, path.stat().st_mtime_ns) for path in moved.rglob("*"))
    there = resume(short, "copied", "--train-samples", "176", "--learning-rate", "1e-2")
    assert there.code == 0, there.stderr
    assert max(there.losses) == 22
    assert sorted((path, path.stat().st_mtime_ns) for path in moved.rglob("*")) == before
    assert configs.load(copied / "config.toml").output.out == Path("copied")


def test_a_config_without_its_run_names_both_folders(short: Launcher, run: Finished) -> None:
    (short.folder / "alone").mkdir()
    shutil.copy(run.out / "config.toml", short.folder / "alone")
    refused = resume(short, "alone")
    assert refused.code == 2
    assert "--out alone or --out run" in refused.stderr


def test_data_that_do_not_resolve_from_here_are_said(
    short: Launcher, run: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy(run, "elsewhere", 20)
    (short.folder / "sub").mkdir()
    inside = Launcher(short.folder / "sub")
    words = ["--config", str(out / "config.toml"), "--resume", "--cache-dir", str(short.folder / "cache")]
    monkeypatch.setattr(Launcher, "command", lambda *_: [*"...", *words])
    refused = inside.run_here(str(out), is_told=False)
    assert refused.code == 2
    assert f"the run was started in {short.folder}, and this is {inside.folder}" in refused.stderr


def test_a_run_of_earlier_checkpoints_goes_on(short: Launcher, run: Finished) -> None:
    """Their pages lack the record of the run: the config says what its order and its decay were."""
    out = copy(run, "older")
    for step in (10, 20):
        path = out / f"checkpoints/{step}/page/metadata"
        page = json.loads(path.read_text())
        del page["run"], page["checksum"]
        path.write_text(json.dumps(with_checksum(page)))
    longer = resume(short, "older", "--train-samples", "320")
    assert longer.code == 0, longer.stderr
    assert [entry["learning_rate"] for entry in longer.metrics[20:]] == pytest.approx([2e-4] * 20)
    np.testing.assert_array_equal(samples(short, out), samples(short, short.folder / "longer"))


def test_two_ends_of_a_run_are_refused(short: Launcher, run: Finished) -> None:
    refused = resume(short, "run", "--steps", "40")
    assert refused.code == 2
    assert "--steps 40 and train_samples 160 both set the end of the run" in refused.stderr


def test_a_warmup_longer_than_the_run_is_said(short: Launcher) -> None:
    said = short.train_here("warm", "--steps", "3", *SMALL)
    assert "note    warmup_steps 4 is not below the run's 3 steps: the learning rate reaches 1.00e-03" in said.stdout


@pytest.mark.long
def test_a_run_that_is_resumed_twice_within_its_warmup_decays_over_its_last_steps(short: Launcher) -> None:
    short.train_here("climbing", "--steps", "3", *SMALL)
    assert resume(short, "climbing", "--steps", "4").code == 0
    longer = resume(short, "climbing", "--steps", "8")
    assert longer.code == 0, longer.stderr
    # Megatron's cosine from the peak 2e-3 at step 4 to 2e-4 at step 8.
    expected = [2e-4 + 1.8e-3 * (1 + np.cos(np.pi * (k - 4) / 4)) / 2 for k in range(4, 8)]
    assert [entry["learning_rate"] for entry in longer.metrics[4:]] == pytest.approx(expected, rel=1e-5)
