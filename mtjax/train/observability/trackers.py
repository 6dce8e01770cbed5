"""Experiment trackers in addition to `metrics.jsonl`: Weights & Biases and MLflow, if they are installed.

A tracker never ends a run: when it fails, the run reports it once and continues without it. A resumed run continues in
the tracker, too, by the id in its folder.
"""

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.place import was_copied
from mtjax.errors import UserError, first_line

FILE = "tracker.json"
PLACE = "folder"
"""Key for the run's folder, which distinguishes a copy from the original."""
PROJECT = "mtjax"
LONGEST = 500
"""Maximum length of a setting's value that all versions of MLflow accept."""


class Tracker(Protocol):
    """A service that metrics are sent to, in addition to the run's folder."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step, which are all finite."""
        ...

    def close(self) -> None:
        """Sends buffered metrics."""
        ...


class Wandb:
    """A run in Weights & Biases, in the project `mtjax` unless WANDB_PROJECT names another.

    Args:
      folder: of the run.
      settings: of the run, by section.
      known: the id of the run there; None when it begins.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], known: str | None) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            id=known,
            # Also begins the run if the service does not know the id.
            resume="allow",
            config=dict(settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # wandb's own step can't decrease, which happens on resume
        self.id: str = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class Mlflow:
    """A run in MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME; see `Wandb`."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], known: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self.id: str = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name).info.run_id
        if known is None:  # MLflow does not allow parameters to change
            flat = {f"{section}.{name}": value for section, of in settings.items() for name, value in of.items()}
            self._mlflow.log_params({name: str(value)[:LONGEST] for name, value in flat.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._mlflow.end_run()


TRACKERS: Mapping[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_tracker(name: str | None) -> None:
    """Checks that a tracker is installed.

    Raises:
      UserError: it is not installed.
    """
    if name is not None and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name} needs the package {name}: pip install {name}")


class Tracking:
    """A tracker that can fail without affecting the run.

    Args:
      name: of the tracker; None for none.
      folder: of the run.
      config: of the run.
      say: called with a sentence when the tracker fails.
    """

    def __init__(self, name: str | None, folder: Path, config: Config, say: Callable[[str], object]) -> None:
        self._name, self._say = name, say
        self._tracker: Tracker | None = None
        if name is not None:
            self._try(lambda: self._begin(name, folder, config))

    def log(self, entry: Mapping[str, Any]) -> None:
        """Sends an entry of the metrics, without values that are not finite."""
        if (tracker := self._tracker) is not None:
            values = {k: float(v) for k, v in entry.items() if k != "step" and math.isfinite(v)}
            self._try(lambda: tracker.log(entry["step"], values))

    def close(self) -> None:
        """Ends the tracker's run."""
        if (tracker := self._tracker) is not None:
            self._try(tracker.close)

    def _begin(self, name: str, folder: Path, config: Config) -> None:
        try:
            ids = json.loads((folder / FILE).read_text())
        except (OSError, ValueError):
            ids = {}
        if not isinstance(ids, dict) or was_copied(folder, ids.get(PLACE)):  # a copied folder is a separate run
            ids = {}
        tracker = TRACKERS[name](folder, configs.to_dict(config), ids.get(name))
        self._tracker = tracker
        (folder / FILE).write_text(json.dumps({name: tracker.id, PLACE: str(folder.resolve())}) + "\n")

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as e:
            self._tracker = None
            self._say(
                f"note    {self._name} failed, and the run continues without it: {type(e).__name__}: {first_line(e)}"
            )
