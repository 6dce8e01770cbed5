"""Exact search equals numpy in float64, faiss' own exact index, and what was killed goes on to the same bytes."""

import jax
import numpy as np
import pytest

from mtjax.data.neighbours.overlap import shared_runs, shares_run
from mtjax.errors import UserError
from mtjax.retrieval.exact import ExactIndex
from mtjax.retrieval.faiss_index import FaissIndex
from mtjax.retrieval.rows_file import RowsFile
from mtjax.retrieval.search import find
from mtjax.retrieval.vectors import VectorRange, Vectors

WIDTH = 24


def database(random: np.random.Generator) -> tuple[Vectors, np.ndarray, np.ndarray]:
    """Rows 5 to 90 of one file and 10 to 40 of another, with the numbers of their chunks; some are zeros or twice."""
    files = [random.standard_normal((size, WIDTH)).astype(np.float16) for size in (100, 50)]
    files[0][[7, 50]] = 0
    files[1][20] = files[0][30]
    parts = [VectorRange(files[0], 5, 90, 0), VectorRange(files[1], 10, 40, 100)]
    chunks = np.concatenate([np.arange(5, 90), np.arange(110, 140)])
    return Vectors(parts), np.concatenate([files[0][5:90], files[1][10:40]]), chunks


def reference(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Squared distances in float64; infinite to zeros."""
    distances = np.square(rows[None].astype(np.float64) - queries[:, None]).sum(-1)
    return np.where(rows.any(axis=1), distances, np.inf)


@pytest.mark.parametrize(("devices", "block"), [(1, 1 << 16), (1, 16), (4, 8)])
def test_exact_search_equals_float64(devices: int, block: int, monkeypatch) -> None:
    monkeypatch.setattr("mtjax.retrieval.exact.RESCORED", 100)  # some queries, or less than one, at a time
    assert len(jax.devices()) >= devices  # in use: their number is fixed
    random = np.random.default_rng(0)
    vectors, rows, chunks = database(random)
    queries = random.standard_normal((13, WIDTH)).astype(np.float16)
    queries[3] = rows[25]  # chunk 30, and its copy: of equal ones the first
    places, distances = ExactIndex(vectors, devices, block).search(queries, 20)
    wanted = reference(rows, queries)
    order = np.argsort(wanted, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_allclose(distances, np.take_along_axis(wanted, order, 1), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(vectors.chunks(places), chunks[order])
    # More than there are.
    places, distances = ExactIndex(vectors, devices, block).search(queries, 120)
    assert (np.sort(places[:, :113], axis=1) == np.flatnonzero(rows.any(axis=1))).all()
    assert (places[:, 113:] == -1).all() and np.isinf(distances[:, 113:]).all()


def test_more_are_searched_where_many_are_dropped() -> None:
    random = np.random.default_rng(1)
    vectors, rows, chunks = database(random)
    queries = random.standard_normal((6, WIDTH)).astype(np.float16)
    queries[4] = 0
    kept_of = [chunks[random.permutation(len(chunks))[:size]] for size in (115, 60, 30, 4, 115, 0)]
    found, distances = find(
        ExactIndex(vectors), vectors, queries, 5, lambda query, candidates: np.isin(candidates, kept_of[query])
    )
    for query, kept in enumerate(kept_of):
        near = reference(rows, queries[query : query + 1])[0]
        order = [place for place in np.argsort(near, kind="stable") if chunks[place] in kept and rows[place].any()]
        wanted = chunks[order[:5]].tolist() if query != 4 else []
        assert found[query].tolist() == wanted + [-1] * (5 - len(wanted))
        assert np.isinf(distances[query]).sum() == 5 - len(wanted)


def test_faiss_finds_the_same_and_its_index_is_kept(tmp_path, monkeypatch, capsys) -> None:
    faiss = pytest.importorskip("faiss", reason="needs the extra faiss: pip install '.[faiss]'")
    random = np.random.default_rng(2)
    vectors, rows, _ = database(random)
    queries = random.standard_normal((9, WIDTH)).astype(np.float16)
    ours, near = ExactIndex(vectors).search(queries, 8)
    plain = faiss.IndexFlatL2(WIDTH)
    plain.add(rows[rows.any(axis=1)].astype(np.float32))
    distances, places = plain.search(queries.astype(np.float32), 8)
    np.testing.assert_array_equal(np.flatnonzero(rows.any(axis=1))[places], ours)
    np.testing.assert_allclose(near, distances, rtol=1e-5, atol=1e-4)
    saved = {"saved": tmp_path / "x", "identity": "rows", "sample": 90}
    flat = FaissIndex(vectors, "Flat")
    np.testing.assert_array_equal(flat.search(queries, 8)[0], ours)
    assert (flat.search(queries, 120)[0][:, 113:] == -1).all()
    every_cell = FaissIndex(vectors, "IVF4,Flat", nprobe=4, **saved)
    np.testing.assert_array_equal(every_cell.search(queries, 8)[0], ours)
    # The default visits one cell of four, and what was built is read.
    monkeypatch.setattr(FaissIndex, "_build", None)
    one_cell, _ = FaissIndex(vectors, "IVF4,Flat", **saved).search(queries, 8)
    assert 0.1 < np.mean([len(np.intersect1d(a, b)) / 8 for a, b in zip(one_cell, ours, strict=True)]) < 0.9
    monkeypatch.undo()
    # Where it can't be kept, it is used all the same.
    lost = FaissIndex(vectors, "Flat", saved=tmp_path / "absent" / "x")
    np.testing.assert_array_equal(lost.search(queries, 8)[0], ours)
    assert "can't be written" in capsys.readouterr().err
    for factory, more, message in [
        ("IVF4;Flat", {}, r"--index IVF4;Flat is exact or an index that faiss knows, for 24 numbers: "),
        ("IVF200,Flat", {}, r"--index IVF200,Flat can't be trained on 115 vectors .*take fewer cells"),
        ("Flat", {"nprobe": 3}, r"--nprobe 3 is for indices with IVF in their name, and --index is Flat"),
    ]:
        with pytest.raises(UserError, match=message):
            FaissIndex(vectors, factory, **more)


def test_runs_in_common() -> None:
    text, other = np.arange(20), np.array([9, 9, 5, 6, 7, 8, 30, 12, 13, 14])
    assert np.flatnonzero(shared_runs(text, other, 3)).tolist() == [5, 6, 12]
    assert shares_run(text, other, 4) and not shares_run(text, other, 5)
    assert not shares_run(text, other[:2], 3) and not len(shared_runs(text[:2], other, 3))
    assert shares_run(text.astype(np.int32), other.astype(np.uint16), 4)


def test_a_file_of_rows_goes_on_or_begins_anew(tmp_path) -> None:
    path, rows = tmp_path / "rows.npy", np.arange(20, dtype=np.int32).reshape(10, 2)

    def file(identity: str) -> RowsFile:
        return RowsFile(path, (10, 2), "<i4", {"of": identity})

    with file("a").opened() as begun:
        begun.append(rows[:4])
        with pytest.raises(UserError, match="another run is writing"), file("a").opened():
            pass
    partial = next(tmp_path.glob(".rows.npy.partial"))
    partial.write_bytes(partial.read_bytes() + b"half a row")
    with file("b").opened() as other:
        assert other.done == 0
        other._file.write(rows[5:].tobytes())  # and is killed before it records them
    with file("a").opened() as first:
        assert first.done == 0  # its record doesn't vouch for the rows of the other
    with file("b").opened() as other:
        other.append(rows[:3])
    with file("b").opened() as again:
        assert again.done == 3 and not path.exists()
        again.rewind(2)
        again.append(rows[2:])
        again.publish()
    np.testing.assert_array_equal(np.load(path), rows)
    with pytest.raises(FileNotFoundError, match="weights"), file("c").opened():  # of what makes rows, not of the file
        (tmp_path / "weights").read_bytes()
    (tmp_path / ".rows.npy.partial").unlink()
    assert [each.name for each in tmp_path.iterdir()] == ["rows.npy"]
