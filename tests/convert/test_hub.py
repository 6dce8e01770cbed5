"""Models named by their id on the Hugging Face hub, whose library is replaced by one that copies a folder."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtjax import cli
from mtjax.convert import hub
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, write_folder


class FakeHub:
    """`huggingface_hub` with one model, `someone/tiny`."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_folder(folder / "downloaded", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
        self.asked: list[tuple[str, str | None]] = []

    def snapshot_download(
        self, name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append((name, revision))
        time.sleep(0.2)
        if name != "someone/tiny":
            raise OSError(f"404 Client Error: {name} not found.\nmore lines")
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path)
    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE=False)
    for name, module in (("", made), (".constants", constants)):
        monkeypatch.setitem(sys.modules, f"huggingface_hub{name}", module)  # pyright: ignore[reportArgumentType]
    monkeypatch.chdir(tmp_path)
    hub._downloaded.cache_clear()
    return made


def test_an_id_is_downloaded_and_converted(fake: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "--from", "hf:someone/tiny@v1.0", "--to", "mtjax:ours"]) == 0
    assert fake.asked == [("someone/tiny", "v1.0")]
    said = capsys.readouterr().err
    assert "someone/tiny does not exist here: downloading it from the Hugging Face hub" in said
    # A folder of that name comes first.
    write_folder(Path("someone/tiny"), random_tensors(gpt2_shapes()), GPT2_CONFIG)
    assert cli.main(["convert", "--from", "hf:someone/tiny", "--to", "mtjax:again"]) == 0
    assert len(fake.asked) == 1


def test_waiting_processes_use_the_first_one_s_download(fake: FakeHub) -> None:
    """A lock of an open file excludes other opens of it, also in the same process."""
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(hub._downloaded.__wrapped__("someone/tiny", None)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [fake.folder] * 4
    assert len(fake.asked) == 1
    # A later one asks the hub again, which may have a newer version; another revision is not the same download.
    hub._downloaded.__wrapped__("someone/tiny", None)
    hub._downloaded.__wrapped__("someone/tiny", "v2")
    assert fake.asked[1:] == [("someone/tiny", None), ("someone/tiny", "v2")]


def test_what_can_not_be_downloaded_is_one_sentence_with_the_command(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "--from", "hf:no/model@v2", "--to", "mtjax:ours"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: no/model@v2 does not exist here, and can't be downloaded from the Hugging Face hub (404 Client Error: "
        "no/model not found): run `hf download no/model --revision v2 --local-dir model` where the hub can be reached, "
        "and name that folder instead"
    )
    (fake.folder / "model.safetensors").unlink()
    assert cli.main(["generate", "--from", "hf:someone/tiny", "a"]) == 2
    assert "someone/tiny has no safetensors files on the hub: save it with" in capsys.readouterr().err
    assert cli.main(["train", "--init-from", "hf:someone/tiny", "--data", "x"]) == 2
    assert "someone/tiny has no safetensors files on the hub: save it with" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # pyright: ignore[reportArgumentType]
    assert cli.main(["convert", "--from", "hf:no/other", "--to", "mtjax:ours"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: no/other does not exist here, and downloading it needs the library huggingface_hub: `pip install "
        "huggingface_hub`, or run `hf download no/other --local-dir other` where the hub can be reached, and name that "
        "folder instead\n"
    )


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_real_library_without_a_network(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(setting, "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hub._downloaded.cache_clear()
    assert cli.main(["convert", "--from", "hf:someone/tiny@v2", "--to", "mtjax:ours"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: someone/tiny@v2 does not exist here, and can't be downloaded from the Hugging Face hub "
        f"({setting} is set, and the hub's cache does not have it): run `hf download someone/tiny --revision v2 "
        "--local-dir tiny` where the hub can be reached, and name that folder instead"
    ]
    # A complete download is found without a network.
    snapshot = tmp_path / "cache/models--someone--tiny/snapshots/0123"
    write_folder(snapshot, random_tensors(gpt2_shapes()), GPT2_CONFIG)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    assert cli.main(["convert", "--from", "hf:someone/tiny", "--to", "mtjax:ours"]) == 0


def test_patterns_leave_copies_out() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    wanted += ["additional_chat_templates/tool.jinja", "merges.txt", "vocab.bpe"]
    others = ["original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "consolidated.safetensors"]
    found = filter_repo_objects([*wanted, *others], allow_patterns=list(hub.FILES), ignore_patterns=list(hub.IGNORED))
    assert list(found) == wanted
