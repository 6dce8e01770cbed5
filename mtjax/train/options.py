"""Options of `mtjax train` that are not part of the config."""

from dataclasses import dataclass
from typing import Literal

DESCRIPTION = """Trains a language model: GPT, Llama, hybrid (Mamba-2), BERT, T5 or Retro.

Without options: a small GPT, on the documentation that comes with Python, over 8 virtual CPU devices.

Examples:
  mtjax train --data book.txt --steps 500
  mtjax train --config gpt2-small --mesh 4x2 --data corpus.txt --tokenizer gpt2:FOLDER --out runs/small
  mtjax train --config runs/small/config.toml --resume
"""


@dataclass(frozen=True)
class Options:
    """Options of this start of the run only."""

    inspect: bool = False
    """Print the communication of a training step before the first step, as `mtjax inspect` does."""
    compile_cache: str | None = None
    """Folder that caches compiled programs for later starts, or off; when not given, $JAX_COMPILATION_CACHE_DIR, or
    else a folder in ~/.cache."""
    track: Literal["wandb", "mlflow"] | None = None
    """Also log metrics to this experiment tracker, which must be installed."""
    allow_changed: str | None = None
    """With --resume, allow changes, separated by commas. Two start a new order of samples in the middle of the run:
    order (another seed or sequence length) and data (other training text or another split). With neighbours, a retro
    reads those that replaced its own under the same prefix."""
    profile: str | None = None
    """Profile these steps, such as 10:13, into the run's folder, for XProf, Perfetto and mtjax inspect --measured."""
