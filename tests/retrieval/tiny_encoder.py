"""A small BERT with random weights as Hugging Face's folder, without torch, and a corpus of related documents."""

import json
from pathlib import Path

import numpy as np

from mtjax.cli import main
from tests.convert.hf_folders import random_tensors
from tests.data.corpora import WORDS, write_bert_vocab, write_jsonl

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}


def write_encoder(folder: Path, factor: float = 1.0) -> Path:
    """A BertModel without pooler; with another factor, other weights."""
    from safetensors.numpy import save_file

    folder.mkdir()
    vocab_size = len(write_bert_vocab(folder / "vocab.txt").read_text().splitlines())
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    tensors = {name: factor * tensor for name, tensor in random_tensors(_shapes(vocab_size)).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocab_size, hidden),
        "embeddings.position_embeddings.weight": (SIZES["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    norms, linears = ["embeddings.LayerNorm"], {}
    for layer in range(SIZES["num_hidden_layers"]):
        block = f"encoder.layer.{layer}"
        norms += [f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"]
        linears |= {f"{block}.attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
        linears |= {f"{block}.attention.output.dense": (hidden, hidden)}
        linears |= {f"{block}.intermediate.dense": (inner, hidden), f"{block}.output.dense": (hidden, inner)}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def write_corpus(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """Documents of 1 to 60 words, some of them repeated with other words between, as an indexed dataset."""
    draw = np.random.default_rng(seed)
    documents = [list(draw.choice(WORDS, draw.integers(1, 60))) for _ in range(count)]
    for i in range(3, count, 4):
        related = list(documents[i - 3])
        related[:: max(len(related) // 3, 1)] = ["light"] * len(related[:: max(len(related) // 3, 1)])
        documents[i] = related
    write_jsonl(folder / "texts.jsonl", [" ".join(document) for document in documents])
    vocab = write_bert_vocab(folder / "vocab.txt")
    arguments = ["--input", str(folder / "texts.jsonl"), "--tokenizer", f"bert:{vocab}", "--workers", "0"]
    assert main(["data", "preprocess", *arguments, "--output", str(folder / "corpus"), "--append-eod"]) == 0
    for end in ("bin", "idx", "meta.json"):
        (folder / f"corpus_text_document.{end}").rename(folder / f"corpus.{end}")
    return folder / "corpus"
