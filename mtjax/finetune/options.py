"""The options, help and default settings of `mtjax finetune`."""

from dataclasses import dataclass

from mtjax.config.field_metadata import at_least
from mtjax.train import options as train

CHAT = "chat"
"""The task whose rows are conversations."""
LONGEST_CHATS = 1024
"""Default sequence length of chat, unless the model's is shorter."""

DESCRIPTION = """Finetunes pretrained weights: a BERT, GPT or Llama with a head for a task, or a decoder on chats.

Tasks:
  mnli, qqp, rte  GLUE's, from its folders: train.tsv and dev.tsv (MNLI: dev_matched.tsv, dev_mismatched.tsv), or .jsonl
  race            RACE's questions with four answers, from its folders train and dev of *.txt
  squad1, squad2  SQuAD 1.1 and 2.0: answers that are spans of a passage, from train-v2.0.json and dev-v2.0.json
  classify        classification of a text or a pair of texts, from your own rows: TSV with a header, or JSON lines
  regress         regression: numbers instead of classes
  chat            supervised finetuning on conversations: JSON lines with messages, or with prompt and completion; for
                  a Retro also with passages

--data is a folder with train.tsv and dev.tsv, or one file, which --split divides (90,10,0). The best checkpoint by the
task's metric is saved in OUT/best. Steps and warmup follow from --epochs and --warmup-fraction; validation and
checkpoints happen once per epoch if --valid-every and --checkpoint-every are 0.

Examples:
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --learning-rate 2e-5
  mtjax finetune --task classify --data reviews.jsonl --init-from runs/gpt2-small-1 --epochs 5 --patience 2
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --seeds 5 --out runs/rte
  mtjax finetune --task squad2 --data squad --init-from hf:bert-base-uncased --sequence-length 384 --epochs 2
  mtjax finetune --task race --data RACE --init-from hf:bert-base-uncased --sweep learning-rate=1e-5,2e-5
  mtjax finetune --task chat --data chats.jsonl --init-from hf:SmolLM2 --lora-rank 16 --learning-rate 2e-4
  mtjax finetune --task chat --data chats.jsonl --init-from hf:small --teacher hf:large --teacher-weight 0.9
  mtjax finetune --task chat --data questions.jsonl --init-from runs/retro-1 --retro-frozen encoder
  mtjax finetune --config runs/rte-1/config.toml --resume
"""


@dataclass(frozen=True)
class Options(train.Options):
    """Options that are not settings of a run."""

    seeds: int = at_least(1, 1, most=1000)
    """Number of runs, each with another seed, in OUT/seed-SEED; prints their median and range at the end."""

    sweep: tuple[str, ...] | None = None
    """Runs all combinations of batch sizes, learning rates or both, such as global-batch-size=16,32
    learning-rate=2e-5,5e-5, each in a separate folder. Without values: 16, 32, 64 and 128 (questions) with 1e-5, 2e-5,
    3e-5 and 5e-5. With --seeds, compares medians."""

    def of_training(self) -> train.Options:
        """Returns the options of each run."""
        return train.Options(**{name: value for name, value in vars(self).items() if name not in ("seeds", "sweep")})


DEFAULTS = {
    "global_batch_size": 32,
    "learning_rate": 5e-5,
    "min_learning_rate": 0.0,
    "decay_style": "linear",
    "warmup_steps": 0,
    "split": "90,10,0",
    "valid_every": 0,
    "checkpoint_every": 0,
    "keep_last": 1,
}
"""Defaults of finetuning that differ from those of pretraining."""

DECIDED = (
    *(
        "steps",
        "train-samples",
        "rampup-batch-size",
        "warmup-steps",
        "head",
        "num-labels",
        "decay-steps",
        "teacher-width",
    ),
    *("evaluate", "evaluate-every", "keep-best", "neighbours", "retro-reads", "no-retro-reads"),
)
"""Options that are determined by the task, the rows and other settings."""
