"""The metrics of tasks as GLUE defines them, from outputs and labels. Correlations are in [-1, 1]."""

from collections.abc import Mapping

import numpy as np

Scores = Mapping[str, float]
"""Metrics by name."""


def of_classes(outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Returns accuracy and macro F1, over the classes that occur in labels or predictions."""
    chosen = outputs.argmax(1)
    # scikit-learn's default: classes in neither have no F1.
    occurring = np.union1d(chosen, labels)
    return accuracy(outputs, labels) | {"f1": float(np.mean([_f1(chosen == c, labels == c) for c in occurring]))}


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the fraction of rows whose largest output is the label's."""
    return {"accuracy": float(np.mean(outputs.argmax(1) == labels))}


def accuracy_and_f1(outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Returns accuracy and F1 of class 1, as for QQP."""
    return accuracy(outputs, labels) | {"f1": _f1(outputs.argmax(1) == 1, labels == 1)}


def correlations(outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Returns Pearson and Spearman correlation, as for STS-B (0 if all values are equal), and mean squared error."""
    values = outputs[:, 0].astype(np.float64)
    return {
        "pearson": _correlation(values, labels),
        "spearman": _correlation(_ranks(values), _ranks(labels)),
        "mean_squared_error": float(np.mean((values - labels) ** 2)),
    }


def mean_loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean loss of rows: cross-entropy of classes or squared error; computed in float64."""
    outputs = outputs.astype(np.float64)
    if not np.issubdtype(labels.dtype, np.integer):
        return float(np.mean((outputs[:, 0] - labels) ** 2))
    largest = outputs.max(1)
    log_sum = largest + np.log(np.exp(outputs - largest[:, None]).sum(1))
    return float(np.mean(log_sum - outputs[np.arange(len(labels)), labels]))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Applies softmax along the last dimension."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _f1(chosen: np.ndarray, right: np.ndarray) -> float:
    """Returns F1 = 2 TP / (2 TP + FP + FN); 0 if there are no positives."""
    both = int((chosen & right).sum())
    return 2 * both / max(int(chosen.sum()) + int(right.sum()), 1)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the Pearson correlation; 0 if all values are equal."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns ranks from 1; ties get the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Sorted distinct values with `counts` ties each occupy ranks last - counts + 1 to last.
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[index]
