"""SentencePiece models behind the `Tokenizer` interface; needs the extra `data`."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from mtjax.data.tokens.characters import whole_characters
from mtjax.data.tokens.end_file import save_end
from mtjax.errors import UserError, require


class SentencePieceTokenizer:
    """A SentencePiece model: LLaMA's, T5's and the like."""

    def __init__(self, path: Path) -> None:
        self._load(path.read_bytes(), str(path))

    def _load(self, model: bytes, source: str) -> None:
        library = require("sentencepiece", "data")
        try:
            self._processor = library.SentencePieceProcessor(model_proto=model)
        except RuntimeError as e:
            raise UserError(f"{source} is not a SentencePiece model: {e}") from e
        self._model, self._source, self._chosen_eod = model, source, None
        self._eod = self._processor.eos_id()
        if self._eod < 0:
            raise UserError(f"the SentencePiece model {source} has no end-of-sequence token to end documents with")

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._processor.vocab_size()

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._eod

    def encode(self, text: str) -> list[int]:
        """Encodes `text`, nothing added."""
        with whole_characters(text):
            return self._processor.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes `text`; a SentencePiece model does not specify tokens to add."""
        return self.encode(text)

    def encode_marked(self, text: str) -> list[int]:
        """Encodes `text`; a SentencePiece model knows no names of special tokens in it."""
        return self.encode(text)

    def encode_offsets(self, text: str, *, marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes `text`; returns the ids, and the range of characters of each; `marked` makes no difference here."""
        with whole_characters(text):
            try:
                pieces, is_bytes = self._processor.encode(text, return_type="proto").pieces, True
            except TypeError:  # older releases of the library, which count characters
                pieces, is_bytes = self._processor.encode(text, out_type="immutable_proto").pieces, False
        ids, offsets = [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]
        if is_bytes:
            # Newer releases count bytes of UTF-8; a chat's mask is by characters.
            starts = list(accumulate((len(character.encode()) for character in text), initial=0))
            offsets = [(bisect_left(starts, begin), bisect_left(starts, end)) for begin, end in offsets]
        return ids, offsets

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, over all cores."""
        with whole_characters(*texts):
            # -1: all cores.
            return self._processor.encode(list(texts), num_threads=-1)

    def encode_batch_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Refuses to read names of special tokens, which a SentencePiece model does not know."""
        raise UserError(
            f"--parse-special needs a tokenizer that knows the names of its special tokens, and {self._source} is a "
            "SentencePiece model alone: name the folder with its tokenizer.json or tokenizer_config.json, hf:DIR"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`, special tokens included."""
        return self._processor.decode([int(i) for i in ids])

    def token(self, index: int) -> str:
        """Returns how the vocabulary writes one id."""
        return self._processor.id_to_piece(int(index)) if 0 <= index < self.vocab_size else f"<{index}>"

    def special(self, name: str) -> int | None:
        """Returns the id of the special token `name`, or None."""
        index = self._processor.piece_to_id(name)
        # The library gives the unknown piece's id for a name that it lacks.
        return None if index == self._processor.unk_id() and name != self.token(index) else index

    def with_eod(self, token: str) -> "SentencePieceTokenizer":
        """Returns this tokenizer with another token at the end of documents."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        index = self.special(token)
        if index is None:
            raise UserError(f"the tokenizer {self._source} has no token {token!r} for --eod-token")
        other._eod, other._chosen_eod = index, token
        return other

    def save(self, folder: Path) -> None:
        """Writes the model into `folder`, and its end of document where that was chosen."""
        save_end(folder, self._chosen_eod)
        temporary = folder / ".tokenizer.model.tmp"
        temporary.write_bytes(self._model)
        temporary.replace(folder / "tokenizer.model")

    def __getstate__(self) -> tuple[bytes, int]:
        # The library's processor can't be sent to another process.
        return self._model, self._eod

    def __setstate__(self, state: tuple[bytes, int]) -> None:
        model, eod = state
        self._load(model, "a worker's tokenizer")
        self._eod = eod
