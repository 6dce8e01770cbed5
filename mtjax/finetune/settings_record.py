"""A record of the settings of each run in a sweep or over several seeds: results of other settings are not reused."""

import json
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data.tokens.pretrained_settings import read_object
from mtjax.errors import UserError
from mtjax.train.folder.run_folder import writing

RECORD = "settings.json"
"""Name of the file next to the runs' folders: folder name -> settings with which the run was started."""
FREE = ("output", "parallel")
"""Sections that may change, as they do not affect the trained model."""


def record_settings(config: Config, folder: Path) -> None:
    """Records the settings of a new run, or checks that those of an existing run are the same.

    Args:
      config: config of the run, before steps and lengths are filled in.
      folder: folder of the run.

    Raises:
      UserError: the run was started with other settings, or they are not recorded; the record can't be read or written.
    """
    path = folder.parent / RECORD
    record = read_object(path)
    settings = settings_of(config)
    # A run that exists is resumed only with the same settings: results of others are not comparable.
    if folder.exists():
        recorded = record.get(folder.name)
        command = f"mtjax finetune --config {folder}/config.toml --resume"
        advice = f"name another --out, or resume only that run with {command}"
        if not isinstance(recorded, dict):
            raise UserError(f"{folder} has a run whose settings are not recorded in {path}: {advice}")
        names = [name for name in {**recorded, **settings} if recorded.get(name) != settings.get(name)]
        if names:
            old, new = (
                ", ".join(f"{name} {_shown(values.get(name))}" for name in names) for values in (recorded, settings)
            )
            raise UserError(f"{folder} was started with {old}, but this command has {new}: {advice}")
        return
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps({**record, folder.name: settings}, indent=2) + "\n", encoding="utf-8")
        # Atomic: an interruption leaves the record of the earlier runs.
        temporary.replace(path)


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the settings that affect the trained model, by name, as JSON values."""
    tables = [table for section, table in configs.to_dict(config).items() if section not in FREE]
    # Through JSON, so that tuples compare equal to the lists of a stored record.
    return json.loads(json.dumps({name: value for table in tables for name, value in table.items()}))


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
