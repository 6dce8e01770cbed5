"""The record beside a file of neighbours: for which samples they were searched, in what, and how."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mtjax.data.neighbours.stored import sealed, unsealed
from mtjax.errors import UserError

FORMAT = 1


def header_path(prefix: str | Path, split: str) -> Path:
    """Returns the path of the record for a split."""
    return Path(f"{prefix}.{split}.json")


def rows_path(prefix: str | Path, split: str) -> Path:
    """Returns the path of the neighbours for a split: integers [samples x chunks, neighbours]."""
    return Path(f"{prefix}.{split}.npy")


def sums_path(prefix: str | Path, split: str) -> Path:
    """Returns the path of the checksums for a split: uint32[samples, 2], of each sample's tokens and neighbours."""
    return Path(f"{prefix}.{split}.samples.npy")


@dataclass(frozen=True)
class SampleSettings:
    """What shapes the samples of a split: chunk u of sample i is the same text for equal settings.

    Attributes:
      retro_chunk: tokens in a chunk.
      sequence_length: tokens in a sample.
      seed: of the order of documents and samples.
      split: shares of training, validation and test; None where the data are given apart.
      add_extra_token_to_sequence: whether a sample reads one token more.
      drop_last_partial_validation_sequence: whether a cut last validation sample is dropped; None in other splits.
      tokenizer: digest of its content.
      texts: of each source its content, documents, first document and weight.
      order: passes over each source, as `samples.order_of` describes them.
      requested: numbers of samples that the order was made for, ascending.
    """

    retro_chunk: int
    sequence_length: int
    seed: int
    split: str | None
    add_extra_token_to_sequence: bool
    drop_last_partial_validation_sequence: bool | None
    tokenizer: str
    texts: list[dict[str, Any]]
    order: Any
    requested: list[int]


@dataclass(frozen=True)
class Header:
    """What a file of neighbours holds.

    Attributes:
      settings: for which samples.
      samples: their number.
      database: of each corpus that was searched its name, content, first document and documents.
      chunks: in the database, of whole corpora.
      neighbours: of each chunk, at most; -1 stands where fewer were found.
      embedder: its name, a digest of its weights and of how it is used, and the files of the embeddings that were
        searched.
      search: kind of index, and which neighbours were dropped.
      format: version.
    """

    settings: SampleSettings
    samples: int
    database: list[dict[str, Any]]
    chunks: int
    neighbours: int
    embedder: dict[str, Any]
    search: dict[str, Any]
    format: int = FORMAT

    def text(self) -> str:
        """Returns the record as JSON."""
        return sealed(asdict(self))

    @property
    def rows(self) -> int:
        """Chunks of all samples."""
        return self.samples * (self.settings.sequence_length // self.settings.retro_chunk)


def read_header(path: Path) -> Header:
    """Reads the record of a file of neighbours.

    Raises:
      UserError: it isn't there or isn't as it was written.
    """
    values = unsealed(path, FORMAT, "mtjax data neighbours", Header)
    values["settings"] = SampleSettings(**values["settings"])
    return Header(**values)


def check_settings(path: Path, made: SampleSettings, run: SampleSettings) -> None:
    """Refuses neighbours of other samples than the run's.

    Raises:
      UserError: names the setting that differs, with both values.
    """
    # Settings that a user can type come first, as the differences that follow come from them.
    simple = [f.name for f in fields(SampleSettings) if f.name not in ("texts", "order", "tokenizer", "requested")]
    for name in simple:
        theirs, ours = getattr(made, name), getattr(run, name)
        if theirs != ours:
            raise UserError(f"{path} was made with {name} {theirs}, and the run has {name} {ours}{_REMEDY}")
    if len(made.texts) != len(run.texts):
        raise UserError(f"{path} was made for a blend of {len(made.texts)} texts, and the run has {len(run.texts)}")
    for number, (theirs, ours) in enumerate(zip(made.texts, run.texts, strict=True)):
        # Not the name: a corpus may have been moved.
        for name in ("weight", "content", "documents", "first"):
            if theirs.get(name) != ours.get(name):
                raise UserError(
                    f"{path} was made for text {number + 1} of the data with {name} {theirs.get(name)}, and the run's, "
                    f"{ours.get('name')}, has {ours.get(name)}{_REMEDY}"
                )
    if made.tokenizer != run.tokenizer:
        ours, theirs = run.tokenizer[:12], made.tokenizer[:12]
        raise UserError(f"{path} was made with the tokenizer {theirs}, and the run has the tokenizer {ours}{_REMEDY}")
    # Last: an order that differs although all settings agree was made for another number of samples.
    if made.order != run.order:
        numbers = [", then ".join(f"{number:,}" for number in each.requested) for each in (made, run)]
        earlier = f" --earlier {' '.join(map(str, run.requested[:-1]))}" if run.requested[1:] else ""
        raise UserError(
            f"{path} was made for the order of {numbers[0]} samples, and the run asks for {numbers[1]}, whose order is "
            f"another: make neighbours for this run with mtjax data neighbours{earlier}"
        )


_REMEDY = ": make neighbours for this run with mtjax data neighbours, or take the settings back"
