"""Trains GPT-2's kind of tokenizer, a byte-level BPE, on given text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from mtjax.data.tokens.tokenizer import END_OF_DOCUMENT, byte_level

DEFAULT_VOCAB_SIZE = 8192
SAMPLE_CHARACTERS = 8_000_000


def train_byte_level_bpe(texts: Iterable[str], path: Path, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
    """Writes a tokenizer.json of `vocab_size` tokens, the end of document among them.

    Args:
      texts: documents; the first 8 million characters are looked at, which is enough for a vocabulary of this size.
      path: the file to write.
      vocab_size: tokens, at least the 256 bytes and one more.
    """
    tokenizer = byte_level(HuggingFace(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # A pair that occurs once is not worth a token.
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        # All 256 bytes, also those that the sample lacks: any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, SAMPLE_CHARACTERS), trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    left = characters
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
