"""The inspector's own command-line options."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """What to compile for, and what to show."""

    target: str = "cpu"
    """cpu, attached, KINDxGPUS-PER-SERVER such as h100x8 (needs the extra aot, no GPU), or a .toml file of your own."""
    time_on: str | None = None
    """Servers whose speed and memory count, where they are not those compiled for: v100x16."""
    intra_bandwidth: float | None = None
    """GB/s of a GPU to the others in its server, one direction; the server's own when not given."""
    inter_bandwidth: float | None = None
    """GB/s of a GPU to other servers, one direction; the server's own when not given."""
    contract: Path | None = None
    """A contract of your own (TOML) instead of the layout's."""
    vs: tuple[str, ...] = ()
    """Compare with another mesh (8x8), settings (recompute=none) or config: two columns and the difference."""
    sweep: int | None = None
    """Try every (data, model) mesh of this many devices."""
    json: Path | None = None
    """Write the report as JSON; - prints it instead of the tables."""
    html: Path | None = None
    """Write the report as one self-contained page."""
    dump: Path | None = None
    """Write the program's HLO text into this folder."""

    def check(self) -> None:
        """Checks that the options fit each other.

        Raises:
          UserError: two of them don't.
        """
        if self.sweep is not None and self.vs:
            raise UserError("--sweep and --vs both compare: give one of them")
