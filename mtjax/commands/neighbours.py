"""`mtjax data neighbours`: the nearest chunks of each chunk of a run's samples, or of a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtjax import cli
from mtjax.config import Config
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.errors import UserError, listed
from mtjax.retrieval.kind import EXACT, SAMPLE, IndexKind
from mtjax.storage import check_out
from mtjax.waiting import IMPORTS, waiting

if TYPE_CHECKING:
    from mtjax.data.corpus.indexed import IndexedDataset
    from mtjax.retrieval.embeddings import Embeddings

DESCRIPTION = """Finds the nearest chunks of a run's training text for every chunk of its samples, as Retro reads them.

It takes the options of `mtjax train`, and writes files that a run of the same data reads. Chunks of documents that
a sample reads are not its neighbours. The training text must be embedded first, with mtjax data embed. With
--queries, it finds the neighbours of a corpus instead, and writes their numbers and distances. After an interruption,
the same command continues.

Examples:
  mtjax data neighbours --config retro.toml --embedder hf:bert-base-uncased --output neighbours/books
  mtjax data neighbours --config retro.toml --embedder hf:bert-base-uncased --output clean --without-overlap 13
  mtjax data neighbours --queries new.embeddings.npy --embeddings old.embeddings.npy --output near.npy --nearest 1
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax data neighbours`."""

    output: Path | None = None
    """Prefix of the files to write, OUTPUT.train.npy, OUTPUT.train.json and so on; when not given, --neighbours. With
    --queries, a .npy file."""
    embedder: str | None = None
    """The BERT that embedded the training text: hf:DIR, a run, or other weights that mtjax convert reads."""
    embeddings: tuple[Path, ...] = ()
    """Embeddings of the texts that are searched, .npy files; when not given, the PREFIX.embeddings.npy of each."""
    queries: Path | None = None
    """Embeddings of a corpus, the neighbours of whose chunks are wanted."""
    of: Literal["train", "valid", "both"] = "both"
    """Of which samples of the run."""
    earlier: tuple[int, ...] = ()
    """Training samples that the run asked for before it was made longer, if it was: their order stays."""
    nearest: int = at_least(1, 20, most=1000)
    """Neighbours of each chunk."""
    without_overlap: int = at_least(0, 0, most=WIDTH)
    """Drop neighbours that have this many tokens in a row in common with the next chunk, which the model predicts;
    0 drops none. Of a neighbour, --retro-retrieved-chunks are compared."""
    index: str = EXACT
    """exact, or the factory string of an index of faiss, such as IVF65536_HNSW8,PQ32."""
    index_sample: int = at_least(1, SAMPLE)
    """Most vectors on which an index of faiss is trained."""
    nprobe: int | None = at_least(1, None)
    """Cells that a query visits in an index of faiss with IVF; faiss' default is 1."""
    embedder_tokens: int = at_least(3, 256, most=WIDTH)
    """Tokens that the embedder reads of a chunk, as in mtjax data embed."""
    embedder_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the embedder computes, as in mtjax data embed."""
    search_mesh: str = "1x1"
    """Devices of embedder and search, as DATAxMODEL."""
    search_rows: int = at_least(1, 128, most=WIDTH)
    """Batch size of the embedder per data-parallel rank."""
    overwrite: bool = False
    """Replace neighbours of the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def body() -> None:
        command = cli.parse(argv, "mtjax data neighbours", DESCRIPTION, Options)
        run(command.config, command.options)

    return cli.run_main(body)


def run(config: Config, options: Options) -> None:
    """Searches as the options say.

    Raises:
      UserError: options, embeddings, embedder or data can't be used, or the output exists.
    """
    # A run's own setting names the files that it will read.
    output = options.output or (Path(config.data.neighbours) if config.data.neighbours else None)
    if output is None:
        raise UserError("--output is missing: the prefix of the files to write")
    if options.index == EXACT and options.nprobe is not None:
        raise UserError(f"--nprobe {options.nprobe} is for an index of faiss: remove it, or name one with --index")
    if options.queries is not None:
        _of_corpus(options, output, options.queries)
    elif options.embedder is None:
        raise UserError("--embedder is missing: the one that embedded the training text")
    else:
        _of_run(config, options, output, options.embedder)


def _of_corpus(options: Options, output: Path, queries: Path) -> None:
    if output.suffix != ".npy":
        raise UserError(f"--output {output} must end in .npy with --queries")
    _refuse_existing([output, output.with_suffix(".distances.npy")], options)
    if not options.embeddings:
        raise UserError("--embeddings is missing: the chunks among which --queries has neighbours")
    if options.without_overlap:
        raise UserError(f"--without-overlap {options.without_overlap} is for samples of a run: remove it, or --queries")
    with waiting(IMPORTS):
        from mtjax.layout.mesh import parse_mesh
        from mtjax.retrieval.database import open_database
        from mtjax.retrieval.embeddings import Embeddings, check_together
        from mtjax.retrieval.search import NeighbourRules, of_corpus
    asked, found = Embeddings.open(queries), [Embeddings.open(path) for path in options.embeddings]
    check_together([asked, *found])
    by_content: dict[str, Embeddings] = {}
    for each in found:
        # Files are told apart by their text, not by their names: a copy of a corpus would be its own nearest neighbour.
        if (first := by_content.setdefault(each.header.content, each)) is not each:
            raise UserError(
                f"--embeddings {first.path} and {each.path} are of the same text, and each chunk would find itself in "
                "the other: remove one"
            )
    corpora = [each.corpus() for each in found]
    bounds = [(0, len(corpus)) for corpus in corpora]
    described: list[dict[str, Any]] = [{"name": str(each.prefix), "content": each.content()} for each in corpora]
    _make_folder(output)
    kind = _kind(options)
    database = open_database(kind, parse_mesh(options.search_mesh).size, found, corpora, bounds, described)
    of_corpus(asked.corpus(), asked, database, NeighbourRules(options.nearest), output, kind.text())
    print(
        f"{output}: {options.nearest} neighbours of {asked.header.chunks:,} chunks, {len(database.vectors):,} "
        "were searched"
    )


def _of_run(config: Config, options: Options, output: Path, name: str) -> None:
    with waiting(IMPORTS):
        from mtjax.data.datasets import open_samples
        from mtjax.data.neighbours.header import header_path, rows_path, sums_path
        from mtjax.data.neighbours.samples import orders_of, settings_of, training_text
        from mtjax.data.samples.order import SampleOrder
        from mtjax.data.samples.split import Split
        from mtjax.data.split_opener import SplitOpener
        from mtjax.data.tokens.identity import content_digest
        from mtjax.layout.mesh import parse_mesh
        from mtjax.retrieval.database import open_database
        from mtjax.retrieval.embedder import Embedder
        from mtjax.retrieval.search import NeighbourRules, QuerySamples, of_samples
    orders: dict[Split, SampleOrder] = {
        split: order for split, order in orders_of(config, options.earlier).items() if options.of in (split, "both")
    }
    written = (rows_path, sums_path, header_path)
    _refuse_existing([path(output, split) for split in orders for path in written], options)
    opener = SplitOpener(config, "train", None)
    tokenizer, training = opener.text.tokenizer, training_text(opener)
    splits = {}
    for split, order in orders.items():
        each = opener if split == "train" else SplitOpener(config, split, tokenizer)
        dataset = open_samples(each, order)
        splits[split] = dataset, settings_of(config, each, dataset, order, config.model.retro_chunk), order.counts[-1]
    found = _embeddings(options, training.corpora, config.model.retro_chunk)
    for each in found:
        if each.header.tokenizer != content_digest(tokenizer):
            raise UserError(
                f"{each.path} was made with another tokenizer than the run's: make it anew with mtjax data embed"
            )
    embedder = Embedder(
        name,
        mesh=options.search_mesh,
        rows=options.search_rows,
        max_tokens=options.embedder_tokens,
        dtype=options.embedder_dtype,
    )
    if embedder.fingerprint != found[0].header.fingerprint:
        raise UserError(
            f"{found[0].path} was made by {found[0].header.embedder} with other weights, tokenizer, --embedder-tokens "
            f"or --embedder-dtype than {name}, {options.embedder_tokens} and {options.embedder_dtype}: take the same"
        )
    _make_folder(output)
    kind, devices = _kind(options), parse_mesh(options.search_mesh).size
    database = open_database(kind, devices, found, training.corpora, training.bounds, training.described())
    rules = NeighbourRules(options.nearest, options.without_overlap, config.model.retro_retrieved_chunks)
    for split, (dataset, settings, samples) in splits.items():
        asking = QuerySamples(dataset, samples, split, settings, tokenizer, embedder)
        header, counts = of_samples(asking, database, rules, output, kind.text())
        few = f", {counts[:-1].sum():,} of them fewer" if counts[:-1].any() else ""
        print(
            f"{rows_path(output, split)}: {rules.neighbours} neighbours of {header.rows:,} chunks{few}; "
            f"{len(database.vectors):,} were searched"
        )


def _kind(options: Options) -> IndexKind:
    return IndexKind(options.index, options.index_sample, options.nprobe)


def _embeddings(options: Options, corpora: "Sequence[IndexedDataset]", chunk: int) -> "list[Embeddings]":
    """Returns the embeddings of each corpus of a run.

    Raises:
      UserError: those of one are missing, or were made with another chunk.
    """
    from mtjax.retrieval.embeddings import Embeddings, check_together, default_path

    given = [Embeddings.open(path) for path in options.embeddings or [default_path(c.prefix) for c in corpora]]
    by_content = {each.header.content: each for each in given}
    missing = next((corpus for corpus in corpora if corpus.content() not in by_content), None)
    if missing is not None:
        names = listed([str(each.path) for each in given])
        raise UserError(f"{names} holds no embeddings of {missing.prefix} as it is: make them with mtjax data embed")
    found = [by_content[corpus.content()] for corpus in corpora]
    check_together(found)
    if found[0].header.chunk != chunk:
        raise UserError(
            f"{found[0].path} was made with --chunk {found[0].header.chunk}, and retro_chunk is {chunk}: take the same"
        )
    return found


def _make_folder(output: Path) -> None:
    """Makes the folder of the output, once all options are known to fit, and before anything is computed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    check_out(output, "--output")


def _refuse_existing(paths: Sequence[Path], options: Options) -> None:
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not options.overwrite:
        raise UserError(f"{existing} exists: name another --output, or replace it with --overwrite")
