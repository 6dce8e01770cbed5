"""What `mtjax train` reads besides the config."""

from dataclasses import dataclass

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
