"""A small BERT with random weights and a vocabulary of words, as a config's file; tasks' files in their real forms."""

import json
from pathlib import Path

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] . , ? _ who where what lives does in is the a cat dog bird fish horse hen paris "
    "rome oslo bonn red blue green old young and slept there near big small house"
)
CONFIG = """
[model]
family = "bert"
num_layers = 2
hidden_size = 32
num_heads = 4
sequence_length = 64
vocab_multiple = 64
hidden_dropout = 0.0
attention_dropout = 0.0

[data]
tokenizer = "bert:{vocab}"

[optimizer]
learning_rate = 3e-3
min_learning_rate = 0.0
decay_style = "linear"

[training]
global_batch_size = 8
compute_dtype = "float32"

[output]
valid_every = 0
checkpoint_every = 0
keep_last = 1
log_every = 1
"""
ANIMALS, PLACES = ["cat", "dog", "bird", "fish", "horse", "hen"], ["paris", "rome", "oslo", "bonn"]


def write_config(folder: Path) -> Path:
    """The config of the model."""
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()) + "\n")
    (folder / "tiny.toml").write_text(CONFIG.format(vocab=folder / "vocab.txt"))
    return folder / "tiny.toml"


def squad_file(path: Path, count: int, *, impossible: bool, long: bool = False) -> Path:
    """Two questions on each of `count` passages; with `impossible` the second has no answer, of `long` ones some."""
    paragraphs = []
    for i in range(count):
        animal, place = ANIMALS[i % 6], PLACES[i % 4]
        context = f"The old {animal} lives in {place}, near a big house."
        if long:
            context = "There slept a fish and a horse. " * 6 + context
        asked = [
            {"id": f"{i}a", "question": f"Where does the {animal} live?", "answers": [_answer(place, context)]},
            {"id": f"{i}b", "question": "Who is young?", "answers": [], "is_impossible": True}
            if impossible
            else {"id": f"{i}b", "question": "Who lives there?", "answers": [_answer(f"old {animal}", context)]},
        ]
        paragraphs.append({"context": context, "qas": asked})
    version = "v2.0" if impossible else "1.1"
    path.write_text(json.dumps({"version": version, "data": [{"title": "animals", "paragraphs": paragraphs}]}))
    return path


def _answer(text: str, context: str) -> dict:
    return {"text": text, "answer_start": context.index(text)}


def race_folder(folder: Path, **counts: int) -> Path:
    """Articles in files of their own, of middle and of high schools, with two questions each."""
    for name, count in counts.items():
        for i in range(count):
            animal, place = ANIMALS[i % 6], PLACES[i % 4]
            article = {
                "id": f"{('middle', 'high')[i % 2]}{i}.txt",
                "article": f"The {animal} is old. It lives in {place}, near a big house.",
                "questions": [f"The {animal} lives in _ .", "Who is old?"],
                "options": [PLACES, [f"the {one}" for one in sorted({animal, *ANIMALS[:4]})[:3]] + ["the hen house"]],
                "answers": ["ABCD"[i % 4], "D"],
            }
            right = f"the {animal}"
            options = article["options"][1]
            article["answers"][1] = "ABCD"[options.index(right)] if right in options else "D"
            path = folder / name / ("middle", "high")[i % 2] / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(article))
    return folder
