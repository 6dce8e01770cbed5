import pickle
import random
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.data.corpus.indexed import DTYPES, IndexedDataset, bin_path, idx_path, token_dtype
from mtjax.data.corpus.meta import meta_path
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.errors import UserError
from tests.data.corpora import write_indexed

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8, 9, 10]]]


def by_hand(documents, dtype="<u2", code=8, modes=None):
    """The bytes of both files, straight from the layout of the format."""
    sequences = [s for d in documents for s in d]
    size = np.dtype(dtype).itemsize
    starts = [size * sum(len(s) for s in sequences[:i]) for i in range(len(sequences))]
    counts = [sum(len(d) for d in documents[:i]) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(s)) for s in sequences)
    index += b"".join(struct.pack("<q", start) for start in starts)
    index += b"".join(struct.pack("<q", count) for count in counts)
    index += b"" if modes is None else struct.pack(f"<{len(modes)}b", *modes)
    return np.array([t for s in sequences for t in s], dtype).tobytes(), index


def test_the_bytes_are_the_formats(tmp_path):
    write_indexed(tmp_path / "x", DOCUMENTS)
    tokens, index = by_hand(DOCUMENTS)
    assert bin_path(tmp_path / "x").read_bytes() == tokens
    assert idx_path(tmp_path / "x").read_bytes() == index
    assert not list(tmp_path.glob(".*")), "partial files are left"


@pytest.mark.parametrize("code", DTYPES)
def test_every_type_is_read(tmp_path, code):
    tokens, index = by_hand(DOCUMENTS, DTYPES[code], code)
    bin_path(tmp_path / "x").write_bytes(tokens)
    idx_path(tmp_path / "x").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [s for d in DOCUMENTS for s in d]
    assert dataset[0].dtype == DTYPES[code]


def test_modes_are_read_and_written(tmp_path):
    write_indexed(tmp_path / "x", DOCUMENTS, modes=[0, 1, 0, 1])
    assert idx_path(tmp_path / "x").read_bytes() == by_hand(DOCUMENTS, modes=[0, 1, 0, 1])[1]
    modes = IndexedDataset(tmp_path / "x").modes
    assert modes is not None and modes.tolist() == [0, 1, 0, 1]


def test_types_by_vocabulary():
    assert [token_dtype(n).str for n in (10, 65_499, 65_500, 250_000)] == ["<u2", "<u2", "<i4", "<i4"]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 60_000), max_size=9), max_size=4), max_size=9),
    cuts=st.sets(st.integers(1, 8)),
)
@settings(deadline=None, max_examples=100)
def test_round_trip_in_any_pieces(tmp_path_factory, documents, cuts):
    prefix = tmp_path_factory.mktemp("round") / "x"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        edges = [0, *sorted(c for c in cuts if c < len(documents)), len(documents)]
        for a, b in pairwise(edges):
            sequences = [s for d in documents[a:b] for s in d]
            tokens = np.array([t for s in sequences for t in s], np.int64)
            writer.add(tokens, np.array([len(s) for s in sequences]), np.array([len(d) for d in documents[a:b]]))
        writer.finish()
    assert (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()) == by_hand(documents)
    dataset = IndexedDataset(prefix)
    ends = dataset.documents.tolist()
    read = [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(ends)]
    assert read == documents


def test_parts_of_a_sequence(tmp_path):
    dataset = IndexedDataset(write_indexed(tmp_path / "x", DOCUMENTS))
    assert dataset.get(3, 1, 2).tolist() == [8, 9]
    assert dataset.get(3, 2).tolist() == [9, 10]
    for offset, length in ((0, 5), (4, 1), (-1, 1), (2, -1)):
        with pytest.raises(IndexError):
            dataset.get(3, offset, length)


def test_other_processes_map_it_themselves(tmp_path):
    dataset = IndexedDataset(write_indexed(tmp_path / "x", DOCUMENTS))
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 500
    assert copy[3].tolist() == [7, 8, 9, 10]


DAMAGE = {
    "x.idx is not an index": lambda tokens, index: (tokens, b"PNG" + index[3:]),
    "x.idx has version 2": lambda tokens, index: (tokens, index[:9] + struct.pack("<Q", 2) + index[17:]),
    "x.idx has type code 9": lambda tokens, index: (tokens, index[:17] + b"\x09" + index[18:]),
    "x.idx is truncated: 20 bytes": lambda tokens, index: (tokens, index[:20]),
    "x.idx is truncated": lambda tokens, index: (tokens, index[:-3]),
    "x.idx is too long": lambda tokens, index: (tokens, index + b"\0"),
    "x.bin is truncated": lambda tokens, index: (tokens[:-2], index),
    "x.bin has bytes that its index": lambda tokens, index: (tokens + b"\0", index),
    "x.idx is truncated: .* 18,446,744,073,709,551,615": lambda tokens, index: (
        tokens,
        index[:18] + struct.pack("<Q", 2**64 - 1) + index[26:],
    ),
    "x.idx is corrupted: sequence 1 has -5": lambda tokens, index: (
        tokens,
        index[:38] + struct.pack("<i", -5) + index[42:],
    ),
    "x.idx is corrupted: its document starts": lambda tokens, index: (tokens, index[:-8] + struct.pack("<q", 7)),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(tmp_path, message):
    tokens, index = DAMAGE[message](*by_hand(DOCUMENTS))
    bin_path(tmp_path / "x").write_bytes(tokens)
    idx_path(tmp_path / "x").write_bytes(index)
    with pytest.raises(UserError, match=message):
        IndexedDataset(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path):
    write_indexed(tmp_path / "x", DOCUMENTS)
    bin_path(tmp_path / "x").unlink()
    with pytest.raises(UserError, match=r"x\.bin can't be read: No such file"):
        IndexedDataset(tmp_path / "x")


def corrupt(data, draw):
    """One random corruption: flipped bits, a changed number, a lost or doubled stretch, a cut end."""
    data, kind = bytearray(data), draw.randrange(5)
    at = draw.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        at = draw.randrange(18, len(data) - 8)
        data[at : at + 8] = struct.pack("<q", draw.choice([0, 1, -1, 2**31, 2**62, draw.randrange(1 << 40)]))
    elif kind == 2:
        del data[at : at + draw.randrange(1, 20)]
    elif kind == 3:
        data[at:at] = data[at : at + draw.randrange(1, 20)]
    else:
        del data[at:]
    return bytes(data)


def contents(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.documents.tolist(), dataset.dtype


@pytest.mark.parametrize(("with_checksum", "count"), [(True, 5000), (False, 1500)])
def test_thousands_of_corruptions(tmp_path, with_checksum, count):
    """Of an index with its checksum, none goes unseen. Megatron's own files have no checksum: all is seen but document
    borders and types of the same width, and nothing is read beyond the files."""
    draw = random.Random(7)
    documents = [
        [[draw.randrange(500) for _ in range(draw.randrange(9))] for _ in range(draw.randrange(4))] for _ in range(40)
    ]
    prefix = write_indexed(tmp_path / "x", documents)
    if not with_checksum:
        meta_path(prefix).unlink()
    good, expected = idx_path(prefix).read_bytes(), contents(IndexedDataset(prefix))
    refused = 0
    for _ in range(count):
        bad = corrupt(good, draw)
        idx_path(prefix).write_bytes(bad)
        try:
            found = contents(IndexedDataset(prefix))
        except UserError as e:
            assert "x.idx" in str(e) or "x.bin" in str(e)
            refused += 1
            continue
        if with_checksum or bad == good:
            assert found == expected
        elif bad[17] == good[17]:
            assert found[0] == expected[0]
        else:
            assert found[2].itemsize == expected[2].itemsize
    assert refused > 0.9 * count
