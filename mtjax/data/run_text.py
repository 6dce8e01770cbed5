"""The text of a run as token ids: prepared once into the cache, with a tokenizer trained on it where none is named."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mtjax.config import Config, Data
from mtjax.data.cache import Cache
from mtjax.data.corpus import default_corpus
from mtjax.data.corpus.documents import Fault, TextFields, parsed, text_of
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.ends import note_without_ends, settings_of_ends
from mtjax.data.corpus.indexed import IndexedDataset, is_indexed
from mtjax.data.corpus.made_with import check_made_with, check_same_maker
from mtjax.data.corpus.meta import read_meta
from mtjax.data.corpus.preprocessing import PreprocessingJob, preprocess
from mtjax.data.corpus.reader import chunks, expand
from mtjax.data.corpus.remote import with_local_copies
from mtjax.data.corpus.source import Source, parse_sources
from mtjax.data.progress import say
from mtjax.data.tokens.identity import content_digest
from mtjax.data.tokens.tokenizer import Tokenizer, end_note, open_tokenizer, path_of
from mtjax.data.tokens.train_tokenizer import DEFAULT_VOCAB_SIZE, train_byte_level_bpe
from mtjax.errors import UserError

FORMAT = 1
TRAINED = "the tokenizer trained on the text"
"""What messages call a tokenizer that was not named."""


def load_tokenizer(config: Config) -> Tokenizer:
    """Opens the tokenizer of a run; see `RunText.tokenizer`."""
    text = RunText(config.data)
    tokenizer = text.tokenizer
    for note in text.notes:
        say(f"note    {note}")
    return tokenizer


class RunText:
    """The text that a run's settings name, with its tokenizer and the cache that keeps what is prepared.

    Args:
      data: the settings.
      tokenizer: the run's, where it has one already; else the settings decide.

    Attributes:
      cache: where prepared data are cached.
      data: the settings, with copies in the cache instead of corpora in object stores.
      notes: what could not be compared when the tokenizer that the settings name was opened, for the user.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer | None = None) -> None:
        self.cache = Cache.of(data)
        # First of all: everything else maps local files.
        self.data = with_local_copies(data, self.cache)
        self.notes: list[str] = []
        self._given = tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's, else the one that the settings or the corpora name, else a byte-level BPE trained on the text.

        Raises:
          UserError: it can't be read, the data are token ids already and don't say what made them, or they were made
            with another one.
        """
        if self._given is not None:
            return self._given
        tokenizer = open_tokenizer(self.name or f"hf:{self._trained_tokenizer()}", self.data.eod_token)
        # A corpus may have been made with --eod-token, which its tokenizer's files don't say.
        if self.data.tokenizer is None and self.name is not None and self.data.eod_token is None:
            tokenizer = self._with_recorded_end(tokenizer)
        several = end_note(tokenizer)
        self.notes = [*([several] if several else []), *self.check_corpora(self.name or TRAINED, tokenizer)]
        return tokenizer

    def _with_recorded_end(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the end of document that the corpora of token ids have, by their records."""
        metas = [read_meta(source.paths[0]) for source in self._indexed_sources()]
        ends = {meta.eod for meta in metas if meta is not None and meta.eod is not None}
        if len(ends) != 1 or tokenizer.eod in ends:
            return tokenizer
        return tokenizer.with_eod(tokenizer.token(ends.pop()))

    @cached_property
    def name(self) -> str | None:
        """What the settings, or else the records of the corpora, call the tokenizer; None when one is to be trained.

        Raises:
          UserError: the data are token ids already and don't say what made them, or were made with different ones.
        """
        return self.data.tokenizer or self._tokenizer_of_indexed()

    def check_corpora(self, name: str, tokenizer: Tokenizer) -> list[str]:
        """Checks that all corpora of token ids were made with this tokenizer, and have the ends that settings look for.

        Args:
          name: what the tokenizer is called, for messages.
          tokenizer: the run's.

        Returns:
          What could not be compared, and settings without an effect, for the user.

        Raises:
          UserError: one was made with another tokenizer.
        """
        indexed = self._indexed_sources()
        notes = [check_made_with(s.name, read_meta(s.paths[0]), name, tokenizer) for s in indexed]
        if options := settings_of_ends(self.data):
            notes += [note_without_ends(IndexedDataset(s.paths[0]), tokenizer, options) for s in indexed]
        return [note for note in notes if note]

    def indexed(self, source: Source, options: EncodeOptions) -> IndexedDataset:
        """Opens a source as an indexed dataset, which is first written into the cache when the source is text.

        Raises:
          UserError: the text can't be read.
        """
        if _is_indexed(source):
            return IndexedDataset(source.paths[0])
        key, is_named = self._text_fields.keys[0], self._text_fields.named
        options = replace(options, keys=(key,), parse_special=self.data.parse_special)
        identity = {
            "text": self._identity(source),
            "tokenizer": content_digest(self.tokenizer),
            # Not part of the digest, which is of the vocabulary and of how text is cut.
            "eod": self.tokenizer.eod,
            "options": asdict(options),
            "format": FORMAT,
        }

        def build(folder: Path) -> None:
            say(f"preparing {source.name} (once; kept in {self.cache.root})")
            paths = _text_files(source, folder)
            task = f"tokenizing {source.name}"
            preprocess(
                PreprocessingJob(paths, {key: folder / "data"}, self.tokenizer, options, keys_named=is_named, task=task)
            )
            if not source.paths:
                Path(paths[0]).unlink()

        return IndexedDataset(self.cache.folder("tokens", identity, build) / "data")

    @property
    def _text_fields(self) -> TextFields:
        key = self.data.text_key
        return TextFields() if key is None else TextFields((key,), named=True)

    def _sources(self) -> list[Source]:
        """Returns the sources of all splits; the default corpus when none is named."""
        data = self.data
        # All splits: a tokenizer must be the same for all of them, and one that is trained sees the validation text,
        # too.
        named = [text for text in (data.data, data.train_data, data.valid_data, data.test_data) if text]
        return [source for text in named or [""] for source in parse_sources(text)]

    def _tokenizer_of_indexed(self) -> str | None:
        """Returns the name of the tokenizer that made the run's token ids, None when the run reads text.

        Raises:
          UserError: the token ids don't say, or were made with different ones.
        """
        recorded = [(source.name, read_meta(source.paths[0])) for source in self._indexed_sources()]
        if not recorded:
            return None
        known = [(name, meta) for name, meta in recorded if meta is not None and meta.tokenizer is not None]
        if len(known) < len(recorded):
            silent = next(name for name, meta in recorded if meta is None or meta.tokenizer is None)
            raise UserError(
                f"the data are token ids already, and {silent} doesn't say with which tokenizer: name it with "
                "--tokenizer"
            )
        if doubt := check_same_maker(known):
            raise UserError(f"{doubt}; name the tokenizer of all of them with --tokenizer")
        names = [str(meta.tokenizer) for _, meta in known]
        there = next((name for name in names if path_of(name).exists()), None)
        if there is None:
            raise UserError(
                f"the tokenizer {names[0]}, with which {known[0][0]} was made, does not exist: name where it is now "
                "with --tokenizer"
            )
        return there

    def _indexed_sources(self) -> list[Source]:
        return [source for source in self._sources() if _is_indexed(source)]

    def _trained_tokenizer(self) -> Path:
        sources = self._sources()

        def build(folder: Path) -> None:
            say(f"training a tokenizer on {sources[0].name} (once; kept in {self.cache.root})")
            train_byte_level_bpe(_texts(sources, self._text_fields), folder / "tokenizer.json")

        return self.cache.folder("tokenizer", self._trained_identity(), build) / "tokenizer.json"

    def _trained_identity(self) -> dict[str, Any]:
        texts = [self._identity(source) for source in self._sources()]
        # Only where it is given, so that caches of earlier versions keep their names.
        key = {"key": self.data.text_key} if self.data.text_key else {}
        return {"bpe": texts, "vocab_size": DEFAULT_VOCAB_SIZE, "format": FORMAT, **key}

    def file_digests(self, source: Source) -> list[str]:
        """Digests of the text files of a source, whatever their names; none of token ids, and of the default corpus."""
        if not source.paths or _is_indexed(source):
            return []
        return [self._file_digest(path) for path in expand(source.paths)]

    def _identity(self, source: Source) -> Any:
        """Returns file endings and content hashes of a source's text; addresses of files that are not local."""
        if not source.paths:
            return default_corpus.identity()
        # The endings decide how a file is read.
        return [[Path(path).suffixes, self._file_digest(path)] for path in expand(source.paths)]

    def _file_digest(self, path: str) -> str:
        return path if "://" in path else self.cache.file_digest(Path(path))


def _is_indexed(source: Source) -> bool:
    return bool(source.paths) and is_indexed(source.paths[0])


def _text_files(source: Source, folder: Path) -> list[str]:
    """Returns the files of a source; the default corpus is first written as one."""
    if source.paths:
        return expand(source.paths)
    path = folder / "corpus.jsonl"
    default_corpus.write(path)
    return [str(path)]


def _texts(sources: Sequence[Source], fields: TextFields) -> Iterator[str]:
    """Yields the texts of all sources.

    Raises:
      UserError: one can't be used; the message has its file and line.
    """
    for source in sources:
        if not source.paths:
            yield from default_corpus.documents()
            continue
        for chunk in chunks(expand(source.paths), None, fields):
            texts = parsed(chunk, lambda document, chunk=chunk: text_of(document, chunk.is_json, fields.keys))
            for line, text in texts:
                if isinstance(text, Fault):
                    raise UserError(f"{chunk.where(line)}: {text.message}")
                yield from text[fields.keys[0]]
