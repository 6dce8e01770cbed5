"""`python -m mtjax.finetune.ensemble`, also `mtjax ensemble`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.errors import UserError

DESCRIPTION = """Labels rows with several finetuned models: the mean of their probabilities, or of their numbers.

Where the rows have labels, it says how often each model and all together meet them: the paper's results of five models.

Examples:
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --seeds 5 --out runs/rte
  mtjax ensemble runs/rte/seed-* --data glue/RTE/dev.tsv
"""


@dataclass(frozen=True)
class Options:
    """What to label, with what, and where."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """The models: finetuned runs (the best checkpoint of each), converted folders, or hf:DIR."""
    data: Path
    """Rows as the models were trained on: TSV with a header, JSON lines, a folder of RACE's, a file of SQuAD's."""
    out: Path | None = None
    """JSON lines of answers to write, one for each row; printed when not given."""
    official: Path | None = None
    """SQuAD: another file, of the answers as the official script reads them: a JSON object from ids to texts."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL."""
    rows: int = at_least(1, 32, most=WIDTH)
    """Rows that each data rank reads at once."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of products."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        options = read(Options, argv, "mtjax ensemble", DESCRIPTION)
        if len(options.runs) < 2:
            raise UserError("an ensemble has two models or more: name their runs")
        from mtjax.finetune.answers import check_out, report  # imports jax, for seconds
        from mtjax.finetune.predictions import mean, predict

        check_out(options.out)
        check_out(options.official, "--official")
        settings = {"mesh": options.mesh, "rows": options.rows, "dtype": options.compute_dtype}
        members = {run: predict(run, options.data, **settings) for run in options.runs}
        report(mean(list(members.values())), options.out, options.official, members)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
