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
from mtjax.storage import check_out
from mtjax.waiting import IMPORTS, waiting

DESCRIPTION = """Predicts labels of rows with an ensemble of finetuned models: averages their probabilities or values.

If the rows have labels, prints the metrics of each model and of the ensemble, as the paper's results of five models.

Examples:
  mtjax finetune --task rte --data glue/RTE --init-from hf:bert-base-uncased --seeds 5 --out runs/rte
  mtjax ensemble runs/rte/seed-* --data glue/RTE/dev.tsv
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax ensemble`."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """The models: finetuned runs (the best checkpoint of each), converted folders, or hf:DIR."""
    data: Path
    """Rows in the format of the training data: TSV with a header, JSON lines, a folder of RACE or a file of SQuAD."""
    out: Path | None = None
    """File for the answers, as JSON lines, one for each row. Default: standard output."""
    official: Path | None = None
    """SQuAD: additional file for the answers in the official script's format, a JSON object from ids to texts."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL."""
    rows: int = at_least(1, 32, most=WIDTH)
    """Batch size per data-parallel rank."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of matrix multiplications."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    def body() -> int:
        options = read(Options, argv, "mtjax ensemble", DESCRIPTION)
        if len(options.runs) < 2:
            raise UserError("an ensemble requires two or more models: name their runs")
        with waiting(IMPORTS):
            from mtjax.finetune.answers import report
            from mtjax.finetune.predictions import mean, predict

        # Before the models are loaded.
        check_out(options.out)
        check_out(options.official, "--official")
        settings = {"mesh": options.mesh, "rows": options.rows, "dtype": options.compute_dtype}
        members = {}
        for run in options.runs:
            with waiting(f"labelling rows with {run}"):
                members[run] = predict(run, options.data, **settings)
        report(mean(list(members.values())), options.out, options.official, members)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
