"""The inspector's command-line options."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from mtjax.config.field_metadata import above_zero, at_least
from mtjax.config.storage import PLAIN, Storage
from mtjax.errors import UserError
from mtjax.plan.options import MOST


@dataclass(frozen=True)
class Options:
    """Options of `mtjax inspect`."""

    target: str = "cpu"
    """cpu, attached, GPUxGPUS-PER-SERVER such as h100x8 (needs the extra aot, no GPU), or a .toml file."""
    time_on: str | None = None
    """Predict time and memory on other servers than those compiled for, such as v100x16."""
    intra_bandwidth: float | None = above_zero(None)
    """GB/s between the GPUs of a server, per GPU and direction; the server's when not given."""
    inter_bandwidth: float | None = above_zero(None)
    """GB/s between servers, per GPU and direction; the server's when not given."""
    contract: Path | None = None
    """Check against this contract (TOML) instead of the run's."""
    vs: tuple[str, ...] = ()
    """Compare with another mesh (8x8), settings (recompute=none) or config: two columns and the difference."""
    sweep: int | None = at_least(1, None, most=2**16)
    """Compile for every (data, model) mesh of this many devices."""
    kernels: bool | None = None
    """Read the machine code of every GPU kernel: instructions, registers, memory accesses, and the source lines of slow
    kernels (needs the extra aot, takes seconds). When not given: of one step with at most 250 kernels."""
    measured: Path | None = None
    """Compare with the measured times of a trace that mtjax train --profile wrote; the trace or the run's folder."""
    json: Path | None = None
    """Write the report as JSON; - prints it instead of the tables."""
    html: Path | None = None
    """Write the report as one self-contained HTML page."""
    price: float | None = None
    """Price of one GPU for one hour, for the cost of the run on the HTML page."""
    dump: Path | None = None
    """Write the program's HLO text to this folder."""
    teacher: str | None = None
    """Teacher weights of a distillation, as mtjax finetune names them: compile the student's step."""
    generate: bool = False
    """Inspect the decode step of mtjax generate instead of the train step."""
    sequences: int = at_least(1, 8, most=4096)
    """With --generate: sequences decoded together."""
    context: int | None = at_least(1, None, most=2**24)
    """With --generate: length of the KV cache in tokens; sequence_length when not given."""
    storage: tyro.conf.OmitArgPrefixes[Storage] = field(default_factory=Storage)

    def check(self) -> None:
        """Checks that the options can be combined.

        Raises:
          UserError: two of them can't.
        """
        if self.price is not None and not 0 < self.price <= MOST["price"]:
            raise UserError(f"--price is {self.price}, and must be above 0 and at most {MOST['price']:g}")
        if self.price is not None and self.html is None:
            raise UserError("--price needs the HTML page: give --html FILE, or use mtjax plan --price")
        if self.sweep is not None and self.vs:
            raise UserError("--sweep and --vs cannot be combined: give one of them")
        if self.measured is not None and (self.vs or self.sweep is not None):
            raise UserError("--measured works with one program: remove --vs and --sweep")
        if self.kernels and self.time_on is not None:
            raise UserError("--kernels reads the machine code of --target, not of --time-on: remove one of them")
        if self.kernels and self.sweep is not None:
            raise UserError("--kernels and --sweep cannot be combined: inspect the mesh that --sweep finds")
        self._check_generate()
        self.storage.check()

    def _check_generate(self) -> None:
        """Checks that there are no options of train steps with --generate, nor its options without it."""
        train_only = (
            "time_on",
            "intra_bandwidth",
            "inter_bandwidth",
            "contract",
            "sweep",
            "measured",
            "html",
            "teacher",
            "kernels",
        )
        given = [name for name in (*train_only, "vs") if getattr(self, name) not in (None, (), False)]
        if self.generate and given:
            raise UserError(f"--{given[0].replace('_', '-')} works for train steps only: remove it with --generate")
        defaults = Options()
        unused = [name for name in ("sequences", "context") if getattr(self, name) != getattr(defaults, name)]
        unused += [name for name, value in asdict(self.storage).items() if value != getattr(PLAIN, name)]
        if unused and not self.generate:
            raise UserError(f"--{unused[0].replace('_', '-')} needs --generate: add --generate, or remove it")
