"""Parts on Ray: what is refused without it, and, where it is installed, the bytes of a run without it."""

import os
import signal
import threading
import time

import pytest

from mtjax.data.commands import preprocess
from mtjax.data.corpus.indexed import bin_path, idx_path
from mtjax.data.corpus.meta import meta_path
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from tests.data.corpora import texts, write_jsonl


@pytest.fixture
def run(tmp_path):
    train_byte_level_bpe(texts(100), tmp_path / "t.json", 400)
    for i in range(2):
        write_jsonl(tmp_path / f"in{i}.jsonl", texts(6000, seed=i, words=100))

    def call(output, *more):
        words = ["--input", tmp_path / "in*.jsonl", "--output", tmp_path / output, "--tokenizer", tmp_path / "t.json"]
        return preprocess.main([str(word) for word in (*words, "--append-eod", *more)])

    return call


def test_what_is_refused(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert run("out", "--ray", "auto") == 2
    assert "this needs the library ray: pip install '.[ray]'" in capsys.readouterr().err
    assert run("out", "--parts", "4") == 2
    assert "--parts 4 needs --ray; one part on this machine is --part 1/4" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_parts_on_a_local_cluster_are_the_bytes_of_one_run(run, tmp_path, capsys):
    """Also where a process of a part is killed."""
    psutil = pytest.importorskip("psutil")
    pytest.importorskip("ray")
    assert run("whole", "--workers", 0) == 0
    killed = []

    def kill_one():
        while not killed:
            for child in psutil.Process().children(recursive=True):
                if child.name().startswith("ray::_run_part") and list(tmp_path.glob(".out*.progress.partial")):
                    os.kill(child.pid, signal.SIGKILL)
                    killed.append(child.pid)
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    assert run("out", "--ray", "local", "--parts", 3, "--save-every", 0) == 0
    assert killed, "no part ran long enough"
    for path in (bin_path, idx_path, meta_path):
        one, other = (path(tmp_path / f"{name}_text_document").read_bytes() for name in ("out", "whole"))
        assert one == other
    assert sorted(p.name for p in tmp_path.glob("*out*")) == [
        f"out_text_document{e}" for e in (".bin", ".idx", ".meta.json")
    ]
    (tmp_path / "in1.jsonl").write_text('{"body": "x"}\n')
    assert run("bad", "--ray", "local", "--parts", 2) == 2
    assert "part 2 of 2: " in (error := capsys.readouterr().err)
    assert "in1.jsonl, line 1: no text under the key 'text'" in error
    assert run("bad", "--ray", "127.0.0.1:1") == 2
    assert "--ray 127.0.0.1:1: there is no Ray cluster (Connection refused)" in capsys.readouterr().err
