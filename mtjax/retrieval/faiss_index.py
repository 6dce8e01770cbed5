"""Approximate search with an index of faiss, named by its factory string; the extra `faiss`."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.cache import digest
from mtjax.data.progress import BytesProgress, say
from mtjax.errors import UserError, first_line, require
from mtjax.retrieval.vectors import Vectors

BLOCK = 1 << 16
SEED = 0


class FaissIndex:
    """An index that faiss builds: trained on a sample of the vectors, which are then added in blocks.

    Args:
      vectors: what is searched.
      factory: faiss' name of the index, such as IVF65536_HNSW8,PQ32.
      sample: vectors on which it is trained, at most.
      nprobe: cells of an IVF that a query visits; 1, faiss' own default, when None.
      saved: a file that keeps the complete index, and from which the same one is read; nowhere when None.
      identity: what the vectors are, for that file.

    Raises:
      UserError: faiss is not installed, knows no such index, or can't train it on so few vectors.
    """

    def __init__(
        self,
        vectors: Vectors,
        factory: str,
        *,
        sample: int = 1 << 20,
        nprobe: int | None = None,
        saved: Path | None = None,
        identity: Any = None,
    ) -> None:
        self._faiss, self._vectors, self._factory = require("faiss", "faiss"), vectors, factory
        name = digest({"of": identity, "factory": factory, "sample": sample, "size": len(vectors)})
        path = None if saved is None else saved.with_name(f"{saved.name}.{name}.faiss")
        # Vectors of chunks without text: faiss can't exclude them from its index, so `search` drops them.
        zeros = [first + np.flatnonzero(~block.any(axis=1)) for first, block in vectors.blocks(BLOCK)]
        self._zeros = np.concatenate([np.empty(0, np.int64), *zeros])
        index = self._read(path)
        self._index = self._build(sample, path) if index is None else index
        if nprobe is not None:
            self._set_nprobe(nprobe)

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `vectors.Index.search`; the distances are those of the index."""
        # More than `count`, so that enough are left without the vectors of zeros. If there are many of these, twice as
        # many have to do: most of them are not near a query that has text.
        wanted = min(count + len(self._zeros), len(self)) if len(self._zeros) < count else min(2 * count, len(self))
        distances, rows = self._index.search(np.ascontiguousarray(queries, np.float32), wanted)
        distances = np.where((rows < 0) | np.isin(rows, self._zeros), np.inf, distances).astype(np.float32)
        order = np.argsort(distances, axis=1, kind="stable")[:, :count]
        rows, distances = (np.take_along_axis(each, order, axis=1) for each in (rows, distances))
        missing = ((0, 0), (0, count - rows.shape[1]))
        rows = np.pad(np.where(np.isinf(distances), -1, rows), missing, constant_values=-1)
        return rows.astype(np.int64), np.pad(distances, missing, constant_values=np.inf)

    def _read(self, path: Path | None) -> Any:
        if path is None or not path.is_file():
            return None
        try:
            index = self._faiss.read_index(str(path))
        except RuntimeError:
            return None
        return index if index.ntotal == len(self._vectors) else None

    def _build(self, sample: int, path: Path | None) -> Any:
        try:
            index = self._faiss.index_factory(self._vectors.width, self._factory, self._faiss.METRIC_L2)
        except RuntimeError as e:
            raise UserError(
                f"--index {self._factory} is exact or an index that faiss knows, for {self._vectors.width} numbers: "
                f"{_reason(e)}"
            ) from e
        # A fixed seed: the same vectors give the same index.
        chosen = np.random.default_rng(SEED).permutation(len(self._vectors))[:sample]
        say(f"training {self._factory} on {len(chosen):,} of {len(self._vectors):,} vectors")
        try:
            # Sorted, so that the memory-mapped file is read from front to back.
            index.train(self._vectors.take(np.sort(chosen)).astype(np.float32))
        except RuntimeError as e:
            raise UserError(
                f"--index {self._factory} can't be trained on {len(chosen):,} vectors ({_reason(e)}): take fewer cells"
            ) from e
        with BytesProgress(f"filling {self._factory}", len(self._vectors)) as progress:
            for first, block in self._vectors.blocks(BLOCK):
                index.add(block.astype(np.float32))
                progress.update(first + len(block))
        if path is not None:
            self._keep(index, path)
        return index

    def _keep(self, index: Any, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.new")
        try:
            self._faiss.write_index(index, str(temporary))
            temporary.replace(path)
        except (RuntimeError, OSError) as e:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            reason = _reason(e) if isinstance(e, RuntimeError) else e.strerror or e
            say(f"{path} can't be written ({reason}): the next search builds the index again")

    def _set_nprobe(self, nprobe: int) -> None:
        try:
            # Also through transformations in front of it, such as OPQ.
            self._faiss.extract_index_ivf(self._index).nprobe = nprobe
        except RuntimeError as e:
            raise UserError(
                f"--nprobe {nprobe} is for indices with IVF in their name, and --index is {self._factory}: remove it"
            ) from e


def _reason(error: RuntimeError) -> str:
    """Returns the sentence in faiss' message, after the place in its source."""
    return first_line(error).rpartition("Error: ")[2]
