"""Speed of the data pipeline: preprocessing, index building, loading, and the time that steps wait for data.

    python benchmarks/data.py                 # all parts
    python benchmarks/data.py preprocess      # one of: preprocess, formats, index, loader, wait

`preprocess` compares with Hugging Face's `datasets.map` (`pip install datasets`; skipped without it): the same text,
tokenizer and number of processes, from JSON lines to token ids on disk. `index` compares with a plain Python loop over
documents. `formats` compares JSON lines with Parquet that is read in parts (`--megabytes 1000` for the numbers in
docs/data.md). Results go to `benchmarks/results/data.json`.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

ROWS_PER_GROUP, FORMAT_PARTS = 2000, 4
RESULTS = Path(__file__).parent / "results" / "data.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the data pipeline.")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--megabytes", type=int, default=40, help="text to preprocess")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for part in arguments.parts:
        results[part] = PARTS[part](arguments) | {"measured": _environment()}
        print(f"{part}: {json.dumps(results[part], indent=1)}", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _environment() -> dict[str, Any]:
    names = ("mtjax", "numpy", "tokenizers", "grain", "jax", "datasets")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **versions,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def in_process(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float, float]:
    """Runs `function` in a separate process; returns its result, seconds, and peak memory in MB above the baseline."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(sender, function, arguments))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _measured(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import mtjax.data.commands.preprocess
    import mtjax.families.gpt.sample_index  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = function(*arguments)
    seconds = time.perf_counter() - start
    sender.send((result, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3))


# --- Preprocessing


def preprocessing(arguments: argparse.Namespace) -> dict[str, Any]:
    from mtjax.data.corpus import default_corpus
    from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = default_corpus.documents()
        tokenizer = folder / "tokenizer.json"
        train_byte_level_bpe(texts, tokenizer)
        size = 0
        with (folder / "text.jsonl").open("w") as file:
            while size < arguments.megabytes * 1e6:
                for text in texts:
                    size += len(text.encode())
                    file.write(json.dumps({"text": text}) + "\n")
        best: dict[str, float] = {}
        tokens = set()
        for turn in range(2):  # alternating, so that temporary load on the machine affects both sides
            for name, side in SIDES.items():
                found = side(folder, tokenizer, arguments.workers, turn)
                if found is not None:
                    tokens.add(found[0])
                    best[name] = min(float(found[1]), best.get(name, float("inf")))
        assert len(tokens) == 1, f"the sides disagree: {tokens}"
        return {
            "text_mb": round(size / 1e6),
            "tokens": min(tokens),
            "workers": arguments.workers,
            "seconds": {name: round(seconds, 1) for name, seconds in best.items()},
            "tokens_per_second": {name: round(min(tokens) / seconds) for name, seconds in best.items()},
        }


def _ours(folder: Path, tokenizer: Path, workers: int, turn: int) -> tuple[int, float]:
    tokens, seconds, _ = in_process(_mtjax_preprocess, folder, tokenizer, workers, turn)
    return tokens, seconds


def _mtjax_preprocess(folder: Path, tokenizer: Path, workers: int, turn: int) -> int:
    from mtjax.data.commands import preprocess
    from mtjax.data.corpus.indexed import IndexedDataset

    output = folder / f"ours{turn}"
    options = f"--input {folder}/text.jsonl --output {output} --tokenizer hf:{tokenizer} --append-eod"
    assert preprocess.main([*options.split(), "--workers", str(workers)]) == 0
    return IndexedDataset(f"{output}_text_document").num_tokens


def _theirs(folder: Path, tokenizer: Path, workers: int, turn: int) -> tuple[int, float] | None:
    if not importlib.util.find_spec("datasets"):
        return None
    script = Path(__file__).with_name("data_huggingface.py")
    command = [sys.executable, script, folder / "text.jsonl", tokenizer, folder / f"hf{turn}", workers]
    done = subprocess.run([str(argument) for argument in command], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["tokens"], found["seconds"]


SIDES = {"mtjax": _ours, "datasets.map": _theirs}


# --- Formats


def formats(arguments: argparse.Namespace) -> dict[str, Any]:
    """Preprocesses the same rows as JSON lines and as Parquet, the latter in parts that are merged; bytes are equal."""
    import pyarrow
    from pyarrow import parquet

    from mtjax.data.corpus import default_corpus
    from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe

    with tempfile.TemporaryDirectory() as name:
        folder, rows, size = Path(name), [], 0
        train_byte_level_bpe(default_corpus.documents(), folder / "tokenizer.json")
        schema = pyarrow.schema([("text", pyarrow.string())])
        with (
            (folder / "rows.jsonl").open("w") as lines,
            parquet.ParquetWriter(folder / "rows.parquet", schema) as table,
        ):
            for text in _installed_texts(arguments.megabytes * 1_000_000):
                lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                rows.append({"text": text})
                size += len(text.encode())
                if len(rows) == ROWS_PER_GROUP:
                    table.write_table(pyarrow.Table.from_pylist(rows, schema))
                    rows = []
            table.write_table(pyarrow.Table.from_pylist(rows, schema))
        seconds = {"JSON lines": _timed(_command, folder, "rows.jsonl", "json", arguments.workers)}
        seconds["Parquet, in parts"] = 0.0
        for number in range(1, FORMAT_PARTS + 1):
            part = ("--part", f"{number}/{FORMAT_PARTS}")
            seconds["Parquet, in parts"] += _timed(_command, folder, "rows.parquet", "out", arguments.workers, *part)
        seconds["merging the parts"] = _timed(_merge, folder / "out")
        ends = (".bin", ".idx", ".meta.json")
        one, other = ([Path(f"{folder}/{n}_text_document{e}").read_bytes() for e in ends] for n in ("json", "out"))
        assert one == other, "the formats disagree"
        files = {path: round((folder / path).stat().st_size / 1e6) for path in ("rows.jsonl", "rows.parquet")}
        return {
            "text_mb": round(size / 1e6),
            "text": "sources and documentation of installed Python packages",
            "file_mb": files,
            "tokens_mb": round(len(one[0]) / 1e6),
            "workers": arguments.workers,
            "parts": FORMAT_PARTS,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "seconds_per_gb": {name: round(value / size * 1e9, 1) for name, value in seconds.items()},
            "same_bytes": True,
        }


def _installed_texts(size: int) -> Iterator[str]:
    """Yields files of text of installed packages until they have `size` bytes; from the beginning again if needed."""
    folders = [Path(path) for path in sys.path if path.endswith("-packages")]
    paths = sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".md", ".rst", ".txt", ".pyi", ".h"))
    for path in itertools.cycle(paths):
        text = path.read_text(encoding="utf-8", errors="ignore")
        size -= len(text.encode())
        yield text
        if size <= 0:
            return


def _timed(function: Callable[..., None], *arguments: Any) -> float:
    return in_process(function, *arguments)[1]


def _command(folder: Path, file: str, output: str, workers: int, *more: str) -> None:
    from mtjax.data.commands import preprocess

    options = ["--input", f"{folder}/{file}", "--output", f"{folder}/{output}", "--workers", str(workers)]
    tokenizer = f"hf:{folder}/tokenizer.json"
    assert preprocess.main([*options, "--tokenizer", tokenizer, "--append-eod", *more]) == 0


def _merge(output: Path) -> None:
    from mtjax.data.commands import merge

    assert merge.main(["--parts", str(output)]) == 0


# --- Indices


def indices(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for name, build, samples in (
        ("mtjax", _our_samples, 1_000_000),
        ("plain Python", _plain_samples, 1_000_000),
        ("mtjax", _our_samples, 100_000_000),
    ):
        seconds, _, megabytes = in_process(_index, build, samples)
        rows[f"{name}, {samples:,} samples"] = {**seconds, "memory_mb": round(megabytes)}
    return rows


def _corpus(samples: int) -> np.ndarray:
    """Returns document lengths, 700 tokens on average, for one epoch of `samples` samples of 1,024 tokens."""
    return np.random.RandomState(0).randint(1, 1400, int(samples * 1024 / 700 * 1.01)).astype(np.int32)


def _index(build: Callable[..., None], samples: int) -> dict[str, float]:
    """Builds all three indices, the sample index with `build`; returns wall-clock and CPU seconds."""
    from mtjax.families.gpt.sample_index import document_index, plan_epochs, shuffle_index

    lengths = _corpus(samples)
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), 1024, samples)
    random = np.random.RandomState(1)
    wall, processor = time.perf_counter(), time.process_time()
    documents = document_index(0, len(lengths), plan, random)
    build(lengths, documents, plan.samples)
    shuffle_index(plan, random)
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }


def _our_samples(lengths: np.ndarray, documents: np.ndarray, samples: int) -> None:
    from mtjax.families.gpt.sample_index import sample_index

    with tempfile.TemporaryDirectory() as folder:
        sample_index(lengths, documents, 1024, samples, Path(folder) / "samples.npy")


def _plain_samples(lengths: np.ndarray, documents: np.ndarray, samples: int) -> None:
    rows, document, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        needed = 1025
        while True:
            remaining = int(lengths[documents[document]]) - offset
            needed -= remaining
            if needed <= 0:
                offset += needed + remaining - 1
                break
            document, offset = document + 1, 0
        rows.append((document, offset))


# --- Loading


def loading(arguments: argparse.Namespace) -> dict[str, Any]:
    from mtjax import config as configs
    from mtjax.data import open_dataset, open_loader
    from mtjax.data.batches.batch_schedule import constant

    steps, batch, rows = 300, 16, {}
    for length in (128, 1024):
        for workers in (0, 2):
            config = configs.replace(configs.load("default"), sequence_length=length, num_workers=workers)
            dataset = open_dataset(config, "train", (steps + 20) * batch)
            order = {"rows": np.arange(batch), "start_sample": 0, "schedule": constant(batch)}
            with open_loader(config, dataset, **order) as loader:
                for _ in range(10):
                    next(loader)
                start = time.perf_counter()
                for _ in range(steps):
                    next(loader)
                rate = steps * batch * length / (time.perf_counter() - start)
            rows[f"{length} tokens, {'threads' if workers == 0 else f'{workers} processes'}"] = round(rate)
    return {"tokens_per_second": rows, "batch": batch}


# --- Waiting


def waiting(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the fraction of the default run's step time that is spent waiting for the next batch."""
    from mtjax.commands import train
    from mtjax.data.batches.loader import Loader

    waits: list[tuple[float, float]] = []
    real = Loader.__next__

    def timed(self: Loader) -> Any:
        start = time.perf_counter()
        item = real(self)
        waits.append((start, time.perf_counter() - start))
        return item

    Loader.__next__ = timed
    with tempfile.TemporaryDirectory() as folder:
        code = train.main(["--steps", "100", "--valid-every", "0", "--checkpoint-every", "0", "--out", f"{folder}/run"])
    Loader.__next__ = real
    assert not code, code
    # From the third batch on: while the first step compiles, the second batch is loaded.
    total = waits[-1][0] - waits[2][0]
    waited = sum(wait for _, wait in waits[2:-1])
    return {
        "steps": len(waits) - 3,
        "milliseconds_per_step": round(1e3 * total / (len(waits) - 3), 2),
        "milliseconds_waiting": round(1e3 * waited / (len(waits) - 3), 4),
        "share_waiting": round(waited / total, 5),
    }


PARTS = {"preprocess": preprocessing, "formats": formats, "index": indices, "loader": loading, "wait": waiting}

if __name__ == "__main__":
    sys.exit(main())
