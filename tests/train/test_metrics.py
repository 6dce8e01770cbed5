"""What `metrics.jsonl` keeps, whatever it held before."""

import json

import numpy as np

from mtjax.train.observability.metrics import MetricsLog, plot_losses, read_metrics


def write(path, steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))


def log(folder, from_step, entry=None):
    metrics = MetricsLog(folder, from_step=from_step)
    metrics.write(entry or {"step": from_step + 1, "loss": 2.0})
    metrics.close()
    return metrics


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path):
    write(tmp_path / "metrics.jsonl", range(1, 6))
    assert log(tmp_path, from_step=3).renamed_to is None
    assert [(e["step"], e["loss"]) for e in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0),
    ]  # fmt: skip


def test_a_run_that_begins_anew_drops_nothing(tmp_path):
    """Such a start may be a mistake: what was measured stays, each time under a name of its own."""
    for number in (1, 2):
        write(tmp_path / "metrics.jsonl", range(1, 4 + number))
        assert log(tmp_path, from_step=0).renamed_to == tmp_path / f"metrics-{number}.jsonl"
    assert [len(read_metrics(tmp_path / f"metrics-{number}.jsonl")) for number in (1, 2)] == [4, 5]
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    (tmp_path / "new").mkdir()
    assert log(tmp_path / "new", from_step=0).renamed_to is None


def test_lines_that_are_no_entries_are_left_out(tmp_path):
    odd = [b"[1, 2]", b"7", b"null", b'{"loss": 1}', b'{"step": "x"}', b'{"step": 2', b"\xff\xfe", b"[" * 9999, b""]
    good = [b'{"step": 1, "loss": 3.5}', b'{"step": 2, "note": "no loss"}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*odd, *good, *odd]))
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    log(tmp_path, from_step=2, entry={"step": 3, "loss": np.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[1:] == ['{"step": 2, "note": "no loss"}', '{"step": 3, "loss": null}']
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
