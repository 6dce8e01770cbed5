"""The state of a run, apart from its arrays, when a checkpoint was saved: what a resumed run continues."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import jax

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import DataPosition, SampleOrder, train_samples
from mtjax.storage import is_file, names_in, shown, url_of
from mtjax.train.checkpoints.corruption import CorruptedCheckpoint, read_metadata, read_on_all_processes
from mtjax.train.processes.coordination import all_gather_text
from mtjax.train.schedule import Horizon, horizon_of


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint's page records of its run in addition to the config: decisions made when the run began.

    Attributes:
      position: the order of samples, and what they are made from.
      horizon: over which steps the learning rate decays and the weight decay grows.
      started_in: the working directory, which relative paths refer to.
    """

    position: DataPosition
    horizon: Horizon
    started_in: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "data": self.position.to_dict(),
            "horizon": dataclasses.asdict(self.horizon),
            "started_in": self.started_in,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunRecord":
        """The inverse of `to_dict`."""
        horizon = Horizon(**values["horizon"])
        return cls(DataPosition.from_dict(values["data"]), horizon, values["started_in"])


@dataclass(frozen=True)
class Past:
    """A run as a checkpoint's page describes it.

    Attributes:
      step: steps that are done.
      consumed_samples: by these.
      tables: the config with which it was saved, as the page has it.
      record: what else the page has; None in checkpoints of mtjax before November 2026.
    """

    step: int
    consumed_samples: int
    tables: Mapping[str, Mapping[str, Any]]
    record: RunRecord | None = None

    @classmethod
    def from_metadata(cls, step: int, page: Mapping[str, Any]) -> "Past":
        """Reads a page.

        Raises:
          Damaged: its record of the run lacks something.
        """
        try:
            record = RunRecord.from_dict(page["run"]) if "run" in page else None
        except (KeyError, TypeError, AttributeError) as e:
            raise CorruptedCheckpoint("its page of metadata has an incomplete record of the run") from e
        return cls(step, page["consumed_samples"], page["config"], record)

    @cached_property
    def config(self) -> Config:
        """The config with which it was saved; settings that this version does not have are left out."""
        hints = get_type_hints(Config)
        known = {
            section: {name: value for name, value in table.items() if name in get_type_hints(hints[section])}
            for section, table in self.tables.items()
            if section in hints
        }
        return configs.from_dict(known, source="the checkpoint's config")

    @property
    def order(self) -> SampleOrder:
        """The order of its samples; without a record it is that of the config with which the checkpoint was saved."""
        if self.record is not None:
            return self.record.position.order
        return SampleOrder(0, (train_samples(self.config.training),))

    @property
    def horizon(self) -> Horizon:
        """Over which steps its learning rate decays and its weight decay grows."""
        if self.record is not None:
            return self.record.horizon
        return horizon_of(self.config.optimizer, self.config.training.steps)


def newest_past(checkpoints: Path) -> Past | None:
    """The newest checkpoint below a folder whose page can be used; None where there is none. All processes call it.

    Nothing is changed: damaged checkpoints are named and set aside when the state is restored.

    Args:
      checkpoints: the folder of all steps, on this machine or in an object store.

    Raises:
      UserError: a page can't be read, or has an unknown version.
    """

    def look() -> dict[str, Any] | None:
        if jax.process_index() != 0:
            return None
        url = url_of(checkpoints)
        names = names_in(url) if url else [path.name for path in checkpoints.glob("*")]
        for step in sorted((int(name) for name in names if name.isdigit()), reverse=True):
            folder = checkpoints / str(step)
            if url and not is_file(folder / "page" / "metadata"):
                continue  # a save that was killed
            try:
                page = read_metadata(folder)
                Past.from_metadata(step, page)
            except CorruptedCheckpoint:
                continue
            return {"step": step, "page": {name: page[name] for name in page if name != "fingerprints"}}
        return None

    seen = read_on_all_processes(f"the newest checkpoint in {shown(checkpoints)}", checkpoints, look)
    found = json.loads(all_gather_text("the newest checkpoint", json.dumps(seen))[0])
    return Past.from_metadata(found["step"], found["page"]) if found else None
