"""`[finetuning]`: the task on which `mtjax finetune` trains pretrained weights."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import WIDTH, Bound, above_zero, at_least, setting, share

_ABOVE_0 = Bound(lambda value: 0 < value <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class Finetuning:
    """The task on which pretrained weights are trained."""

    task: Literal["none", "classify", "regress", "mnli", "qqp", "rte", "race", "squad1", "squad2", "chat"] = "none"
    """Task to train: one of GLUE's, RACE, SQuAD 1.1 or 2.0, classify (classes) or regress (numbers) on your own rows,
    or chat (the answers in conversations)."""
    epochs: float = above_zero(3.0)
    """Number of passes over the training rows; sets the number of steps."""
    warmup_fraction: float = share(0.06)
    """Fraction of the steps for learning rate warmup (Megatron's --lr-warmup-fraction)."""
    layer_decay: float = setting(1.0, bound=_ABOVE_0)
    """Layer-wise learning rate decay: the learning rate of each layer is that of the layer above it times this
    factor."""
    patience: int | None = at_least(1, None)
    """Early stopping: end after this many validations in a row without a new best result."""
    class_weights: str | None = None
    """Weights of the classes in the loss: balanced, or NAME=NUMBER pairs such as yes=2,no=0.5; classes that are not
    named have weight 1."""
    text_fields: str | None = None
    """classify, regress: name of the field with the text, or of two fields, such as question,answer."""
    label_field: str | None = None
    """classify, regress: name of the field with the label; "label" when not given."""
    labels: tuple[str, ...] | None = None
    """classify: names of the classes, in the order of the outputs; those in the training rows when not given."""
    doc_stride: int = at_least(1, 128)
    """squad1, squad2: stride in tokens between the windows of a passage that is too long for one."""
    max_answer_length: int = at_least(1, 30)
    """squad1, squad2: maximum length of an answer in tokens."""
    n_best: int = at_least(1, 20)
    """squad1, squad2: number of candidate answers per question, built from the n_best start and end tokens of each
    window."""
    null_threshold: float = 0.0
    """squad2: predict no answer if the score of no answer exceeds that of the best answer by more than this."""
    teacher: str | None = None
    """Weights of a teacher trained on the task (a run's folder, hf:DIR, peft:DIR or megatron:DIR) for knowledge
    distillation."""
    teacher_temperature: float = above_zero(2.0)
    """Softmax temperature of the distillation loss, for teacher and student."""
    teacher_weight: float = setting(0.5, bound=_ABOVE_0)
    """Weight of the distillation loss; the loss of the labels has 1 - teacher_weight."""
    teacher_width: int | None = at_least(1, None, most=WIDTH)
    """chat: width of the teacher's output table; set from its weights."""
    chat_template: str | None = None
    """chat: a file with the Jinja chat template; the tokenizer's own when not given."""
