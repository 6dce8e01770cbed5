"""Corpora in an object store are what they are on a disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtjax import storage
from mtjax.config import Config, Data, replace, validate
from mtjax.data.cache import Cache
from mtjax.data.corpus.remote import with_local_copies
from mtjax.data.corpus.source import parse_sources
from mtjax.errors import UserError
from mtjax.storage import attempt, filesystem, is_file, url_of, write_bytes
from tests.end_to_end.runs import free_port
from tests.object_store import ENDPOINT, KEYS, Store, store_on


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

    class Refused(Exception):
        code = 403

    def fail(until: int) -> str:
        tries.append(1)
        if len(tries) < until:
            raise ConnectionError("connection reset")
        return "done"

    assert attempt("reading s3://a/b", lambda: fail(3)) == "done"
    tries.clear()
    with pytest.raises(UserError, match=r"^reading s3://a/b failed for 0 s: connection reset; is the store reachable"):
        attempt("reading s3://a/b", lambda: fail(9))
    assert len(tries) == 3
    tries.clear()
    monkeypatch.setattr(storage, "PATIENCE", -1.0)
    with pytest.raises(UserError, match="is the store reachable"):
        attempt("reading s3://a/b", lambda: fail(9))
    assert len(tries) == 1
    for refusal in (PermissionError("no"), OSError("Forbidden: b/x"), Refused("no")):
        with pytest.raises(UserError, match="^reading s3://a/b: the store refuses it: "):
            attempt("reading s3://a/b", lambda e=refusal: throw(e))
    tries.clear()
    with pytest.raises(FileNotFoundError):
        attempt("reading", lambda: (tries.append(1), Path("/no/such/file").read_text()))
    assert len(tries) == 1


def throw(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with store_on(request.param) as store:
        yield store


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_text_and_indexed_corpora_are_copied_once(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    url, fs, cache = f"{store.url}/corpora", filesystem(store.url), Cache(tmp_path)
    big = bytes(range(256)) * 40_000
    for name, content in (("a.txt", b"one"), ("b.txt", b"two"), ("c/x.idx", b"index"), ("c/x.bin", big)):
        write_bytes(f"{url}/{name}", content)

    def local(text: str) -> str:
        return with_local_copies(Data(data=text), cache).data or ""

    assert [Path(p).read_bytes() for p in local(f"{url}/*.txt").split(",")] == [b"one", b"two"]
    for name in ("b.parquet", "a.parquet"):
        write_bytes(f"{url}/rows/{name}", name.encode())
    assert [Path(p).read_bytes() for p in local(f"{url}/rows").split(",")] == [b"a.parquet", b"b.parquet"]
    write_bytes(f"{url}/c,d.txt", b"three")
    (source,) = parse_sources(local(f"'{url}/c,d.txt'"))
    assert [Path(path).read_bytes() for path in source.paths] == [b"three"]
    capsys.readouterr()
    weight, prefix, _, plain = local(f"0.3 {url}/c/x 0.7 /here.txt").split()
    assert (weight, plain) == ("0.3", "/here.txt")
    assert Path(f"{prefix}.idx").read_bytes() == b"index" and Path(f"{prefix}.bin").read_bytes() == big
    assert capsys.readouterr().err.count(f"copying {url}/") == 1
    assert local(f"{url}/c/x.bin") == prefix
    assert capsys.readouterr().err == ""
    fs.pipe_file("bucket/corpora/a.txt", b"six")  # of the same size
    assert Path(local(f"{url}/a.txt")).read_bytes() == b"six"
    with pytest.raises(UserError, match=f"^{url}/nothing does not exist, neither as a file nor"):
        local(f"{url}/nothing")


@pytest.mark.long
def test_a_store_that_does_not_answer_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of S3: gcsfs tries six times itself, which takes half a minute."""
    pytest.importorskip("s3fs", reason="needs the extra s3: pip install '.[s3]'")
    for name, value in {**KEYS["s3"], ENDPOINT["s3"]: f"http://127.0.0.1:{free_port()}"}.items():
        monkeypatch.setenv(name, value)
    type(filesystem("s3://bucket")).clear_instance_cache()
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    with pytest.raises(UserError, match=r"^reading s3://bucket/x failed for \d s: .*; is the store reachable\?$"):
        is_file("s3://bucket/x")  # not a no: what is not there may be removed, or begun anew
    with pytest.raises(UserError, match=r"^reading s3://bucket/x.idx failed for \d s: .*; is the store reachable\?$"):
        with_local_copies(Data(data="s3://bucket/x"), Cache(tmp_path))
