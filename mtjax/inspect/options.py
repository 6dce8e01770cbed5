"""The inspector's own command-line options."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.setting import above_zero, at_least
from mtjax.errors import UserError
from mtjax.plan.options import MOST


@dataclass(frozen=True)
class Options:
    """What to compile for, and what to show."""

    target: str = "cpu"
    """cpu, attached, KINDxGPUS-PER-SERVER such as h100x8 (needs the extra aot, no GPU), or a .toml file of your own."""
    time_on: str | None = None
    """Predict time and memory on other servers than those compiled for, such as v100x16."""
    intra_bandwidth: float | None = above_zero(None)
    """GB/s from a GPU to the others in its server, in one direction; the server's own when not given."""
    inter_bandwidth: float | None = above_zero(None)
    """GB/s from a GPU to other servers, in one direction; the server's own when not given."""
    contract: Path | None = None
    """Check against a contract of your own (TOML) instead of the run's."""
    vs: tuple[str, ...] = ()
    """Compare with another mesh (8x8), settings (recompute=none) or config: two columns and the difference."""
    sweep: int | None = at_least(1, None, most=2**16)
    """Try every (data, model) mesh of this many devices."""
    measured: Path | None = None
    """Set the times of a trace beside the program: what mtjax train --profile wrote, or the run's folder."""
    json: Path | None = None
    """Write the report as JSON; - prints it instead of the tables."""
    html: Path | None = None
    """Write the report as one self-contained page."""
    price: float | None = None
    """Price of one GPU for one hour: the page says what the run costs."""
    dump: Path | None = None
    """Write the program's HLO text into this folder."""

    def check(self) -> None:
        """Checks that the options fit each other.

        Raises:
          UserError: two of them don't.
        """
        if self.price is not None and not 0 < self.price <= MOST["price"]:
            raise UserError(f"--price is {self.price}, and must be above 0 and at most {MOST['price']:g}")
        if self.price is not None and self.html is None:
            raise UserError("--price is shown on the page: give --html FILE, or ask mtjax plan")
        if self.sweep is not None and self.vs:
            raise UserError("--sweep and --vs both compare: give one of them")
        if self.measured is not None and (self.vs or self.sweep is not None):
            raise UserError("--measured is of one program: leave out --vs and --sweep")
