"""What `mtjax finetune` says of itself, and the settings with which it begins."""

from dataclasses import dataclass

from mtjax.config.field_metadata import at_least
from mtjax.train import options as train

CHAT = "chat"
"""The task whose rows are conversations."""
LONGEST_CHATS = 1024
"""Tokens of its sequences where nothing is said, if the weights read so many."""

DESCRIPTION = """Trains pretrained weights for a task: a BERT, GPT or Llama with a head, or a GPT or Llama that answers.

Tasks:
  mnli, qqp, rte  GLUE's, from its folders: train.tsv and dev.tsv (MNLI: dev_matched.tsv, dev_mismatched.tsv), or .jsonl
  race            RACE's questions with four answers, from its folders train and dev of *.txt
  squad1, squad2  SQuAD 1.1 and 2.0: answers that are parts of a passage, from train-v2.0.json and dev-v2.0.json
  classify        classes of a text or of two, from rows of your own: TSV with a header, or JSON lines
  regress         numbers instead of classes
  chat            answers of conversations, JSON lines of messages or of prompt and completion (supervised finetuning)

--data is a folder with train.tsv and dev.tsv, or one file, which --split shares out (90,10,0). The best checkpoint by
the task's metric is kept in OUT/best. Steps and warmup follow from --epochs and --warmup-fraction; validations and
checkpoints, where --valid-every and --checkpoint-every are 0, come once in an epoch.

Examples:
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --learning-rate 2e-5
  mtjax finetune --task classify --data reviews.jsonl --init-from runs/gpt2-small-1 --epochs 5 --patience 2
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --seeds 5 --out runs/rte
  mtjax finetune --task squad2 --data squad --init-from hf:bert-base-uncased --sequence-length 384 --epochs 2
  mtjax finetune --task race --data RACE --init-from hf:bert-base-uncased --sweep learning-rate=1e-5,2e-5
  mtjax finetune --task chat --data chats.jsonl --init-from hf:SmolLM2 --lora-rank 16 --learning-rate 2e-4
  mtjax finetune --task chat --data chats.jsonl --init-from hf:small --teacher hf:large --teacher-weight 0.9
  mtjax finetune --config runs/rte-1/config.toml --resume
"""


@dataclass(frozen=True)
class Options(train.Options):
    """For this start only."""

    seeds: int = at_least(1, 1, most=1000)
    """Runs, each with another seed, into OUT/seed-SEED; their median and spread are said in the end."""

    sweep: tuple[str, ...] | None = None
    """Runs with several values of the batch size, the learning rate or both, global-batch-size=16,32
    learning-rate=2e-5,5e-5, each into a folder of its own; without values 16, 32, 64 and 128 (questions) with 1e-5,
    2e-5, 3e-5 and 5e-5. With --seeds their medians are compared."""

    def of_training(self) -> train.Options:
        """Those of each run."""
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
"""Settings in which a finetuning begins elsewhere than a pretraining."""

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
    *("evaluate", "evaluate-every", "keep-best"),
)
"""Options that other settings, the task and the rows decide."""
