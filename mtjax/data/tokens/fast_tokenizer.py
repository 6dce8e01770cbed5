"""Tokenizers of the `tokenizers` library, and the token that ends their documents."""

import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as HuggingFace

from mtjax.data.tokens.characters import whole_characters
from mtjax.data.tokens.end_file import TOKENIZER_JSON, save_end
from mtjax.data.tokens.word_cache import word_cache
from mtjax.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
CORES_LIKE_A_CACHE = 2  # looking up is as fast as two and a half cores that merge
END_NAMES = (
    *(END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
)
"""Tokens that end documents, in order of preference where the settings of a tokenizer name none of them."""
ROBERTA_NAMES = {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[MASK]": "<mask>"}
"""BERT's names of special tokens -> RoBERTa's; a vocabulary with `<mask>` has these."""


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
      tokenizer: of the library.
      source: where it is from, for messages.
      eos: the end-of-sequence token in its settings; see `_ends`.
      eod: the token that ends documents, where it was chosen.

    Attributes:
      other_ends: tokens that might end documents as well as the one that does.
    """

    def __init__(self, tokenizer: HuggingFace, source: str, eos: str | None = None, eod: str | None = None) -> None:
        # Published files have the lengths that a model was trained with: text would be cut or filled up silently.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text: no text ends its document
        self._tokenizer = tokenizer
        self._source, self._chosen_eod = source, eod
        if eod is None:
            name, *others = _ends(tokenizer, source, eos)
            self._eod, self.other_ends = _end_id(tokenizer, name, source), tuple(others)
        else:
            self._eod, self.other_ends = _end_id(tokenizer, eod, source), ()
        self._cache = word_cache(tokenizer)
        # The highest id, not the number of tokens: vocabularies have gaps.
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
        """Encodes `text`, nothing added."""
        with whole_characters(text):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes `text`, with the tokens that the tokenizer's post-processor adds."""
        with whole_characters(text):
            return self._tokenizer.encode(text).ids

    def encode_marked(self, text: str) -> list[int]:
        """Encodes `text`, in which names of special tokens become these tokens."""
        return self._encode(text, marked=True).ids

    def encode_offsets(self, text: str, *, marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes `text`; returns the ids, and the range of characters of each."""
        encoding = self._encode(text, marked=marked)
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, *, marked: bool) -> Encoding:
        # A setting of the tokenizer, not of the call: restored whatever happens, or later texts could end documents.
        self._tokenizer.encode_special_tokens = not marked
        try:
            with whole_characters(text):
                return self._tokenizer.encode(text, add_special_tokens=not marked)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text: by looking words up where this process has few cores to itself, else over all cores."""
        with whole_characters(*texts):
            if self._cache is not None and _cores() <= CORES_LIKE_A_CACHE:
                return self._cache.encode_batch(texts)
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode_batch_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, in which names of special tokens become these tokens, over all cores."""
        self._tokenizer.encode_special_tokens = False
        try:
            with whole_characters(*texts):
                encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
                return [encoding.ids for encoding in encodings]
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Encodes each text, nothing added; returns the ids, and the range of characters of each."""
        with whole_characters(*texts):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token(self, index: int) -> str:
        """Returns how the vocabulary writes one id."""
        return self._tokenizer.id_to_token(int(index)) or f"<{index}>"

    def special(self, name: str) -> int | None:
        """Returns the id of the special token `name`, or None; of BERT's names also in a vocabulary with RoBERTa's."""
        index = self._tokenizer.token_to_id(name)
        if index is None and name in ROBERTA_NAMES and self._tokenizer.token_to_id(ROBERTA_NAMES["[MASK]"]) is not None:
            return self._tokenizer.token_to_id(ROBERTA_NAMES[name])
        return index

    def with_eod(self, token: str) -> "FastTokenizer":
        """Returns this tokenizer with another token at the end of documents."""
        # Shares the library's tokenizer, which takes long to build for a large vocabulary.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._eod, other.other_ends = _end_id(self._tokenizer, token, self._source), ()
        other._chosen_eod = token
        return other

    def save(self, folder: Path) -> None:
        """Writes the model into `folder`, and its end of document where that was chosen."""
        save_end(folder, self._chosen_eod)
        temporary = folder / ".tokenizer.json.tmp"
        temporary.write_text(self._tokenizer.to_str(), encoding="utf-8")
        temporary.replace(folder / TOKENIZER_JSON)

    def __getstate__(self) -> tuple[str, str]:
        # As text: `__init__` sets up again what the library's own pickles may lack, such as encode_special_tokens.
        return self._tokenizer.to_str(), self.token(self._eod)

    def __setstate__(self, state: tuple[str, str]) -> None:
        tokenizer, eod = state
        self.__init__(HuggingFace.from_str(tokenizer), "a worker's tokenizer", eod=eod)


def _cores() -> int:
    """Cores that the library would use here; worker processes switch them off."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0") else os.cpu_count() or 1


def _ends(tokenizer: HuggingFace, source: str, eos: str | None) -> list[str]:
    """Returns the tokens that may end documents, the most likely first.

    Raises:
      UserError: there is none.
    """
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    known = [name for name in END_NAMES if tokenizer.token_to_id(name) is not None]
    named = [eos] if eos is not None and tokenizer.token_to_id(eos) is not None else []
    # Only special ones: Gemma's `</s>` is an HTML tag of its vocabulary.
    marked = [name for name in known if name in special]
    # The `eos_token` of the settings comes first only by a usual name: a chat model's ends a turn, not a document.
    ends = [*named, *marked] if eos in END_NAMES else [*marked, *named]
    if not ends and not known:
        raise UserError(
            f"the tokenizer {source} has no end-of-document token: name one of its tokens with --eod-token, or put its "
            f"tokenizer_config.json into the same folder (known without: {', '.join(END_NAMES)})"
        )
    # A vocabulary alone marks no token as special.
    return list(dict.fromkeys(ends)) or known[:1]


def _end_id(tokenizer: HuggingFace, token: str, source: str) -> int:
    index = tokenizer.token_to_id(token)
    if index is None:
        raise UserError(f"the tokenizer {source} has no token {token!r} for --eod-token")
    return index
