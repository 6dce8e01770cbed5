"""What `mtjax train` reads besides the config."""

from dataclasses import dataclass
from typing import Literal

DESCRIPTION = """Trains a GPT, Llama, BERT or T5.

Without options: a small GPT, on the documentation that comes with Python, over 8 virtual CPU devices.

Examples:
  mtjax train --data book.txt --steps 500
  mtjax train --config gpt2-small --mesh 4x2 --out runs/small
  mtjax train --config runs/small/config.toml --resume
"""


@dataclass(frozen=True)
class Options:
    """For this start of the run only."""

    inspect: bool = False
    """Show what a step sends, as `mtjax inspect` does, before the first step."""
    compile_cache: str | None = None
    """Folder where compiled programs are kept for later starts, or off; $JAX_COMPILATION_CACHE_DIR when not given, else
    a folder in ~/.cache."""
    track: Literal["wandb", "mlflow"] | None = None
    """Also send the metrics to this experiment tracker, which must be installed."""
    allow_changed: str | None = None
    """With --resume: changes that may begin a new order of samples in the middle of the run, order (another seed or
    sequence length) and data (other training text, or another split of it), separated by commas."""
    profile: str | None = None
    """Trace these steps, 10:13, into the run's folder, for XProf, Perfetto and mtjax inspect --measured."""
