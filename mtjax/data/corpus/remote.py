"""Corpora in object stores: copied once into the cache, where they are read and memory-mapped like any other."""

import dataclasses
from pathlib import Path
from typing import Any

from mtjax.config import Data
from mtjax.data.cache import Cache
from mtjax.data.corpus.folders import files_in
from mtjax.data.corpus.words import Word, split_words
from mtjax.data.progress import BytesProgress, say
from mtjax.errors import UserError
from mtjax.storage import attempt, blocks_of, files_below, filesystem, is_file, read_bytes, url_of


def with_local_copies(data: Data, cache: Cache) -> Data:
    """Returns the data settings with a path in the cache instead of each address in a store.

    A copy is known by the store's mark of its content (ETag), so what was changed there is copied again.

    Raises:
      UserError: the store can't be reached, or has no such corpus; a library is missing.
    """
    names = ("data", "train_data", "valid_data", "test_data")
    given = {name: getattr(data, name) for name in names}
    remote = {name: text for name, text in given.items() if text and ("s3://" in text or "gs://" in text)}
    local = {name: " ".join(_word(word, cache) for word in split_words(text)) for name, text in remote.items()}
    return dataclasses.replace(data, **local)


def _word(word: Word, cache: Cache) -> str:
    """Returns one dataset, an indexed prefix or text files, with local paths."""
    pieces = [_copies(url, cache) if (url := url_of(piece)) else [piece] for piece in word.pieces]
    return Word(tuple(path for paths in pieces for path in paths)).quoted()


def _copies(url: str, cache: Cache) -> list[str]:
    fs = filesystem(url)
    prefix = url.removesuffix(".bin").removesuffix(".idx")
    if is_file(f"{prefix}.idx") and is_file(f"{prefix}.bin"):
        meta = f"{prefix}.meta.json"
        record = [meta] if is_file(meta) else []
        folder = _copy(fs, [f"{prefix}.idx", f"{prefix}.bin", *record], cache)
        return [str(folder / Path(prefix).name)]
    if any(c in url for c in "*?["):
        found = attempt(f"listing {url}", lambda: sorted(fs.glob(url)))
    elif is_file(url):
        found = [url]
    else:
        found = [f"{url}/{name}" for name in _in_folder(url)]
    if not found:
        raise UserError(f"{url} does not exist, neither as a file nor as a prefix of .bin and .idx")
    urls = [path if url_of(path) else fs.unstrip_protocol(path) for path in found]
    # Each file has a copy of its own: one that changes in the store does not copy the others again.
    return [str(_copy(fs, [path], cache) / Path(path).name) for path in urls]


def _in_folder(url: str) -> list[str]:
    names = [path.removeprefix(f"{url}/") for path in files_below(url)]
    return files_in(url, names, lambda name: read_bytes(f"{url}/{name}")) if names else []


def _copy(fs: Any, paths: list[str], cache: Cache) -> Path:
    infos = [attempt(f"reading {path}", lambda path=path: fs.info(path)) for path in paths]
    marks = [[info["name"], info["size"], str(info.get("ETag") or info.get("etag"))] for info in infos]
    total = sum(info["size"] for info in infos)

    def build(folder: Path) -> None:
        say(f"copying {paths[0]} (once; kept in {cache.root})")
        done = 0
        with BytesProgress(f"copying {Path(paths[0]).name}", total) as progress:
            for path, info in zip(paths, infos, strict=True):
                with (folder / Path(path).name).open("wb") as file:
                    for block in blocks_of(path, info["size"]):
                        file.write(block)
                        done += len(block)
                        progress.update(done, done)

    return cache.folder("remote", {"files": marks}, build)
