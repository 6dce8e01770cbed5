"""The state of a run, without its arrays, when a checkpoint was saved: what a resumed run continues."""

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
from mtjax.config.horizon import Horizon, horizon_of
from mtjax.data import DataPosition, SampleOrder, train_samples, train_steps
from mtjax.layout.dropout import DROPOUT_BITS
from mtjax.runtime.checkpoints.corruption import CorruptedCheckpoint, read_metadata, read_on_all_processes
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.storage import is_file, names_in, shown, url_of


@dataclass(frozen=True)
class RunRecord:
    """Record of a run in a checkpoint's metadata, in addition to the config: decisions made when the run started.

    Attributes:
      position: the order of samples, and the text they are built from.
      horizon: steps over which learning rate and weight decay change.
      started_in: the working directory, to which relative paths refer.
    """

    position: DataPosition
    horizon: Horizon
    started_in: str

    def to_dict(self) -> dict[str, Any]:
        """Converts the record to JSON values."""
        return {
            "data": self.position.to_dict(),
            "horizon": dataclasses.asdict(self.horizon),
            "started_in": self.started_in,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunRecord":
        """Inverts `to_dict`."""
        horizon = Horizon(**values["horizon"])
        return cls(DataPosition.from_dict(values["data"]), horizon, values["started_in"])


@dataclass(frozen=True)
class Past:
    """A run as described by a checkpoint's metadata.

    Attributes:
      step: number of steps done.
      consumed_samples: number of samples consumed by these steps.
      tables: the config with which it was saved, as tables.
      record: the record of the run; None in checkpoints of mtjax before November 2026.
      dropout_bits: random bits that dropout drew per element.
    """

    step: int
    consumed_samples: int
    tables: Mapping[str, Mapping[str, Any]]
    record: RunRecord | None = None
    dropout_bits: int = DROPOUT_BITS

    @classmethod
    def from_metadata(cls, step: int, metadata: Mapping[str, Any]) -> "Past":
        """Reads a checkpoint's metadata.

        Raises:
          CorruptedCheckpoint: its record of the run is incomplete.
        """
        try:
            record = RunRecord.from_dict(metadata["run"]) if "run" in metadata else None
        except (KeyError, TypeError, AttributeError) as e:
            raise CorruptedCheckpoint("its metadata has an incomplete record of the run") from e
        # Before they were recorded, they were 32.
        bits = metadata.get("dropout_bits", 32)
        return cls(step, metadata["consumed_samples"], metadata["config"], record, bits)

    @cached_property
    def config(self) -> Config:
        """The config with which it was saved, without settings that this version does not have."""
        hints = get_type_hints(Config)
        known = {
            section: {name: value for name, value in table.items() if name in get_type_hints(hints[section])}
            for section, table in self.tables.items()
            if section in hints
        }
        return configs.from_dict(known, source="the checkpoint's config")

    @property
    def order(self) -> SampleOrder:
        """The order of its samples; without a record, that of the config with which the checkpoint was saved."""
        if self.record is not None:
            return self.record.position.order
        return SampleOrder(0, (train_samples(self.config.training),))

    @property
    def horizon(self) -> Horizon:
        """The steps over which its learning rate and weight decay change."""
        if self.record is not None:
            return self.record.horizon
        return horizon_of(self.config.optimizer, train_steps(self.config.training))


def newest_past(checkpoints: Path) -> Past | None:
    """Returns the newest checkpoint in a folder with usable metadata; None if there is none. All processes call it.

    Nothing is changed: corrupted checkpoints are reported and quarantined when the state is restored.

    Args:
      checkpoints: the folder of all steps, on this machine or in an object store.

    Raises:
      UserError: metadata can't be read, or have an unknown format version.
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
                metadata = read_metadata(folder)
                Past.from_metadata(step, metadata)
            except CorruptedCheckpoint:
                continue
            # Fingerprints are left out: the others need the settings alone, and they are long.
            return {"step": step, "metadata": {name: metadata[name] for name in metadata if name != "fingerprints"}}
        return None

    seen = read_on_all_processes(f"the newest checkpoint in {shown(checkpoints)}", checkpoints, look)
    found = json.loads(all_gather_text("the newest checkpoint", json.dumps(seen))[0])
    return Past.from_metadata(found["step"], found["metadata"]) if found else None
