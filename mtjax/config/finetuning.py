"""`[finetuning]`: the task that pretrained weights learn, with `mtjax finetune`."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.setting import Bound, above_zero, at_least, setting, share


@dataclass(frozen=True)
class Finetuning:
    """The task that pretrained weights learn."""

    task: Literal["none", "classify", "regress", "mnli", "qqp", "rte"] = "none"
    """What is learnt: one of GLUE's tasks, or classes (classify) or numbers (regress) from rows of your own."""
    epochs: float = above_zero(3.0)
    """Passes over the training rows, from which the steps follow."""
    warmup_fraction: float = share(0.06)
    """Share of the steps in which the learning rate grows."""
    layer_decay: float = setting(1.0, bound=Bound(lambda value: 0 < value <= 1, "above 0 and at most 1"))
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
