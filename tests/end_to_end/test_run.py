"""What a run leaves in its folder and says on the terminal."""

import gzip
import json
import shlex
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import jax
import pytest
from matplotlib.image import imread

from mtjax import config
from mtjax.commands.compile import main as compile_main
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.train.observability.goodput import AGAIN, DOWN
from mtjax.train.observability.start_timer import ACTIVITIES
from tests.end_to_end.runs import Finished, Launcher

KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "step_time", "tokens_per_second"}
KEYS |= {"goodput", *(f"time/{name.replace(' ', '_')}" for name in (*ACTIVITIES, AGAIN, DOWN))}


@pytest.fixture(scope="module")
def run(launcher: Launcher) -> Finished:
    return launcher.train_here(
        "complete", "--steps", "6", "--valid-every", "3", "--valid-batches", "2", "--checkpoint-every", "2"
    )


def test_the_folder_holds_exactly_what_is_promised(run: Finished) -> None:
    names = {p.name for p in run.out.iterdir()}
    assert names == {
        *("metrics.jsonl", "time.jsonl", "tensorboard", "config.toml", "loss.png", "goodput.png", "checkpoints"),
        "tokenizer.json",
    }


def test_metrics_have_one_object_per_logged_step(run: Finished) -> None:
    assert [entry["step"] for entry in run.metrics] == [1, 2, 3, 4, 5, 6]
    for entry in run.metrics:
        validated = {"valid_loss"} if entry["step"] in (3, 6) else set()
        assert entry.keys() == KEYS | validated
        assert entry["tokens"] == 8 * 32
        assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["step_time"])
        assert 0 < entry["loss"] < 10
        assert entry["grad_norm"] > 0
    assert run.metrics[0]["learning_rate"] == 0.0  # where the warmup begins
    assert run.metrics[1]["learning_rate"] == pytest.approx(2e-3 / 4)  # a quarter of it
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_a_run_without_a_name_takes_the_next_free_folder_and_logs_every_nth_step(
    launcher: Launcher, run: Finished
) -> None:
    """And the first and the last; on JSON lines, so that this way in is seen as well."""
    paragraphs = (launcher.folder / "text.txt").read_text().split("\n\n")
    lines = "".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs)
    (launcher.folder / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (launcher.folder / "runs" / "tiny-3").mkdir(parents=True)
    options = ["--log-every", "3", "--steps", "7", "--tokenizer", "complete/tokenizer.json"]  # the same programs
    sparse = launcher.run_here("runs/tiny-4", *options, data="text.jsonl.gz", is_told=False)
    assert sparse.code == 0, sparse.stderr
    assert list(sparse.losses) == [1, 3, 6, 7]
    assert sparse.losses[7] < sparse.losses[1] < 10
    assert "step 3/7" in sparse.stdout
    assert "step 2/7" not in sparse.stdout


def test_the_saved_config_loads_and_says_what_was_run(run: Finished) -> None:
    saved = config.load(run.out / "config.toml")
    assert (saved.model.num_layers, saved.model.hidden_size, saved.training.steps) == (2, 64, 6)
    assert saved.model.vocab_size == open_tokenizer(str(run.out / "tokenizer.json")).vocab_size
    assert saved.output.out == Path("complete")
    assert saved.output.resume is False


def test_the_plot_is_a_picture(run: Finished) -> None:
    pixels = imread(run.out / "loss.png")
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 500
    assert pixels.std() > 0.05  # not blank


def test_tensorboard_reads_the_events(run: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # tensorboardX imports it where it is installed: seconds
    from tensorboardX.proto.event_pb2 import Event

    seen: dict[str, list[int]] = {}
    for path in (run.out / "tensorboard").iterdir():
        for record in _records(path.read_bytes()):
            event = Event.FromString(record)
            for value in event.summary.value:
                seen.setdefault(value.tag, []).append(event.step)
    assert seen["loss"] == [1, 2, 3, 4, 5, 6]
    assert seen["valid_loss"] == [3, 6]
    assert seen.keys() == (KEYS | {"valid_loss"}) - {"step"}


def _records(data: bytes) -> list[bytes]:
    """TFRecord: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    records, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        records.append(data[at + 12 : at + 12 + size])
        at += 16 + size
    return records


def test_the_last_checkpoints_are_kept(run: Finished) -> None:
    assert run.checkpoints == {2, 4, 6}


def test_it_says_what_is_trained_and_shows_each_step(run: Finished) -> None:
    for words in ("2 layers, hidden 64, 8 heads", "2x4 (data x model): 8 virtual CPU devices", "data    text.txt"):
        assert words in run.stdout
    line = next(line for line in run.stdout.splitlines() if line.startswith("step 3/6"))
    for words in ("loss ", "valid ", "grad ", "lr ", "tokens/s", "TFLOP/s", "ETA"):
        assert words in line
    assert "model FLOPs" in run.stdout  # what TFLOP/s and MFU count
    assert "\x1b[" not in run.stdout  # not a terminal: plain lines


def test_it_ends_with_a_sample_and_a_next_command_that_works(run: Finished, launcher: Launcher) -> None:
    sample = next(line for line in run.stdout.splitlines() if line.startswith("sample"))
    assert sample.split(maxsplit=1)[1].strip("'\"").startswith("The ")
    words = shlex.split(next(line for line in run.stdout.splitlines() if line.startswith("next")))[1:]
    assert words[:2] == ["mtjax", "train"]
    went_on = launcher.train_here("complete", *words[2:], "--steps", "7")
    assert list(went_on.losses) == [1, 2, 3, 4, 5, 6, 7]
    assert "resumed from step 6" in went_on.stdout


def test_compile_makes_the_very_programs_that_a_run_looks_up(run: Finished, launcher: Launcher) -> None:
    """The run's are in the folder that the tests share; that of fingerprints this very process has, too."""
    words = ["--config", "complete/config.toml", "--cache-dir", "cache", "--steps", "6"]
    with chdir(launcher.folder), redirect_stdout(StringIO()) as said:
        assert compile_main(words) == 0
    lines = said.getvalue().splitlines()
    assert [line[:28].strip() for line in lines[:-1]] == [
        "initial state", "step of 8 samples", "validation", "fingerprints", "sample",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[:-1] if not line.endswith("from the cache")] == ["fingerprints"]
    assert lines[-1].startswith(f"cached in {jax.config.jax_compilation_cache_dir} for jax {jax.__version__}, 8 x cpu")


@pytest.mark.parametrize(
    ("choice", "why"), [("off", "compiled programs would be lost"), ("text.txt/programs", "Not a directory: ")]
)
def test_programs_that_cant_be_kept_are_not_compiled(
    launcher: Launcher, choice: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(launcher.folder):
        assert compile_main(["--compile-cache", choice]) == 2
    assert why in capsys.readouterr().err


def test_it_says_where_the_time_went(run: Finished) -> None:
    lines = run.stdout.splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("time"))
    for words in ("steps", "compilation", "start-up"):
        assert words in lines[number]
    assert "programs were found in the compile cache" in lines[number + 1]
