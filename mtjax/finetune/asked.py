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
"""File next to the folders of the runs: the settings of each run as they were given, by the name of its folder."""
FREE = ("output", "parallel")
"""Sections that may change: they do not affect the trained model."""


def record_settings(config: Config, folder: Path) -> None:
    """Records the settings of a new run, or checks that those of an existing one are the same.

    Args:
      config: of the run, as it was given.
      folder: of the run.

    Raises:
      UserError: the run began with other settings, or they are not recorded; the record can't be read or written.
    """
    path = folder.parent / RECORD
    record = read_object(path)
    now = settings_of(config)
    if folder.exists():
        begun = record.get(folder.name)
        command = f"mtjax finetune --config {folder}/config.toml --resume"
        alone = f"name another --out, or go on with that run alone: {command}"
        if not isinstance(begun, dict):
            raise UserError(f"{folder} has a run, and {path} does not say with which settings: {alone}")
        names = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
        if names:
            was, asked = (", ".join(f"{name} {_in_words(each.get(name))}" for name in names) for each in (begun, now))
            raise UserError(f"{folder} was begun with {was}, and this command has {asked}: {alone}")
        return
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps({**record, folder.name: now}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the settings that affect the trained model, by name, as JSON values."""
    tables = [table for section, table in configs.to_dict(config).items() if section not in FREE]
    return json.loads(json.dumps({name: value for table in tables for name, value in table.items()}))


def _in_words(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
