"""See the package."""

import json
import sys
from pathlib import Path

import numpy as np

from tests.parity.megatron_core.world import without_cuda

without_cuda()

from tests.parity.megatron_core.datasets import read_back, write_corpora, write_datasets
from tests.parity.megatron_core.grouped import write_grouped
from tests.parity.megatron_core.models import write_models
from tests.parity.megatron_core.prediction import write_predictions
from tests.parity.megatron_core.schedules import table
from tests.parity.megatron_core.training import write_run


def main(folder: Path) -> None:
    """All that the tests ask for; `ours` in the folder holds corpora that mtjax wrote."""
    for name in ("corpora", "datasets", "models"):
        (folder / name).mkdir()
    write_models(folder / "models")
    write_grouped(folder / "grouped.npz")
    write_corpora(folder / "corpora")
    write_datasets(folder / "datasets", folder / "corpora")
    np.savez(folder / "ours.npz", allow_pickle=False, **read_back(folder / "ours"))
    for name in ("gpt", "llama"):
        write_run(folder, name)
        write_predictions(folder, name)
    (folder / "schedules.json").write_text(json.dumps(table()))


def print_table() -> None:
    """One line a row: what `tests/train/megatron_schedules.json` holds."""
    rounded = {
        name: {kind: [float(f"{value:.9g}") for value in values] for kind, values in row.items()}
        for name, row in table().items()
    }
    rows = (f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in rounded.items())
    print("{\n" + ",\n".join(rows) + "\n}")


if sys.argv[1] == "schedules":
    print_table()
else:
    main(Path(sys.argv[1]))
