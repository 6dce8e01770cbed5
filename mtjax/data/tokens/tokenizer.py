"""Tokenizers behind one interface: text in, ids out, an end-of-document id, and the special ids of BERT and T5.

`KIND:PATH` names one: `hf:PATH` (a tokenizer.json, or a Hugging Face folder), `gpt2:DIR` (encoder.json + vocab.bpe, or
vocab.json + merges.txt), `bert:vocab.txt`, `sentencepiece:FILE`. A bare path is recognized by what it is.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFace

from mtjax.data.tokens.end_file import TOKENIZER_JSON, saved_end
from mtjax.data.tokens.fast_tokenizer import END_OF_DOCUMENT, FastTokenizer
from mtjax.data.tokens.pretrained_settings import (
    CONFIG,
    class_of,
    files_read,
    is_pretrained,
    read_object,
    special_names_in,
)
from mtjax.data.tokens.pretrained_tokenizer import build_pretrained
from mtjax.errors import UserError, nearest

KINDS = ("gpt2", "bert", "hf", "sentencepiece")
GPT2_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of the files of GPT-2's tokenizer: OpenAI's, Hugging Face's, and those in Megatron-LM's instructions."""


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
        """Encodes `text`, nothing added at either end; a special token's name in it is plain text."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes `text` as the input of a model, with tokens that the tokenizer adds: Llama's `<s>`, T5's `</s>`."""
        ...

    def encode_marked(self, text: str) -> list[int]:
        """Encodes `text` in which the names of special tokens become these tokens; nothing added."""
        ...

    def encode_offsets(self, text: str, *, marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes `text` like `encode_marked` if it is `marked`, else like `encode_prompt`.

        Returns:
          The ids, and for each of them the characters of `text` that it stands for, from which to which; the two are
          equal for what the tokenizer adds.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text like `encode`, over all cores where the tokenizer can."""
        ...

    def encode_batch_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text like `encode_marked`, over all cores where the tokenizer can.

        Raises:
          UserError: the tokenizer knows no names of special tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`, special tokens as their names."""
        ...

    def token(self, index: int) -> str:
        """Returns how the vocabulary writes one id."""
        ...

    def special(self, name: str) -> int | None:
        """Returns the id of a special token such as `[MASK]`, None when the vocabulary has none of that name."""
        ...

    def with_eod(self, token: str) -> "Tokenizer":
        """Returns this tokenizer with another token at the end of documents.

        Raises:
          UserError: the vocabulary has no such token.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into `folder`, so that a run has a copy."""
        ...


def end_note(tokenizer: Tokenizer) -> str | None:
    """Returns a note for the user where more than one token might end documents; None where only one does."""
    others: tuple[str, ...] = getattr(tokenizer, "other_ends", ())
    if not others:
        return None
    return (
        f"documents end with {tokenizer.token(tokenizer.eod)}; the tokenizer also has {', '.join(others)}: choose with "
        "--eod-token"
    )


def open_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """Opens the tokenizer that `KIND:PATH` or a bare path names.

    Args:
      name: of the tokenizer.
      eod_token: the token that ends documents; the one that the files say when None.

    Raises:
      UserError: no such kind, file or token, or the file isn't what its kind says.
    """
    kind, path = _resolve(name)
    openers = {"gpt2": _gpt2, "bert": _bert, "hf": _hugging_face, "sentencepiece": _sentencepiece}
    try:
        return openers[kind](path, eod_token)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise UserError(f"the tokenizer {name} can't be read: {reason}") from e


def files(name: str) -> list[Path]:
    """Returns the files of a tokenizer's name: its identity is their content."""
    kind, path = _resolve(name)
    if path.is_dir() and (path / TOKENIZER_JSON).is_file() and not (path / "encoder.json").is_file():
        return [path / TOKENIZER_JSON]
    if path.is_dir() and (kind == "hf" or _is_pretrained_gpt2(path)):
        return files_read(path)
    return list(gpt2_files(path)) if kind == "gpt2" else [path]


def path_of(name: str) -> Path:
    """Returns the path in a tokenizer's name, `KIND:PATH` or a bare path."""
    kind, colon, rest = name.partition(":")
    return Path(rest if colon and (kind in KINDS or not Path(name).exists()) else name).expanduser()


def folder_of(name: str) -> Path:
    """Returns the folder with the files of the tokenizer of a name."""
    path = path_of(name)
    return path if path.is_dir() else path.parent


def digest_of(name: str) -> str:
    """Returns a hash of the kind and the files of a tokenizer."""
    # The kind, too: the same files read by another kind are another tokenizer.
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
        kind = _recognize(path)
    if not path.exists():
        raise UserError(_missing(name, kind, path))
    if kind not in ("gpt2", "hf") and path.is_dir():
        raise UserError(f"the tokenizer {path} is a folder; {kind}: takes a file")
    return kind, path


def _missing(name: str, kind: str, path: Path) -> str:
    """Returns the message for a tokenizer that is not there, with the command that copies it to the path."""
    folder = path.parent if path.suffix in (".json", ".txt", ".model") else path
    model = str(folder) if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)) else "OWNER/NAME"
    parts = {"gpt2": "vocab.json merges.txt", "bert": "vocab.txt"}.get(kind, "--include 'tokenizer*'")
    if kind == "gpt2":
        model = "openai-community/gpt2"
    return (
        f"the tokenizer {name} does not exist: tokenizers are files on this machine; from the Hugging Face hub, "
        f"`hf download {model} {parts} --local-dir {folder if folder.name else 'FOLDER'}` copies one"
    )


def _recognize(path: Path) -> str:
    if path.is_dir():
        if (path / TOKENIZER_JSON).is_file():
            return "hf"
        has_gpt2s = (path / "merges.txt").is_file() and not is_pretrained(path)
        return "gpt2" if has_gpt2s or (path / "vocab.bpe").is_file() else "hf"
    kinds = {".json": "hf", ".txt": "bert", ".model": "sentencepiece"}
    if path.suffix not in kinds:
        known = ", ".join(f"{kind}:PATH" for kind in KINDS)
        raise UserError(f"the kind of the tokenizer {path} is not known from its name: name it as {known}")
    return kinds[path.suffix]


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """Returns the vocabulary and the merges in a folder of GPT-2's tokenizer.

    Raises:
      UserError: they are not there.
    """
    for vocab, merges in GPT2_PAIRS:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    raise UserError(f"{folder} has neither {' nor '.join(' + '.join(pair) for pair in GPT2_PAIRS)}")


def is_cased(vocabulary: Path) -> bool:
    """Returns whether a vocabulary of BERT, a file with a word on each line, has words with capitals."""
    words = vocabulary.read_text(encoding="utf-8").split("\n")
    # Special tokens are in capitals in both kinds of vocabulary. Nothing else in BERT's file says whether text is
    # lower-cased: a wrong guess makes capitalised words unknown, or loses the capitals.
    return any(word != word.lower() for word in words if not word.startswith("["))


def byte_level(tokenizer: HuggingFace) -> HuggingFace:
    """Returns `tokenizer` with GPT-2's pre-tokenizer and decoder, so that any bytes have ids."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _is_pretrained_gpt2(folder: Path) -> bool:
    """Returns whether a folder's settings determine how its vocab.json is read.

    Raises:
      UserError: they say that it is not GPT-2's.
    """
    if (folder / "encoder.json").is_file() or not is_pretrained(folder):
        return False
    kind = class_of(folder, read_object(folder / CONFIG))
    if kind != "GPT2Tokenizer":
        raise UserError(f"gpt2:{folder} is for GPT-2's vocabulary, and this one is read by a {kind}: say hf:{folder}")
    return True


def _gpt2(folder: Path, eod: str | None) -> FastTokenizer:
    if (folder / TOKENIZER_JSON).is_file() and not (folder / "encoder.json").is_file():
        return _hugging_face(folder / TOKENIZER_JSON, eod)
    if _is_pretrained_gpt2(folder):
        return _hugging_face(folder, eod)
    vocab_file, merges_file = gpt2_files(folder)
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
    return FastTokenizer(tokenizer, str(folder), eod=eod)


def _bert(path: Path, eod: str | None) -> FastTokenizer:
    words = path.read_text(encoding="utf-8").split("\n")
    # The number of the line is the id, so an empty line keeps its number.
    vocab = {word: index for index, word in enumerate(words) if word}
    missing = [name for name in ("[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]") if name not in vocab]
    if missing:
        raise UserError(f"{path} is not a BERT vocabulary: it has no {', '.join(missing)}")
    tokenizer = HuggingFace(models.WordPiece(vocab=vocab, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased(path))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return FastTokenizer(tokenizer, str(path), eod=eod)


def _hugging_face(path: Path, eod: str | None) -> FastTokenizer:
    if path.is_dir() and not (path / TOKENIZER_JSON).is_file():
        tokenizer, eos = build_pretrained(path)
        return FastTokenizer(tokenizer, str(path), eos, eod)
    path = path / TOKENIZER_JSON if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = HuggingFace.from_str(text)
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer.json: {e}") from e
    # What was typed wins over what was saved.
    return FastTokenizer(tokenizer, str(path), special_names_in(path.parent).get("eos_token"), eod or saved_end(path))


def _sentencepiece(path: Path, eod: str | None) -> Tokenizer:
    from mtjax.data.tokens.sentencepiece_tokenizer import SentencePieceTokenizer

    tokenizer = SentencePieceTokenizer(path)
    chosen = eod or saved_end(path)
    return tokenizer if chosen is None else tokenizer.with_eod(chosen)
