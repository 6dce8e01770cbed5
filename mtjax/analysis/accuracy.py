"""Error range of predicted times, from published runs."""

from dataclasses import dataclass

from mtjax.analysis.hardware import Server


@dataclass(frozen=True)
class Accuracy:
    """Published times over predicted ones."""

    least: float
    most: float
    runs: str
    """The published runs, for captions."""

    def around(self, seconds: float) -> tuple[float, float]:
        """Returns the shortest and the longest time of a run that is predicted to take `seconds`."""
        return self.least * seconds, self.most * seconds

    @property
    def in_words(self) -> str:
        """The source of a range, for captions."""
        return f"{self.runs} took {self.least:.2f} to {self.most:.2f} times the predicted time"


# The extremes of `mtjax plan --published`, whose tests fail when a prediction leaves them: docs/notes/plan.md has every
# run.
V100 = Accuracy(0.81, 1.67, "twelve published runs on V100")
A100 = Accuracy(0.94, 1.05, "ten published runs on A100, from which one constant comes")
H100 = Accuracy(0.97, 1.29, "25 published runs on H100")


def accuracy_on(server: Server) -> Accuracy:
    """Returns the error range of the server's GPU generation; of the newest that has one where there is none."""
    if server.gpu.compute_capability < (8, 0):
        return V100
    return A100 if server.gpu.compute_capability < (9, 0) else H100
