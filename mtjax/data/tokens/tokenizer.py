"""Tokenizers behind one interface: text in, ids out, an end-of-document id, and the special ids of BERT and T5.

`KIND:PATH` names one: `hf:PATH` (a tokenizer.json, or a Hugging Face folder), `gpt2:DIR` (encoder.json + vocab.bpe, or
vocab.json + merges.txt), `bert:vocab.txt`, `sentencepiece:FILE`. A bare path is recognised by what it is.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken, Encoding, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFace

from mtjax.data.tokens.characters import whole_characters
from mtjax.data.tokens.pretrained_settings import (
    CONFIG,
    class_of,
    files_read,
    is_pretrained,
    read_object,
    special_names_in,
)
from mtjax.data.tokens.pretrained_tokenizer import build_pretrained
from mtjax.data.tokens.word_cache import word_cache
from mtjax.errors import UserError, nearest

KINDS = ("gpt2", "bert", "hf", "sentencepiece")
TOKENIZER_JSON, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
"""What a run's tokenizer is saved as."""
END_OF_DOCUMENT = "<|endoftext|>"
CORES_LIKE_A_CACHE = 2  # looking up is as fast as two and a half cores that merge
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "[EOS]")


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added at either end; a special token's name in it is plain text."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of `text` as a model is given it, with what the tokenizer adds: Llama's `<s>`, T5's `</s>`."""
        ...

    def encode_marked(self, text: str) -> list[int]:
        """Ids of `text` in which the names of special tokens stand for them; nothing added."""
        ...

    def encode_offsets(self, text: str, *, marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes `text` like `encode_marked` if it is `marked`, else like `encode_prompt`.

        Returns:
          The ids, and for each of them the characters of `text` that it stands for, from which to which; the two are
          equal for what the tokenizer adds.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, over all cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown by their names."""
        ...

    def token(self, index: int) -> str:
        """How the vocabulary writes one id."""
        ...

    def special(self, name: str) -> int | None:
        """Id of a special token such as `[MASK]`, None when the vocabulary has none of that name."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into `folder`, so that a run carries its own."""
        ...


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
      tokenizer: of the library.
      source: where it is from, for messages.
      eos: the end-of-sequence token in its settings, which ends documents where it has none of `END_NAMES`.
    """

    def __init__(self, tokenizer: HuggingFace, source: str, eos: str | None = None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text: nobody ends a document from inside
        self._tokenizer = tokenizer
        self._eod = _end_of_document(tokenizer, source, eos)
        self._cache = word_cache(tokenizer)
        self._vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._eod

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        with whole_characters(text):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of `text`, with what the tokenizer's post-processor adds."""
        with whole_characters(text):
            return self._tokenizer.encode(text).ids

    def encode_marked(self, text: str) -> list[int]:
        """Ids of `text`, in which names of special tokens are these."""
        return self._encode(text, marked=True).ids

    def encode_offsets(self, text: str, *, marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and the characters that each of them stands for."""
        encoding = self._encode(text, marked=marked)
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, *, marked: bool) -> Encoding:
        self._tokenizer.encode_special_tokens = not marked
        try:
            with whole_characters(text):
                return self._tokenizer.encode(text, add_special_tokens=not marked)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text: by looking words up where this process has few cores to itself, else over all cores."""
        with whole_characters(*texts):
            if self._cache is not None and _cores() <= CORES_LIKE_A_CACHE:
                return self._cache.encode_batch(texts)
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, nothing added, and of each id the characters from which to which it stands for."""
        with whole_characters(*texts):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token(self, index: int) -> str:
        """How the vocabulary writes one id."""
        return self._tokenizer.id_to_token(int(index)) or f"<{index}>"

    def special(self, name: str) -> int | None:
        """Id of the special token `name`, or None."""
        return self._tokenizer.token_to_id(name)

    def save(self, folder: Path) -> None:
        """Writes the model into `folder`."""
        temporary = folder / ".tokenizer.json.tmp"
        temporary.write_text(self._tokenizer.to_str(), encoding="utf-8")
        temporary.replace(folder / TOKENIZER_JSON)

    def __getstate__(self) -> tuple[str, str]:
        return self._tokenizer.to_str(), self.token(self._eod)

    def __setstate__(self, state: tuple[str, str]) -> None:
        tokenizer, eos = state
        self.__init__(HuggingFace.from_str(tokenizer), "a worker's tokenizer", eos)


def _cores() -> int:
    """Cores that the library would use here; worker processes switch them off."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0") else os.cpu_count() or 1


def _end_of_document(tokenizer: HuggingFace, source: str, eos: str | None) -> int:
    for name in (*END_NAMES, *([] if eos is None else [eos])):
        index = tokenizer.token_to_id(name)
        if index is not None:
            return index
    raise UserError(f"the tokenizer {source} has no end-of-document token; the names known are {', '.join(END_NAMES)}")


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `KIND:PATH` or a bare path names.

    Raises:
      UserError: no such kind or file, or the file isn't what its kind says.
    """
    kind, path = _resolve(name)
    openers = {"gpt2": _gpt2, "bert": _bert, "hf": _hugging_face, "sentencepiece": _sentencepiece}
    try:
        return openers[kind](path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise UserError(f"the tokenizer {name} can't be read: {reason}") from e


def files(name: str) -> list[Path]:
    """The files that a tokenizer's name stands for: its identity is their content."""
    kind, path = _resolve(name)
    if path.is_dir() and (path / TOKENIZER_JSON).is_file() and not (path / "encoder.json").is_file():
        return [path / TOKENIZER_JSON]
    if path.is_dir() and (kind == "hf" or _is_pretrained_gpt2(path)):
        return files_read(path)
    return list(_gpt2_files(path)) if kind == "gpt2" else [path]


def path_of(name: str) -> Path:
    """Returns the path in a tokenizer's name, `KIND:PATH` or a bare path."""
    kind, colon, rest = name.partition(":")
    return Path(rest if colon and (kind in KINDS or not Path(name).exists()) else name).expanduser()


def folder_of(name: str) -> Path:
    """Returns the folder with the files of the tokenizer of a name."""
    path = path_of(name)
    return path if path.is_dir() else path.parent


def digest_of(name: str) -> str:
    """Hash of the kind and the files of a tokenizer."""
    hashed = hashlib.sha256(_resolve(name)[0].encode())
    for path in files(name):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _resolve(name: str) -> tuple[str, Path]:
    kind, colon, _ = name.partition(":")
    path = path_of(name)
    if not colon or kind not in KINDS:
        if colon and not Path(name).exists():
            known = ", ".join(KINDS)
            raise UserError(f"no kind of tokenizer is called {kind!r}{nearest(kind, KINDS)}; there are {known}")
        kind = _recognise(path)
    if not path.exists():
        raise UserError(f"the tokenizer {path} does not exist")
    if kind not in ("gpt2", "hf") and path.is_dir():
        raise UserError(f"the tokenizer {path} is a folder; {kind}: takes a file")
    return kind, path


def _recognise(path: Path) -> str:
    if path.is_dir():
        if (path / TOKENIZER_JSON).is_file():
            return "hf"
        has_gpt2s = (path / "merges.txt").is_file() and not is_pretrained(path)
        return "gpt2" if has_gpt2s or (path / "vocab.bpe").is_file() else "hf"
    kinds = {".json": "hf", ".txt": "bert", ".model": "sentencepiece"}
    if path.suffix not in kinds:
        known = ", ".join(f"{kind}:PATH" for kind in KINDS)
        raise UserError(f"what kind of tokenizer {path} is can't be told by its name; say so: {known}")
    return kinds[path.suffix]


def _gpt2_files(folder: Path) -> tuple[Path, Path]:
    pairs = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
    for vocab, merges in pairs:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    raise UserError(f"{folder} has neither {' nor '.join(' + '.join(pair) for pair in pairs)}")


def byte_level(tokenizer: HuggingFace) -> HuggingFace:
    """`tokenizer` with GPT-2's pre-tokenizer and decoder, so that any bytes have ids."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _is_pretrained_gpt2(folder: Path) -> bool:
    """Whether a folder's settings say how its vocab.json is read.

    Raises:
      UserError: they say that it is not GPT-2's.
    """
    if (folder / "encoder.json").is_file() or not is_pretrained(folder):
        return False
    kind = class_of(folder, read_object(folder / CONFIG))
    if kind != "GPT2Tokenizer":
        raise UserError(f"gpt2:{folder} is for GPT-2's vocabulary, and this one is read by a {kind}: say hf:{folder}")
    return True


def _gpt2(folder: Path) -> FastTokenizer:
    if (folder / TOKENIZER_JSON).is_file() and not (folder / "encoder.json").is_file():
        return _hugging_face(folder / TOKENIZER_JSON)
    if _is_pretrained_gpt2(folder):
        return _hugging_face(folder)
    vocab_file, merges_file = _gpt2_files(folder)
    vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if not isinstance(vocab, dict) or wrong is not None:
        line = "" if wrong is None else f"; {' '.join(pairs[wrong])!r} is not"
        raise UserError(
            f"{folder} is not a GPT-2 vocabulary: {vocab_file.name} should map tokens to ids, and each line of "
            f"{merges_file.name} should be two tokens{line}"
        )
    try:
        tokenizer = byte_level(HuggingFace(models.BPE(vocab=vocab, merges=pairs)))  # pyright: ignore[reportArgumentType]
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"{folder} is not a GPT-2 vocabulary: {e}") from e
    if END_OF_DOCUMENT in vocab:
        tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return FastTokenizer(tokenizer, str(folder))


def _bert(path: Path) -> FastTokenizer:
    words = path.read_text(encoding="utf-8").split("\n")
    vocab = {word: index for index, word in enumerate(words) if word}
    missing = [name for name in ("[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]") if name not in vocab]
    if missing:
        raise UserError(f"{path} is not a BERT vocabulary: it has no {', '.join(missing)}")
    cased = any(word != word.lower() for word in vocab if not word.startswith("["))
    tokenizer = HuggingFace(models.WordPiece(vocab=vocab, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return FastTokenizer(tokenizer, str(path))


def _hugging_face(path: Path) -> FastTokenizer:
    if path.is_dir() and not (path / TOKENIZER_JSON).is_file():
        tokenizer, eos = build_pretrained(path)
        return FastTokenizer(tokenizer, str(path), eos)
    path = path / TOKENIZER_JSON if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = HuggingFace.from_str(text)
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer.json: {e}") from e
    return FastTokenizer(tokenizer, str(path), special_names_in(path.parent).get("eos_token"))


def _sentencepiece(path: Path) -> Tokenizer:
    from mtjax.data.tokens.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(path)
