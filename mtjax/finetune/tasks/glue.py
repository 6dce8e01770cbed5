"""Tasks with a label per row: GLUE's (arXiv 1804.07461) with its files and fields, and custom ones."""

from mtjax.finetune.metrics import accuracy, accuracy_and_f1, correlations, of_classes
from mtjax.finetune.tasks.labelled import Labelled
from mtjax.finetune.tasks.task import HeldOut

SENTENCES, PREMISE = ("sentence1", "sentence2"), ("premise", "hypothesis")
QUESTIONS = ("question1", "question2")
ANY = (SENTENCES, PREMISE, QUESTIONS, ("text_a", "text_b"), ("text1", "text2"), ("text",), ("sentence",))
"""Default fields of custom rows."""

MATCHED = HeldOut("", ("dev_matched", "validation_matched"))
MISMATCHED = HeldOut("_mismatched", ("dev_mismatched", "validation_mismatched"), is_needed=False)

MNLI = Labelled(
    name="mnli",
    head="classification",
    texts=(SENTENCES, PREMISE),
    label=("gold_label", "label"),
    labels=("contradiction", "entailment", "neutral"),
    held_out=(MATCHED, MISMATCHED),
    metrics=accuracy,
    goal="accuracy",
)
QQP = Labelled(
    name="qqp",
    head="classification",
    texts=(QUESTIONS,),
    label=("is_duplicate", "label"),
    labels=("0", "1"),
    metrics=accuracy_and_f1,
    goal="accuracy",
)
RTE = Labelled(
    name="rte",
    head="classification",
    texts=(SENTENCES, PREMISE),
    label=("label",),
    labels=("entailment", "not_entailment"),
    metrics=accuracy,
    goal="accuracy",
)
CLASSIFY = Labelled("classify", "classification", ANY, ("label",), of_classes, "accuracy")
REGRESS = Labelled("regress", "regression", ANY, ("label", "score"), correlations, "pearson")
