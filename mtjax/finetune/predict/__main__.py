"""`python -m mtjax.finetune.predict`, also `mtjax predict`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import WIDTH, at_least

DESCRIPTION = """Labels rows with a finetuned model; where the rows have labels, says how often they are met.

Examples:
  mtjax predict --from runs/rte-1 --data glue/RTE/test.tsv --out answers.jsonl
  mtjax predict --from hf:my-classifier --data reviews.jsonl
  mtjax predict --from runs/squad2-1 --data dev-v2.0.json --out answers.jsonl --official predictions.json
"""


@dataclass(frozen=True)
class Options:
    """What to label, with what, and where."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="WEIGHTS")]
    """The model: a finetuned run (its best checkpoint), a converted folder, or hf:DIR."""
    data: Path
    """Rows as the model was trained on: TSV with a header, JSON lines, a folder of RACE's, a file of SQuAD's."""
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
        options = read(Options, argv, "mtjax predict", DESCRIPTION)
        from mtjax.finetune.answers import check_out, report  # imports jax, for seconds
        from mtjax.finetune.predictions import predict

        check_out(options.out)
        check_out(options.official, "--official")
        settings = {"mesh": options.mesh, "rows": options.rows, "dtype": options.compute_dtype}
        report(predict(options.source, options.data, **settings), options.out, options.official)
        return 0

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
