"""Wrong input ends with exit code 2 and one line that says what to do; nothing is left behind."""

import json
import re
from pathlib import Path

import pytest

from mtjax.commands.train import main
from tests.end_to_end.runs import MASKS, Finished, Launcher, finish

CASES = {
    "missing data": (["--data", "missing.txt"], "no file matches 'missing.txt'"),
    "empty data": (["--data", "empty.txt"], r"empty\.txt"),
    "broken line": (["--data", "broken.jsonl"], r"broken\.jsonl, line 2: Invalid control character"),
    "no text in line": (["--data", "other.jsonl"], r"other\.jsonl.*'text'"),
    "damaged gzip": (["--data", "damaged.txt.gz"], r"damaged\.txt\.gz is corrupted"),
    "mesh of nonsense": (["--mesh", "3y4"], "mesh '3y4' is neither DATAxMODEL, such as 64x8, nor named"),
    "mesh axis": (["--mesh", "data=2,modle=4"], "no axis is called 'modle' - did you mean 'model'"),
    "mesh axis without ways": (["--mesh", "0x8"], "mesh '0x8' sets data to 0; every axis needs at least 1"),
    "mesh axis twice": (["--mesh", "data=2,data=4"], "mesh 'data=2,data=4' sets data twice; name each axis once"),
    "heads": (["--mesh", "1x3"], "num_heads 8 is not divisible by the tensor parallel degree 3.*2 and 4"),
    "hidden": (["--num-heads", "6"], "hidden_size 64 is not divisible by num_heads 6;.*4 and 8"),
    "mlp": (
        ["--mesh", "1x4", "--mlp-size", "126"],
        "mlp_size 126 is not divisible by the tensor parallel degree 4.*124 and 128",
    ),
    "vocabulary": (
        ["--mesh", "1x8", "--vocab-size", "1002", "--vocab-multiple", "6"],
        "padded vocabulary 1002 is not divisible by the tensor parallel degree 8.*1000 and 1008.*vocab_multiple",
    ),
    "vocabulary of the tokenizer": (
        ["--mesh", "1x8", "--vocab-multiple", "3"],
        r"padded vocabulary \d+ is not divisible by the tensor parallel degree 8.*vocab_multiple",
    ),
    "batch": (
        ["--global-batch-size", "9"],
        "global_batch_size 9 is not divisible by the data parallel degree 2.*8 and 10",
    ),
    "microbatch": (
        ["--microbatch-size", "3"],
        "size 8 is not a multiple of microbatch_size 3 x data parallel degree 2.*6 and 12",
    ),
    "small vocabulary": (["--vocab-size", "300"], r"vocab_size 300 is below the \d+ tokens of the tokenizer"),
    "a used folder": (["--out", "used"], "--out used holds a run already: add --resume"),
    "Megatron-LM's folder": (
        ["--out", "theirs", "--resume"],
        r"--out theirs holds checkpoints of Megatron-LM .*mtjax convert --from theirs --to mtjax:runs/NAME --with-opt",
    ),
    "a file as folder": (["--out", "text.txt"], "--out text.txt can't be a folder: text.txt is a file"),
    "a folder in a file": (["--out", "text.txt/run"], "--out text.txt/run can't be a folder: text.txt is a file"),
    "process id": (
        ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"],
        "--process-id 2 is not one of --num-processes 2: it runs from 0 to 1",
    ),
    "half a coordinator": (
        ["--coordinator", "localhost:1"],
        "--num-processes N and --process-id I are required together",
    ),
    "no tokenizer": (["--tokenizer", "nowhere.json"], r"tokenizer nowhere\.json does not exist"),
    "tokenizer kind": (["--tokenizer", "gtp2:folder"], "no kind of tokenizer is called 'gtp2' - did you mean 'gpt2'"),
    "learning rate": (["--learning-rate", "nan"], "learning_rate is nan, and must be a finite number"),
    "warmup": (["--warmup-steps", "-1"], "warmup_steps is -1, and must be 0 or more"),
    "dropout": (["--hidden-dropout", "1.5"], "hidden_dropout is 1.5, and must be at least 0 and below 1"),
    "steps": (["--steps", "0"], "steps is 0, and must be at least 1"),
    "config": (["--config", "gpt2-smal"], "no config file 'gpt2-smal'.* - did you mean 'gpt2-small'"),
    "split": (["--split", "0,0,0"], "split '0,0,0'"),
    "nothing held out": (["--split", "1,0,0", "--valid-every", "1"], "split 1,0,0 leaves nothing for valid"),
    "too little held out": (
        ["--data", "short.txt", "--valid-every", "1"],
        r"split 969,30,1 leaves none of the \d+ documents of short\.txt for valid",
    ),
}


@pytest.fixture(scope="module")
def folder(launcher: Launcher) -> Path:
    files = {
        "empty.txt": "",
        "short.txt": "a few words and no more",
        "broken.jsonl": '{"text": "good"}\n{"text": "bad\n',
        "other.jsonl": '{"words": "no text"}\n',
        "theirs/latest_checkpointed_iteration.txt": "100",
        "used/metrics.jsonl": json.dumps({"step": 1, "loss": 1.0}) + "\n",
        "damaged.txt.gz": "\x1f\x8b and no more of gzip",
    }
    for name, content in files.items():
        (launcher.folder / name).parent.mkdir(exist_ok=True)
        (launcher.folder / name).write_bytes(content.encode("latin-1"))
    return launcher.folder


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_one_line_and_leaves_nothing(
    case: str,
    folder: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options, message = CASES[case]
    data = [] if "--data" in options else ["--data", "text.txt"]
    words = launcher.command(*data, "--out", f"never/{list(CASES).index(case)}")[3:]
    monkeypatch.chdir(folder)
    before = listing(folder)
    assert main([*words, *options]) == 2
    check_error(capfd.readouterr().err, message)
    assert listing(folder) == before


def check_error(stderr: str, message: str) -> None:
    """One line, after what was said about preparing data."""
    *progress, line = stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)
    assert len(line) < 400
    assert all("preparing" in said or "training a tokenizer" in said for said in progress)


def listing(folder: Path) -> dict[str, int]:
    """All files but those of the cache, with their times of change, and all folders."""
    files = [p for p in folder.rglob("*") if "cache" not in p.parts]
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns if p.is_file() else 0 for p in files}


def test_another_model_than_the_checkpoints_is_refused_by_field(
    launcher: Launcher, folder: Path, uninterrupted: Finished
) -> None:
    """In a process of its own, so that the exit code and the absence of a traceback are the real ones."""
    before = listing(folder)
    started = launcher.start("--out", "uninterrupted", "--resume", "--hidden-size", "128", *MASKS)
    wrong = finish(started, uninterrupted.out)
    assert wrong.code == 2
    check_error(wrong.stderr, "is of another model: hidden_size is 64 there and 128 here")
    assert listing(folder) == before


def test_a_run_that_can_not_be_restored_does_not_begin_anew(launcher: Launcher, folder: Path) -> None:
    first = launcher.train_here("all-damaged", "--steps", "2", "--checkpoint-every", "1")
    for page in first.out.glob("checkpoints/*/page/metadata"):
        page.write_bytes(page.read_bytes()[:100])
    before = listing(folder)
    again = launcher.run_here("all-damaged", "--steps", "2", "--resume")
    assert again.code == 2
    check_error(again.stderr, r"all checkpoints in all-damaged/checkpoints are corrupted \(2: .*; 1: .*nothing was")
    assert "starting" not in again.stdout
    assert listing(folder) == before


def test_a_wrong_option_ends_with_code_2(launcher: Launcher) -> None:
    wrong = launcher.run_here("nothing", "--hiden-size", "128")
    assert wrong.code == 2
    check_error(wrong.stderr, "no option is called --hiden-size - did you mean '--hidden-size'")
    assert not wrong.out.exists()


def test_a_loss_that_is_no_number_ends_the_run(launcher: Launcher) -> None:
    """With a rate that throws the weights to the edge of float32; what they are then is not saved over a good one."""
    options = ["--learning-rate", "1e38", "--warmup-steps", "0", "--clip-grad-norm", "0", "--steps", "10"]
    finished = launcher.run_here("exploded", *options)
    assert finished.code == 2, finished.stdout
    line = finished.stderr.strip().splitlines()[-1]
    assert re.search(
        r"error: 5 steps in a row were skipped, from step 2 on: its loss is (nan|inf) and the first gradient that is "
        r"not finite is that of stack\.layers\.\S+, layer 1 \(samples 8 to 15\); there is no checkpoint yet: "
        r"lower --learning-rate",
        line,
    )
    assert [entry["skipped"] for entry in finished.metrics] == [0, 1, 1, 1, 1]
    assert '"loss": null' in (finished.out / "metrics.jsonl").read_text()
    assert finished.checkpoints == set()
