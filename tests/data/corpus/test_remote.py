"""Corpora in an object store are what they are on a disk."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtjax import storage
from mtjax.config import Config, Data, replace, validate
from mtjax.data.cache import Cache
from mtjax.data.corpus.remote import with_local_copies
from mtjax.errors import UserError
from mtjax.storage import attempt, filesystem, url_of
from tests.object_store import KEYS, s3_server


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        (Path("s3://bucket/a/b"), "s3://bucket/a/b"),
        ("gs://bucket/a/", "gs://bucket/a"),
        ("s3", None),
        ("/data/s3:/x", None),
        ("s3:///x", None),
        ("runs/a", None),
    ],
)
def test_addresses_are_known_also_as_paths(name: str | Path, url: str | None) -> None:
    assert url_of(name) == url


@pytest.mark.parametrize("name", ["cache_dir", "local_checkpoints"])
def test_other_folders_in_a_store_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is s3://bucket/x, and must be a folder on this machine"):
        validate(replace(Config(), **{name: Path("s3://bucket/x")}))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(storage.LIBRARIES, "gs", ("no_such_library", "gcs"))
    with pytest.raises(UserError, match=r"needs the library no_such_library: pip install '.\[gcs\]'"):
        filesystem("gs://bucket/x")


def test_a_lost_connection_is_tried_again_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))
    tries: list[int] = []

    def fail(until: int) -> str:
        tries.append(1)
        if len(tries) < until:
            raise ConnectionError("connection reset")
        return "done"

    assert attempt("reading s3://a/b", lambda: fail(3)) == "done"
    tries.clear()
    with pytest.raises(UserError, match=r"^reading s3://a/b failed 3 times: connection reset; is the store reachable"):
        attempt("reading s3://a/b", lambda: fail(9))
    tries.clear()
    with pytest.raises(FileNotFoundError):
        attempt("reading", lambda: (tries.append(1), Path("/no/such/file").read_text()))
    assert len(tries) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.mark.long
def test_text_and_indexed_corpora_are_copied_once(server: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fs, cache = filesystem("s3://bucket"), Cache(tmp_path)
    big = bytes(range(256)) * 40_000
    for name, content in (("a.txt", b"one"), ("b.txt", b"two"), ("c/x.idx", b"index"), ("c/x.bin", big)):
        fs.pipe_file(f"bucket/{name}", content)

    def local(text: str) -> str:
        return with_local_copies(Data(data=text), cache).data or ""

    assert [Path(p).read_bytes() for p in local("s3://bucket/*.txt").split(",")] == [b"one", b"two"]
    weight, prefix, _, plain = local("0.3 s3://bucket/c/x 0.7 /here.txt").split()
    assert (weight, plain) == ("0.3", "/here.txt")
    assert Path(f"{prefix}.idx").read_bytes() == b"index" and Path(f"{prefix}.bin").read_bytes() == big
    assert capsys.readouterr().err.count("copying s3://bucket/") == 3
    assert local("s3://bucket/c/x.bin") == prefix
    assert capsys.readouterr().err == ""
    fs.pipe_file("bucket/a.txt", b"six")  # of the same size
    assert Path(local("s3://bucket/a.txt")).read_bytes() == b"six"
    with pytest.raises(UserError, match="^s3://bucket/nothing does not exist, neither as a file nor"):
        local("s3://bucket/nothing")


@pytest.mark.long
def test_a_store_that_does_not_answer_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs the extra s3: pip install '.[s3]'")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{probe.getsockname()[1]}")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    with pytest.raises(UserError, match=r"^reading s3://bucket/x failed 2 times: .*; is the store reachable\?$"):
        with_local_copies(Data(data="s3://bucket/x"), Cache(tmp_path))
