"""`mtjax data embed`: an embedding of every chunk of a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.data.corpus.indexed import IndexedDataset, prefix_of
from mtjax.errors import UserError
from mtjax.storage import check_out
from mtjax.waiting import IMPORTS, waiting

DESCRIPTION = """Embeds every chunk of an indexed dataset: the mean of a BERT's last hidden states over its tokens.

Writes float16 [chunks, width] as .npy, and a record .json beside it, for mtjax data neighbours, or for programs of
your own that look for duplicates or choose text. After an interruption, the same command continues.

Examples:
  mtjax data embed --input books_text_document --embedder hf:bert-base-uncased
  mtjax data embed --input books_text_document --embedder runs/my-bert --chunk 128 --mesh 8x1 --rows 512
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax data embed`."""

    input: str
    """Prefix of an indexed dataset: a path without .bin and .idx."""
    embedder: str
    """A BERT: hf:DIR, a run, or other weights that mtjax convert reads."""
    output: Path | None = None
    """A .npy file to write; when not given, INPUT.embeddings.npy."""
    chunk: int = at_least(1, 64, most=WIDTH)
    """Tokens in a chunk, counted from the beginning of each document."""
    tokenizer: str | None = None
    """What made the dataset's token ids, if the dataset does not say."""
    embedder_tokens: int = at_least(3, 256, most=WIDTH)
    """Tokens that the embedder reads of a chunk, with [CLS] and [SEP]; a longer chunk is cut."""
    embedder_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the embedder computes; bfloat16 is faster on GPUs."""
    mesh: str = "1x1"
    """Devices, as DATAxMODEL."""
    rows: int = at_least(1, 128, most=WIDTH)
    """Batch size per data-parallel rank."""
    overwrite: bool = False
    """Replace embeddings of the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_main(lambda: run(read(Options, argv, "mtjax data embed", DESCRIPTION)))


def run(options: Options) -> None:
    """Embeds as the options say.

    Raises:
      UserError: the input or the embedder can't be used, or the output exists.
    """
    from mtjax.data.commands.dataset_summary import tokenizer_of

    corpus = IndexedDataset(prefix_of(options.input))
    tokenizer = tokenizer_of(corpus, options.tokenizer)
    if tokenizer is None:
        raise UserError(f"{corpus.prefix} doesn't say which tokenizer made it: name it with --tokenizer")
    with waiting(IMPORTS):
        from mtjax.retrieval.embedder import Embedder
        from mtjax.retrieval.embeddings import default_path, embed_corpus, record_of
    path = options.output or default_path(corpus.prefix)
    if path.suffix != ".npy":
        raise UserError(f"--output {path} must end in .npy")
    existing = next((each for each in (path, record_of(path)) if each.exists()), None)
    if existing is not None and not options.overwrite:
        raise UserError(f"{existing} exists: name another --output, or replace it with --overwrite")
    check_out(path, "--output")
    embedder = Embedder(
        options.embedder,
        mesh=options.mesh,
        rows=options.rows,
        max_tokens=options.embedder_tokens,
        dtype=options.embedder_dtype,
    )
    header = embed_corpus(corpus, tokenizer, embedder, options.chunk, path)
    print(f"{path}: {header.chunks:,} chunks of {header.chunk} tokens, {header.width} numbers each")
