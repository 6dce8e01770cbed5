"""`[finetuning]`: the task that pretrained weights learn, with `mtjax finetune`."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import WIDTH, Bound, above_zero, at_least, setting, share

_ABOVE_0 = Bound(lambda value: 0 < value <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class Finetuning:
    """The task that pretrained weights learn."""

    task: Literal["none", "classify", "regress", "mnli", "qqp", "rte", "race", "squad1", "squad2", "chat"] = "none"
    """What is learnt: one of GLUE's tasks, RACE, SQuAD 1.1 or 2.0, classes (classify) or numbers (regress) from rows of
    your own, or the answers of conversations (chat)."""
    epochs: float = above_zero(3.0)
    """Passes over the training rows, from which the steps follow."""
    warmup_fraction: float = share(0.06)
    """Share of the steps in which the learning rate grows."""
    layer_decay: float = setting(1.0, bound=_ABOVE_0)
    """Each layer learns at the rate of the layer above it times this, the embeddings most slowly."""
    patience: int | None = at_least(1, None)
    """End after this many validations in a row that are not better than the best one before."""
    class_weights: str | None = None
    """Weights of the classes in the loss: balanced, or NAME=NUMBER for some, say yes=2,no=0.5; the others have 1."""
    text_fields: str | None = None
    """classify, regress: name of the field that has the text, or of two, say question,answer."""
    label_field: str | None = None
    """classify, regress: name of the field that has the label; label when not given."""
    labels: tuple[str, ...] | None = None
    """classify: names of the classes in the order of the outputs; those of the training rows when not given."""
    doc_stride: int = at_least(1, 128)
    """squad1, squad2: tokens after which the next window on a passage begins that is too long for one."""
    max_answer_length: int = at_least(1, 30)
    """squad1, squad2: most tokens of an answer."""
    n_best: int = at_least(1, 20)
    """squad1, squad2: answers that are kept of each question, from as many first and last tokens of each window."""
    null_threshold: float = 0.0
    """squad2: a question has no answer where the score of none is above the best answer's by more than this."""
    teacher: str | None = None
    """Weights of a model that has learnt the task - a run, hf:DIR, megatron:DIR -, whose probabilities are learnt too,
    besides the labels (distillation)."""
    teacher_temperature: float = above_zero(2.0)
    """By which the logits of both are divided before their probabilities are compared."""
    teacher_weight: float = setting(0.5, bound=_ABOVE_0)
    """Share of the teacher's probabilities in the loss; the labels have the rest."""
    teacher_width: int | None = at_least(1, None, most=WIDTH)
    """chat: width of the teacher's hidden states, which its weights say."""
    chat_template: str | None = None
    """chat: a file with the Jinja template that writes conversations out; the tokenizer's own when not given."""
