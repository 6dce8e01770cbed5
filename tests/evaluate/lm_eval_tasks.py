"""Tasks for lm-eval on texts that a test makes up, one for each thing that it asks of a model."""

import json
import random
from pathlib import Path

WORDS = ("the", "cat", "and", "dog", "went", "on", "to", "end", "of", "road", "there", "they", "rested")
TASKS = {
    "cloze": {  # as of LAMBADA
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "pages": {  # as of WikiText
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{text.split(' ')[-1]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path) -> Path:
    """A folder of them, and their texts."""
    own = random.Random(0)
    texts = [" ".join(own.choices(WORDS, k=own.randint(4, 30))) for _ in range(12)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, "test_split": "test", **task}))
    return folder
