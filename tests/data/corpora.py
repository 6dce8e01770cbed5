"""Small corpora for the tests of data."""

import gzip
import json
import random
from functools import cache

import numpy as np

from mtjax.data.corpus.default_corpus import documents
from mtjax.data.corpus.indexed import token_dtype
from mtjax.data.corpus.writer import IndexedWriter

WORDS = (
    "the",
    "a",
    "one",
    "two",
    "river",
    "stone",
    "light",
    "house",
    "green",
    "walks",
    "under",
    "over",
    "never",
    "and",
)


@cache
def default_documents():
    """The default corpus: reading Python's library takes seconds."""
    return documents()


def texts(count, seed=0, words=40):
    """`count` documents of some sentences each."""
    draw = random.Random(seed)
    return [
        " ".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 12))).capitalize() + "." for _ in range(words // 8))
        for _ in range(count)
    ]


def write_jsonl(path, documents, **more):
    text = "".join(json.dumps({"text": text, **more}) + "\n" for text in documents)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_bert_vocab(path):
    """A WordPiece vocabulary with letters, so that nothing is unknown, and the words above."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    entries += [c for c in letters if c not in entries] + [f"##{c}" for c in letters]
    path.write_text("\n".join(entries) + "\n")
    return path


def write_indexed(prefix, documents, vocab_size=1000, modes=None):
    """An indexed dataset of `documents`: lists of sequences, which are lists of ids."""
    sequences = [sequence for document in documents for sequence in document]
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        writer.add(
            np.array([token for sequence in sequences for token in sequence], np.int64),
            np.array([len(sequence) for sequence in sequences], np.int32),
            np.array([len(document) for document in documents], np.int32),
            None if modes is None else np.array(modes, np.int8),
        )
        writer.finish()
    return prefix
