"""`python -m mtjax.finetune.predict`, also `mtjax predict`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.storage import check_out
from mtjax.waiting import IMPORTS, waiting

DESCRIPTION = """Predicts labels of rows with a finetuned model; if the rows have labels, prints the task's metrics.

Examples:
  mtjax predict --from runs/rte-1 --data glue/RTE/test.tsv --out answers.jsonl
  mtjax predict --from hf:my-classifier --data reviews.jsonl
  mtjax predict --from runs/squad2-1 --data dev-v2.0.json --out answers.jsonl --official predictions.json
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax predict`."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="WEIGHTS")]
    """The model: a finetuned run (its best checkpoint), a converted folder, or hf:DIR."""
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
        options = read(Options, argv, "mtjax predict", DESCRIPTION)
        with waiting(IMPORTS):
            from mtjax.finetune.answers import report
            from mtjax.finetune.predictions import predict

        # Before the model is loaded.
        check_out(options.out)
        check_out(options.official, "--official")
        settings = {"mesh": options.mesh, "rows": options.rows, "dtype": options.compute_dtype}
        with waiting(f"labelling rows with {options.source}"):
            predictions = predict(options.source, options.data, **settings)
        report(predictions, options.out, options.official)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
