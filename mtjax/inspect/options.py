"""The inspector's own command-line options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtjax.config.field_metadata import above_zero, at_least
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
    teacher: str | None = None
    """Weights of a model that the run learns from, as mtjax finetune names them: the step beside it."""
    generate: bool = False
    """Inspect the step of decoding that mtjax generate runs instead of the train step."""
    sequences: int = at_least(1, 8, most=4096)
    """With --generate: sequences that are written at a time."""
    context: int | None = at_least(1, None, most=2**24)
    """With --generate: tokens of each sequence for which the cache has room; sequence_length when not given."""
    weights_dtype: Literal["int8"] | None = None
    """With --generate: keep matrices in 8 bits, as mtjax generate --weights-dtype int8 does."""

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
        self._check_generate()

    def _check_generate(self) -> None:
        of_training = (
            "time_on",
            "intra_bandwidth",
            "inter_bandwidth",
            "contract",
            "sweep",
            "measured",
            "html",
            "teacher",
        )
        given = [name for name in (*of_training, "vs") if getattr(self, name) not in (None, ())]
        if self.generate and given:
            raise UserError(f"--{given[0].replace('_', '-')} is of train steps: leave it out with --generate")
        defaults = Options()
        idle = [
            name for name in ("sequences", "context", "weights_dtype") if getattr(self, name) != getattr(defaults, name)
        ]
        if idle and not self.generate:
            raise UserError(f"--{idle[0].replace('_', '-')} has an effect with --generate only: leave it out")
