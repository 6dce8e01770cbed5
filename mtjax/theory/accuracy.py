"""How far predicted times were off for runs that others have published, and so how far they may be off here."""

from dataclasses import dataclass

from mtjax.theory.hardware import Server


@dataclass(frozen=True)
class Accuracy:
    """Published times over predicted ones."""

    least: float
    most: float
    runs: str
    """Which."""

    def around(self, seconds: float) -> tuple[float, float]:
        """The shortest and the longest that a run may take which is predicted to take so long."""
        return self.least * seconds, self.most * seconds

    @property
    def in_words(self) -> str:
        """Where a range comes from, for a caption."""
        return f"{self.runs} took {self.least:.2f} to {self.most:.2f} times the predicted time"


V100 = Accuracy(0.81, 1.67, "twelve published runs on V100")
A100 = Accuracy(0.94, 1.05, "ten published runs on A100, from which one constant comes")
H100 = Accuracy(0.97, 1.29, "25 published runs on H100")


def accuracy_on(server: Server) -> Accuracy:
    """Of the generation of a server's GPUs; of the newest with published runs where there are none."""
    if server.gpu.compute_capability < (8, 0):
        return V100
    return A100 if server.gpu.compute_capability < (9, 0) else H100
