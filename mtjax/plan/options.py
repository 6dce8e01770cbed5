"""The planner's command-line options."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import TOKENS, at_least
from mtjax.errors import UserError
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.layout.mesh import MOST_DEVICES

PLOT_FORMATS = (".png", ".pdf", ".svg")
MOST = {"tokens": 1e18, "gpus": MOST_DEVICES, "days": 1e6, "price": 1e6, "context": TOKENS}
"""Largest values of options."""


@dataclass(frozen=True)
class Options:
    """Options of `mtjax plan`."""

    target: str = "h100x8"
    """GPU and GPUs per server: h100x8, a100-40x8, v100x16; h200 (8 in a server) - or a TOML file that describes one."""
    tokens: float | None = None
    """Tokens to train on, such as 300e9: prints steps and days."""
    gpus: int | None = None
    """Search for the fastest plan on this many GPUs, instead of reporting on one mesh."""
    days: float | None = None
    """Search for the fewest GPUs that train on --tokens within this many days."""
    price: float | None = None
    """Price of one GPU for one hour: prints the cost."""
    usable: float = USABLE_MEMORY
    """Share of a GPU's memory that a plan may fill."""
    exposed_share: float = 0.05
    """Exposed communication, as a share of the compute time, for which the needed bandwidth is printed."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert parallel rank over the mean load; all ranks wait for it."""
    serial_share: float = 0.0005
    """Share of the work that is serial, for Amdahl's bound."""
    teacher: str | None = None
    """Teacher weights of a distillation, as mtjax finetune names them; their memory and compute are counted too."""
    verify: bool = False
    """Compile the step for the target, without GPUs, and print the error of each formula."""
    inference: bool = False
    """Print memory and time of text generation."""
    context: int | None = None
    """Tokens of context for --inference; the model's sequence length when not given."""
    state_snapshots: int | None = at_least(0, None, most=2**16)
    """Maximum number of snapshots of recurrent states for --inference, as that of mtjax serve; 2 for each sequence when
    not given."""
    plot: Path | None = None
    """Plot memory and scaling to this PNG, PDF or SVG."""
    published: bool = False
    """Print predictions of published runs, with each gap."""

    def check(self, typed: Collection[str] = ()) -> None:
        """Checks values and combinations of the options.

        Args:
          typed: options of the command line.

        Raises:
          UserError: the first that is invalid.
        """
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name} is {value}, and must be above 0")
            if value is not None and value > most:
                raise UserError(f"--{name} is {value}, and must be at most {most:g}")
        for name in ("usable", "exposed_share", "serial_share"):
            value = getattr(self, name)
            # Results are divided by some of these, and would overflow.
            if not 1e-9 <= value <= 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}, and must be above 0 and at most 1")
        if not 1 <= self.expert_imbalance <= MOST_DEVICES:
            raise UserError(f"--expert-imbalance is {self.expert_imbalance:g}, and must be 1 or more: 1 is equal loads")
        if self.state_snapshots is not None and not self.inference:
            raise UserError(f"--state-snapshots {self.state_snapshots} needs --inference: add that, or remove it")
        if self.days is not None and self.tokens is None:
            raise UserError("--days needs --tokens: add it, for example --tokens 300e9")
        if self.days is not None and self.gpus is not None:
            raise UserError(
                f"--gpus {self.gpus} and --days {self.days:g} cannot be combined: each searches for the other; "
                "give one of them"
            )
        if "--mesh" in typed and (self.gpus is not None or self.days is not None):
            name = "--gpus" if self.gpus is not None else "--days"
            raise UserError(f"{name} searches for the mesh, and --mesh names one: remove one of them")
        if self.plot is not None and self.plot.suffix.lower() not in PLOT_FORMATS:
            raise UserError(f"--plot {self.plot} should end in one of {', '.join(PLOT_FORMATS)}")
        if self.plot is not None and not self.plot.parent.is_dir():
            raise UserError(f"--plot {self.plot}: the folder {self.plot.parent} does not exist")
        if self.verify and (self.gpus is not None or self.days is not None):
            raise UserError("--verify compiles one plan: give its --mesh, not --gpus or --days")
