"""`mtjax data embed` and `neighbours` as they are typed, and what a run reads of their files."""

import contextlib
import dataclasses
import pickle
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtjax.cli import main
from mtjax.config import Config, replace
from mtjax.data.batches.batch_schedule import constant
from mtjax.data.batches.loader import open_loader
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.datasets import open_dataset, open_in_order, open_samples
from mtjax.data.neighbours.header import read_header
from mtjax.data.neighbours.overlap import shares_run
from mtjax.data.neighbours.reader import Neighbours, WithNeighbours
from mtjax.data.neighbours.samples import documents_of, orders_of, with_neighbours
from mtjax.data.split_opener import SplitOpener
from mtjax.errors import UserError
from mtjax.retrieval import embeddings as embedding
from mtjax.retrieval.embedder import Embedder
from mtjax.retrieval.faiss_index import FaissIndex
from tests.retrieval.tiny_encoder import write_corpus, write_encoder

CHUNK, LENGTH, COUNT, TRAIN, VALID = 8, 32, 5, 20, 4
RUN = {
    "sequence_length": LENGTH,
    "train_samples": TRAIN,
    "global_batch_size": 4,
    "valid_batches": 1,
    "split": "80,20,0",
    "seed": 7,
}
MODEL = {"family": "retro", "retro_chunk": CHUNK, "retro_first": 1, "num_layers": 2}
SHARED = ["--embedder-tokens", "40"]


def command(*words: object) -> int:
    return main(["data", *map(str, words)])


def search(folder: Path, output: str, *more: object, data: str | None = None) -> int:
    settings = [word for name, value in (MODEL | RUN).items() for word in (f"--{name.replace('_', '-')}", value)]
    source = ["--data", data or folder / "corpus", "--embedder", f"hf:{folder / 'bert'}", "--search-rows", 32]
    return command("neighbours", *source, *settings, *SHARED, "--output", folder / output, "--nearest", COUNT, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`bert`, `corpus` with its embeddings, and `near`: the neighbours of a run."""
    assert len(jax.devices()) >= 2  # in use: their number is fixed
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("retrieval")
    write_encoder(folder / "bert")
    write_corpus(folder)
    words = ["--embedder", f"hf:{folder / 'bert'}", *SHARED, "--chunk", CHUNK, "--rows", 16, "--mesh", "2x1"]
    assert command("embed", "--input", folder / "corpus", *words) == 0
    assert search(folder, "near") == 0
    return folder


def config_of(folder: Path, **changes: object) -> Config:
    return replace(Config(), **{"data": str(folder / "corpus"), **MODEL, **RUN, **changes})


def opened(folder: Path, of: str = "train", prefix: str = "near", k: int = 2, chunks: int = 2, **changes: object):
    earlier = changes.pop("earlier", ())
    sizes = {"retro_num_neighbours": k, "retro_retrieved_chunks": chunks}
    config = config_of(folder, **{"neighbours": str(folder / prefix), **sizes, **changes})
    opener, order = SplitOpener(config, of, None), orders_of(config, earlier)[of]
    return with_neighbours(config, opener, open_samples(opener, order), order)


def chunks_of(corpus: IndexedDataset, count: int = 1) -> tuple[list[np.ndarray], list[int]]:
    """Every chunk with those behind it in its document, and its document, in plain loops."""
    texts, documents = [], []
    for document in range(len(corpus)):
        tokens = corpus[document]
        for begin in range(0, len(tokens), CHUNK):
            texts.append(tokens[begin : begin + count * CHUNK])
            documents.append(document)
    return texts, documents


def plain_search(folder: Path, split: str, overlap: int = 0) -> list[list[int]]:
    """The neighbours of all chunks by numpy in float64."""
    rows = np.load(folder / "corpus.embeddings.npy").astype(np.float64)
    corpus = IndexedDataset(folder / "corpus")
    texts, documents = chunks_of(corpus, 2)
    embedder = Embedder(f"hf:{folder / 'bert'}", rows=16, max_tokens=40)
    config = config_of(folder, family="gpt")
    tokenizer = SplitOpener(config, "train", None).text.tokenizer
    dataset, found = open_dataset(config, split, TRAIN if split == "train" else VALID), []
    for number in range(TRAIN if split == "train" else VALID):
        tokens, own = dataset[number]["tokens"], documents_of(dataset, number)[1]
        pieces = [tokens[at : at + CHUNK] for at in range(0, LENGTH, CHUNK)]
        queries = embedder.embed([tokenizer.decode(p[p != tokenizer.eod].tolist()) for p in pieces]).astype(np.float64)
        for place, query in enumerate(queries):
            near = np.argsort(np.square(rows - query).sum(1), kind="stable")
            following = tokens[(place + 1) * CHUNK : (place + 2) * CHUNK]
            kept = [
                int(chunk)
                for chunk in near
                if documents[chunk] < 32  # 80% of 40: the training text
                and documents[chunk] not in own
                and rows[chunk].any()
                and not (overlap and shares_run(following, texts[chunk], overlap))
            ]
            found.append((kept + [-1] * COUNT)[:COUNT])
    return found


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_run_reads_the_nearest_chunks_of_other_documents(folder: Path, split: str) -> None:
    wanted = plain_search(folder, split)
    np.testing.assert_array_equal(np.load(folder / f"near.{split}.npy"), wanted)
    samples = opened(folder, split, k=3, chunks=3)
    texts, _ = chunks_of(IndexedDataset(folder / "corpus"), 3)
    plain = open_dataset(config_of(folder, family="gpt"), split, len(samples))
    eod = SplitOpener(config_of(folder), split, None).text.tokenizer.eod
    assert len(samples) == (TRAIN if split == "train" else VALID)
    for number in range(len(samples)):
        sample = samples[number]
        assert sample["neighbours"].shape == (4, 3, 3 * CHUNK) and sample["neighbours"].dtype == np.int32
        for place, row in enumerate(sample.pop("neighbours")):
            for tokens, chunk in zip(row, wanted[4 * number + place], strict=False):
                text = texts[chunk].tolist() if chunk >= 0 else []
                assert tokens.tolist() == text + [eod] * (3 * CHUNK - len(text))
        assert sample.keys() == plain[number].keys()
        assert all((sample[name] == plain[number][name]).all() for name in sample)


def test_neighbours_that_say_what_comes_next_are_dropped(folder: Path) -> None:
    assert search(folder, "clean", "--without-overlap", 3, "--of", "valid") == 0
    wanted = plain_search(folder, "valid", overlap=3)
    assert wanted != plain_search(folder, "valid")
    np.testing.assert_array_equal(np.load(folder / "clean.valid.npy"), wanted)
    assert not (folder / "clean.train.npy").exists()
    with pytest.raises(UserError, match="without-overlap was of 2 chunks of a neighbour.*retro_retrieved_chunks is 3"):
        opened(folder, "valid", "clean", chunks=3)


def test_a_longer_run_keeps_the_samples_that_it_had(folder: Path) -> None:
    assert search(folder, "long", "--train-samples", 60, "--earlier", TRAIN, "--of", "train") == 0
    longer, first = opened(folder, prefix="long", train_samples=60, earlier=(TRAIN,)), opened(folder)
    assert len(longer) == 60
    for number in range(TRAIN):
        assert all((longer[number][name] == array).all() for name, array in first[number].items())
    with pytest.raises(UserError, match="was made for the order of 20, then 60 samples, and the run asks for 60"):
        opened(folder, prefix="long", train_samples=60)
    with pytest.raises(UserError, match="and the run asks for 20, then 60, .* with mtjax data neighbours --earlier 20"):
        opened(folder, train_samples=60, earlier=(TRAIN,))
    with pytest.raises(UserError, match="--earlier and the run's samples are 60, 20, and must ascend"):
        orders_of(config_of(folder), (60,))


def test_batches_go_on_anywhere_also_in_worker_processes(folder: Path) -> None:
    samples = opened(folder)

    def batches(start: int, samples: WithNeighbours) -> list[dict[str, np.ndarray]]:
        rows = np.array([0, 3])
        with open_loader(Config(), samples, rows=rows, start_sample=start, batch_schedule=constant(4)) as loader:
            return list(loader)

    in_worker = pickle.dumps(samples)
    assert len(in_worker) < 20_000  # paths, and no files
    whole, rest = batches(0, samples), batches(8, pickle.loads(in_worker))
    assert len(whole) == 5 and len(rest) == 3 and whole[0]["neighbours"].shape == (2, 4, 2, 2 * CHUNK)
    for ours, theirs in zip(whole[2:], rest, strict=True):
        assert all((ours[name] == theirs[name]).all() for name in ours)
    np.testing.assert_array_equal(whole[2]["neighbours"][1], samples[11]["neighbours"])


def test_a_killed_command_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch) -> None:
    for name in ("corpus.bin", "corpus.idx", "corpus.meta.json"):
        shutil.copy(folder / name, tmp_path)
    shutil.copytree(folder / "bert", tmp_path / "bert")
    whole, calls = Embedder.embed, []

    def killed(self: Embedder, texts: list[str]) -> np.ndarray:
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, texts)

    monkeypatch.setattr(embedding.embed_corpus, "__kwdefaults__", {"block": 40})
    monkeypatch.setattr("mtjax.retrieval.search.of_samples.__defaults__", (24,))
    words = [
        "--input",
        tmp_path / "corpus",
        "--embedder",
        f"hf:{tmp_path / 'bert'}",
        *SHARED,
        "--chunk",
        CHUNK,
        "--rows",
        16,
    ]
    for run, file in (
        (lambda: command("embed", *words), "corpus.embeddings.npy"),
        (lambda: search(tmp_path, "near", "--of", "train"), "near.train.npy"),
    ):
        calls.clear()
        monkeypatch.setattr(Embedder, "embed", killed)
        assert run() == 130 and not (tmp_path / file).exists()
        begun, calls[:] = sum(calls[:2]), [0, 0, 0]
        assert run() == 0
        assert sum(calls) + begun == len(np.load(folder / file))  # what was there was not made again
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
        record = Path(file).with_suffix(".json")
        assert (tmp_path / record).exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "was made with seed 7, and the run has seed 8: make neighbours"),
        ({"sequence_length": 16}, "was made with sequence_length 32, and the run has sequence_length 16"),
        ({"split": "90,10,0"}, "was made with split 80,20,0, and the run has split 90,10,0"),
        ({"add_extra_token_to_sequence": False}, "with add_extra_token_to_sequence True, and the run has .* False"),
        ({"train_samples": 200}, "was made for the order of 20 samples, and the run asks for 200, whose order is"),
        ({"train_samples": 24}, "has neighbours of 20 samples, and the run needs 24"),
        ({"sequence_length": 36}, "sequence_length 36 must be a multiple of retro_chunk 8"),
        ({"family": "gpt"}, "--neighbours .*near is for the family retro, and the run's is gpt"),
        ({"k": 6}, "has 5 neighbours of each chunk, and retro_num_neighbours is 6: take fewer"),
        ({"prefix": "far"}, "far.train.json does not exist: make it with mtjax data neighbours"),
        ({"split": "valid_text"}, "was made with split 80,20,0, and the run has split None"),
        ({"data": "0.5 {0} 0.5 {0}"}, "was made for a blend of 1 texts, and the run has 2"),
        ({"data": "1 {0}"}, "for text 1 of the data with weight None, and the run's, .*corpus, has 1.0"),
        ({"data": "{1}"}, "for text 1 of the data with content [0-9a-f]+, and the run's, .*other, has [0-9a-f]+: make"),
    ],
)
def test_neighbours_of_another_run_are_refused(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    texts = [str(folder / "corpus"), str(tmp_path / "other")]
    changes = dict(changes)
    if "data" in changes:
        (tmp_path / "new").mkdir()
        write_corpus(tmp_path / "new", seed=1)
        for end in ("bin", "idx", "meta.json"):
            (tmp_path / "new" / f"corpus.{end}").rename(f"{texts[1]}.{end}")
        changes["data"] = changes["data"].format(*texts)
    if changes.get("split") == "valid_text":
        changes |= {"data": None, "split": RUN["split"], "train_data": texts[0], "valid_data": texts[0]}
    with pytest.raises(UserError, match=message):
        opened(folder, **changes)


def test_the_family_needs_neighbours(folder: Path) -> None:
    with pytest.raises(UserError, match="retro reads neighbours of the run's samples: make them with mtjax data"):
        open_in_order(config_of(folder), orders_of(config_of(folder))["train"])
    config = config_of(folder, neighbours=str(folder / "near"))
    assert open_in_order(config, orders_of(config)["train"])[3]["neighbours"].shape == (4, 2, 2 * CHUNK)


def test_what_does_not_fit_together_is_refused(folder: Path, tmp_path: Path) -> None:
    rows, sums = np.load(folder / "near.train.npy"), np.load(folder / "near.train.samples.npy")
    header = read_header(folder / "near.train.json")

    def refused(message: str, numbers: np.ndarray = rows, sums: np.ndarray = sums, **changes: object) -> None:
        np.save(tmp_path / "x.train.npy", numbers)
        np.save(tmp_path / "x.train.samples.npy", sums)
        (tmp_path / "x.train.json").write_text(dataclasses.replace(header, **changes).text())
        with pytest.raises(UserError, match=message):
            list(opened(folder, prefix=str(tmp_path / "x")))

    wrong = rows.copy()
    wrong[10, 4] ^= 1
    refused(r"x.train.npy is corrupted: the neighbours of sample 2 are not those that were found", wrong)
    wrong = sums.copy()
    wrong[5, 0] ^= 1
    refused(r"sample 5 is not the one for which .*x.train.npy has neighbours", sums=wrong)
    refused(r"x.train.npy is not the array that its record describes, <i4 or <i8 \(80, 5\)", rows[:-1])
    refused(r"x.train.samples.npy is not the array", sums=sums.astype(np.int64))
    refused("x.train.json has format 2, and 1 is known", format=2)
    refused("was searched in 2 corpora, and the run's database has 1", database=2 * header.database)
    refused("was searched in .*corpus of content 0, and .*corpus has", database=[header.database[0] | {"content": "0"}])
    refused(
        "were searched in the documents 0 to 40 of .*, and the run trains on 0 to 32",
        database=[header.database[0] | {"documents": 40}],
    )
    refused("knows 170 chunks, and its corpora have 177", chunks=170)
    shutil.copy(folder / "corpus.embeddings.json", tmp_path / "x.train.json")
    with pytest.raises(UserError, match="x.train.json is another record than mtjax data neighbours writes"):
        opened(folder, prefix=str(tmp_path / "x"))


@given(st.sampled_from(["json", "npy", "samples.npy"]), st.integers(0, 3000), st.binary(max_size=3), st.integers(0, 3))
@example("json", 30, b"", 0)
@settings(max_examples=40)
def test_damage_is_said_in_a_sentence(folder: Path, end: str, place: int, inserted: bytes, removed: int) -> None:
    """Any bytes anywhere in the files, or missing: what is read is what was written, or an error."""
    name = f"train.{end}"
    content = (folder / f"near.{name}").read_bytes()
    changed = content[:place] + inserted + content[place + removed :]
    with tempfile.TemporaryDirectory() as other:
        for path in folder.glob("near.train.*"):
            shutil.copy(path, Path(other) / path.name)
        (Path(other) / f"near.{name}").write_bytes(changed)
        corpus = IndexedDataset(folder / "corpus")
        one, two = [
            lambda place=place: Neighbours(
                place / "near", "train", [corpus], eod=3, vocab_size=71, num_neighbours=5, retrieved_chunks=2
            )
            for place in (folder, Path(other))
        ]
        with contextlib.suppress(UserError):
            ours, theirs = one(), two()
            assert theirs.header == ours.header
            assert all((theirs[number] == ours[number]).all() for number in range(TRAIN))


def test_neighbours_of_a_corpus(folder: Path, tmp_path: Path, capsys) -> None:
    """For duplicates: each chunk's nearest of another document, and how far it is."""
    stored = folder / "corpus.embeddings.npy"
    words = ["--queries", stored, "--embeddings", stored, "--nearest", 3, "--output", tmp_path / "near.npy"]
    assert command("neighbours", *words, "--search-mesh", "2x1") == 0
    assert "3 neighbours of 177 chunks, 177 were searched" in capsys.readouterr().out
    rows, (_, documents) = np.load(stored).astype(np.float64), chunks_of(IndexedDataset(folder / "corpus"))
    distances = np.square(rows[:, None] - rows).sum(-1)
    distances[np.equal.outer(documents, documents) | ~rows.any(axis=1) | ~rows.any(axis=1)[:, None]] = np.inf
    found, near = np.load(tmp_path / "near.npy"), np.load(tmp_path / "near.distances.npy")
    wanted = np.sort(distances, axis=1)[:, :3]
    np.testing.assert_allclose(near, wanted, atol=1e-3, rtol=1e-4)
    real = found >= 0
    assert (real == np.isfinite(wanted)).all()
    np.testing.assert_allclose(
        np.take_along_axis(distances, found.clip(0), 1)[real], wanted[real], atol=1e-3, rtol=1e-4
    )
    (tmp_path / "near.npy").unlink()
    assert command("neighbours", *words) == 2
    assert "near.distances.npy exists: name another --output" in capsys.readouterr().err


def test_an_interrupted_search_goes_on_with_its_own_index_only(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Other settings of an index find other neighbours, which don't belong into the same file."""
    pytest.importorskip("faiss", reason="needs the extra faiss: pip install '.[faiss]'")
    shutil.copy(folder / "corpus.embeddings.npy", tmp_path)
    shutil.copy(folder / "corpus.embeddings.json", tmp_path)
    stored = tmp_path / "corpus.embeddings.npy"
    words = ["--queries", stored, "--embeddings", stored, "--nearest", 2, "--index", "IVF4,Flat", "--output"]
    search, calls = FaissIndex.search, []

    def killed(self: FaissIndex, *args: Any) -> Any:
        calls.append(len(args[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return search(self, *args)

    monkeypatch.setattr("mtjax.retrieval.search.of_corpus.__defaults__", (150,))
    monkeypatch.setattr(FaissIndex, "search", killed)
    assert command("neighbours", *words, tmp_path / "x.npy", "--nprobe", 1) == 130
    calls[:] = [0, 0]
    assert command("neighbours", *words, tmp_path / "x.npy", "--nprobe", 4) == 0
    assert command("neighbours", *words, tmp_path / "whole.npy", "--nprobe", 4) == 0
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_an_embedders_tokenizer_is_part_of_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "bert", tmp_path / "bert")
    same, path = Embedder(f"hf:{tmp_path / 'bert'}", max_tokens=40).fingerprint, tmp_path / "bert" / "vocab.txt"
    assert same == Embedder(f"hf:{folder / 'bert'}", max_tokens=40).fingerprint
    tokens = path.read_text().splitlines()
    path.write_text("\n".join([*tokens[:-2], tokens[-1], tokens[-2]]) + "\n")
    assert Embedder(f"hf:{tmp_path / 'bert'}", max_tokens=40).fingerprint != same


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("embed --input {0}/corpus --embedder hf:{0}/none --output {0}/x.npy", "none"),
        (
            "embed --input {0}/corpus --embedder hf:{0}/bert --embedder-tokens 64 --output {0}/x.npy",
            "is 64, and --embedder",
        ),
        ("embed --input {0}/corpus --embedder hf:{0}/bert", "corpus.embeddings.npy exists: name another --output"),
        ("embed --input {0}/corpus --embedder hf:{0}/bert --output {0}/x.bin", "x.bin must end in .npy"),
        (
            "embed --input {0}/corpus --embedder hf:{0}/bert --output {0}/corpus.meta.npy",
            "corpus.meta.json exists: name",
        ),
        ("neighbours --data {0}/corpus --embedder hf:{0}/bert", "--output is missing: the prefix of the files"),
        ("neighbours --data {0}/corpus --output {0}/x", "--embedder is missing: the one that embedded"),
        (
            "neighbours --data {0}/corpus --embedder hf:{0}/bert --output {0}/x --sequence-length 128 --train-samples "
            "8 --embedder-tokens 40 --family retro --retro-first 1 --num-layers 2",
            "was made with --chunk 8, and retro_chunk is 64",
        ),
        (
            "neighbours --data {0}/corpus --embedder hf:{0}/bert --output {0}/x --sequence-length 32 --train-samples 8 "
            "--embedder-tokens 30 --family retro --retro-chunk 8 --retro-first 1 --num-layers 2",
            "other weights, tokenizer, --embedder-tokens or --embedder-dtype than",
        ),
        (
            "neighbours --data {0}/texts.jsonl --tokenizer bert:{0}/vocab.txt --embedder hf:{0}/bert --output {0}/x "
            "--sequence-length 64 --train-samples 8",
            "does not exist: make .* with mtjax data embed",
        ),
        ("neighbours --queries {0}/corpus.embeddings.npy --output {0}/x.npy", "--embeddings is missing"),
        ("neighbours --queries {0}/near.train.npy --embeddings {0}/a.npy --output {0}/x.npy", "is another record than"),
        ("neighbours --queries {0}/corpus.npy --embeddings {0}/a.npy --output {0}/x.npy", "corpus.json does not exist"),
        (
            "neighbours --queries {0}/corpus.embeddings.npy --output {0}/x/x.npy --embeddings "
            "{0}/corpus.embeddings.npy {0}/corpus.embeddings.npy",
            "are of the same text, and each chunk would find itself in the other: remove one",
        ),
        ("neighbours --output {0}/x --nprobe 3", "--nprobe 3 is for an index of faiss"),
        (
            "neighbours --output {0}/x --index IVF4,Flat --embedder a --nearest 0",
            "nearest is 0, and must be at least 1",
        ),
    ],
)
def test_wrong_input_is_one_sentence(folder: Path, tmp_path: Path, words: str, message: str, capsys) -> None:
    assert command(*words.format(folder).split(), *(["--cache-dir", tmp_path] if "--data" in words else [])) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and re.search(message, said), said
    assert not list(folder.glob("x*")) and not list(folder.glob(".*"))
