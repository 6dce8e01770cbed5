"""What `mtjax finetune` says of itself, and the settings with which it begins."""

from dataclasses import dataclass

from mtjax.config.setting import at_least
from mtjax.train import options as train

DESCRIPTION = """Trains a head on pretrained weights for a task: a BERT, GPT or Llama.

Tasks:
  mnli, qqp, rte  GLUE's, from its folders: train.tsv and dev.tsv (MNLI: dev_matched.tsv, dev_mismatched.tsv), or .jsonl
  classify        classes of a text or of two, from rows of your own: TSV with a header, or JSON lines
  regress         numbers instead of classes

--data is a folder with train.tsv and dev.tsv, or one file, which --split shares out (90,10,0). The best checkpoint by
the task's metric is kept in OUT/best. Steps and warmup follow from --epochs and --warmup-fraction; validations and
checkpoints, where --valid-every and --checkpoint-every are 0, come once in an epoch.

Examples:
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --learning-rate 2e-5
  mtjax finetune --task classify --data reviews.jsonl --init-from runs/gpt2-small-1 --epochs 5 --patience 2
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --seeds 5 --out runs/rte
  mtjax finetune --config runs/rte-1/config.toml --resume
"""


@dataclass(frozen=True)
class Options(train.Options):
    """For this start only."""

    seeds: int = at_least(1, 1, most=1000)
    """Runs, each with another seed, into OUT/seed-SEED; their median and spread are said in the end."""

    def of_training(self) -> train.Options:
        """Those of each run."""
        return train.Options(**{name: value for name, value in vars(self).items() if name != "seeds"})


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

DECIDED = ("steps", "train-samples", "rampup-batch-size", "warmup-steps", "head", "num-labels", "decay-steps")
"""Options that other settings and the rows decide."""
