"""With which settings the runs of a sweep or of several seeds were begun: results of others are not theirs."""

import json
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data.tokens.pretrained_settings import read_object
from mtjax.errors import UserError
from mtjax.train.folder.run_folder import writing

RECORD = "settings.json"
"""Beside the runs' folders: of each, by the folder's name, its settings as they were given."""
FREE = ("output", "parallel")
"""Sections that may change: they don't say what is learnt."""


def record_settings(config: Config, folder: Path) -> None:
    """Records the settings of a run that is about to be begun, or checks that they are those of its beginning.

    Args:
      config: of the run, as it was given.
      folder: of the run.

    Raises:
      UserError: the run was begun with others, or nothing says with which; the record can't be read or written.
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
    """Returns the settings that decide what is learnt, by their names, as JSON has them."""
    tables = [table for section, table in configs.to_dict(config).items() if section not in FREE]
    return json.loads(json.dumps({name: value for table in tables for name, value in table.items()}))


def _in_words(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
