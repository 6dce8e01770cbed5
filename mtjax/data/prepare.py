"""Prepares what a run reads, once, into the cache: trained tokenizers, and token ids of text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtjax.config import Config
from mtjax.data.cache import cache_root, cached_folder, file_digest
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.indexed import is_indexed
from mtjax.data.corpus.meta import read_meta
from mtjax.data.corpus.preprocessing import Job, preprocess
from mtjax.data.corpus.reader import chunks, expand, text_of
from mtjax.data.corpus.source import Source, parse_sources
from mtjax.data.progress import say
from mtjax.data.tokens.tokenizer import Tokenizer, digest_of, open_tokenizer
from mtjax.data.tokens.train_tokenizer import DEFAULT_VOCAB_SIZE, train_byte_level_bpe
from mtjax.errors import UserError

FORMAT = 1


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run: the one that `tokenizer` names, else a byte-level BPE trained on the run's text.

    Raises:
      UserError: it can't be read, or the data are token ids already and don't say what made them.
    """
    name = config.data.tokenizer or _tokenizer_of_indexed(config)
    return open_tokenizer(name) if name else open_tokenizer(f"hf:{_trained_tokenizer(config)}")


def prepared(config: Config, source: Source, tokenizer: Tokenizer, options: EncodeOptions) -> Path:
    """The prefix of a source's indexed dataset, made into the cache when the source is text.

    Raises:
      UserError: the text can't be read.
    """
    if source.paths and is_indexed(source.paths[0]):
        return Path(source.paths[0])
    root = cache_root(config)
    identity = {
        "text": _text_identity(source, root),
        "tokenizer": digest_of(config.data.tokenizer) if config.data.tokenizer else _trained_identity(config),
        "options": asdict(options),
        "format": FORMAT,
    }

    def build(folder: Path) -> None:
        say(f"preparing {source.name} (once; kept in {root})")
        paths = _text_files(source, folder)
        preprocess(Job(paths, {"text": folder / "data"}, tokenizer, options, task=f"tokenizing {source.name}"))
        if not source.paths:
            Path(paths[0]).unlink()

    return cached_folder(root, "tokens", identity, build) / "data"


def sources_of(config: Config) -> list[Source]:
    """All sources of a run whatever their split; the default corpus when none is named."""
    data = config.data
    named = [text for text in (data.data, data.train_data, data.valid_data, data.test_data) if text]
    return [source for text in named or [""] for source in parse_sources(text)]


def _tokenizer_of_indexed(config: Config) -> str | None:
    """The tokenizer that made the run's token ids, None when the run reads text.

    Raises:
      UserError: the token ids don't say, or don't agree.
    """
    indexed = [source for source in sources_of(config) if source.paths and is_indexed(source.paths[0])]
    if not indexed:
        return None
    names = {meta.tokenizer if (meta := read_meta(source.paths[0])) else None for source in indexed}
    name = names.pop()
    if names or name is None:
        why = "were made with different tokenizers" if names else f"{indexed[0].name} doesn't say with which tokenizer"
        raise UserError(f"the data are token ids already, and {why}: name it with --tokenizer")
    return name


def _text_files(source: Source, folder: Path) -> list[str]:
    """The files of a source; the default corpus is first written as one."""
    if source.paths:
        return expand(source.paths)
    path = folder / "corpus.jsonl"
    corpus.write(path)
    return [str(path)]


def _text_identity(source: Source, root: Path) -> Any:
    if not source.paths:
        return corpus.identity()
    files_found = expand(source.paths)
    return [[Path(path).suffixes, file_digest(Path(path), root) if "://" not in path else path] for path in files_found]


def _trained_identity(config: Config) -> dict[str, Any]:
    root = cache_root(config)
    texts = [_text_identity(source, root) for source in sources_of(config)]
    return {"bpe": texts, "vocab_size": DEFAULT_VOCAB_SIZE, "format": FORMAT}


def _trained_tokenizer(config: Config) -> Path:
    sources = sources_of(config)

    def build(folder: Path) -> None:
        say(f"training a tokenizer on {sources[0].name} (once; kept in {cache_root(config)})")
        train_byte_level_bpe(_texts(sources), folder / "tokenizer.json")

    return cached_folder(cache_root(config), "tokenizer", _trained_identity(config), build) / "tokenizer.json"


def _texts(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if not source.paths:
            yield from corpus.documents()
            continue
        for chunk in chunks(expand(source.paths)):
            for document in chunk.documents:
                if document.strip():
                    yield _text(document, chunk.is_json, chunk.path)


def _text(document: bytes, is_json: bool, path: str) -> str:
    try:
        return text_of(document, is_json, ("text",))["text"]
    except ValueError as e:
        raise UserError(f"{path}: a document can't be used: {e}") from e
