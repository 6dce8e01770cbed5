"""Reading and writing configs as TOML: files of the user, and configs that ship with mtjax."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from mtjax.config.lists import in_order
from mtjax.config.renamed import with_new_names
from mtjax.config.run import Config, replace, section_by_setting
from mtjax.errors import UserError, nearest
from mtjax.migrate.argument import option_of
from mtjax.migrate.suggest import meaning
from mtjax.storage import is_file, read_bytes, shown


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Converts a config to plain tables of TOML and JSON values; fields that are None are omitted."""

    def plain(value: Any) -> Any:
        return shown(value) if isinstance(value, Path) else value

    return {
        section: {k: plain(v) for k, v in table.items() if v is not None}
        for section, table in dataclasses.asdict(config).items()
    }


def from_dict(tables: Mapping[str, Any], base: Config | None = None, source: str = "config") -> Config:
    """Returns `base` (the defaults) overridden by the values of `tables`.

    Raises:
      UserError: an unknown table or key, or a value of the wrong type; `source` names the file.
    """
    config = base or Config()
    hints = get_type_hints(Config)
    for section, table in with_new_names(tables).items():
        if section not in hints:
            owner = section_by_setting().get(section)
            hint = f" - it goes under [{owner}]" if owner else nearest(section, hints)
            raise UserError(f"{source}: unknown {'table' if isinstance(table, Mapping) else 'key'} {section!r}{hint}")
        if not isinstance(table, Mapping):
            raise UserError(f"{source}: {section} is a table, not a value: write [{section}] on a line of its own")
        fields = get_type_hints(hints[section])
        # A family and a pattern of layers set the defaults of other settings.
        for name, value in sorted(table.items(), key=lambda item: (item[0] != "family", item[0] != "layer_pattern")):
            if name not in fields:
                owner = section_by_setting().get(name)
                hint = f" - it goes under [{owner}]" if owner else _advice(name, value, fields)
                raise UserError(f"{source}: unknown key {name!r} in [{section}]{hint}")
            config = replace(
                config, **{name: _typed(fields[name], in_order(name, value), f"{source}: [{section}] {name}")}
            )
    return config


def _advice(name: str, value: Any, fields: Mapping[str, Any]) -> str:
    """Returns a hint for a key that does not exist: the setting that another tool means by it, or the nearest name."""
    meant = meaning(option_of(name), str(value), {option_of(setting) for setting in section_by_setting()})
    if meant is None:
        return nearest(name, fields)
    return re.sub(r"--([\w-]+)", lambda option: option[1].replace("-", "_"), meant)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """Converts `value` to the type of a field's annotation."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{where} = {value!r} is not one of {', '.join(map(repr, get_args(hint)))}")
        return value
    kinds = [t for t in (get_args(hint) or (hint,)) if t is not type(None)]
    for kind in kinds:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            # An integer may stand for a float: 1 for 1.0. A boolean may not, although it is an int in Python.
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if get_origin(kind) is tuple and isinstance(value, list):
            members = _members(kind, value)
            value = [float(v) if t is float and type(v) is int else v for t, v in zip(members, value, strict=False)]
            if [type(v) for v in value] == members:
                return tuple(value)
        # Exactly: True must not pass for 1.
        if type(value) is kind:
            return value
    raise UserError(f"{where} = {value!r} should be {' or '.join(map(_type_name, kinds))}")


def _members(kind: Any, value: list[Any]) -> list[type]:
    """Returns the types of a tuple's members; for `tuple[int, ...]` one per value."""
    members = get_args(kind)
    return [members[0]] * len(value) if members[1:] == (...,) else list(members)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        return f"a list of {get_args(kind)[0].__name__}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} {get_args(kind)[0].__name__}"
    return kind.__name__


def load(name: str | Path, base: Config | None = None) -> Config:
    """Reads a TOML file: a path, or the name of a config that ships with mtjax.

    Raises:
      UserError: neither exists, the file is not TOML, or a key or value in it is wrong.
    """
    path = find(name)
    return from_dict(read_toml(path), base, source=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a TOML file, which may begin with a byte order mark (as on Windows).

    Raises:
      UserError: it can't be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_bytes(path).decode("utf-8-sig"))
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e
    except RecursionError as e:
        raise UserError(f"{path} is not valid TOML: its values are nested too deep") from e
    except ValueError as e:  # TOMLDecodeError, UnicodeDecodeError, and numbers of more digits than Python reads
        raise UserError(f"{path} is not valid TOML: {e}") from e


def find(name: str | Path) -> Path:
    """Returns the file of `--config NAME`: the path itself, or the shipped config of that name."""
    path = Path(name)
    try:
        if is_file(path):
            return path
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"--config {str(name)[:60]!r} can't be read: {why}") from e
    shipped = {p.stem: p for p in sorted(shipped_folder().glob("*.toml"))}
    # Also by a path in a checkout (configs/NAME.toml), which an installed package does not have.
    if str(name) in shipped or path.name in {p.name for p in shipped.values()}:
        return shipped[path.name.removesuffix(".toml")]
    hint = nearest(path.name.removesuffix(".toml"), shipped)
    raise UserError(f"no config file {str(name)!r}, and none of that name ships with mtjax{hint}")


def shipped_folder() -> Path:
    """Returns `configs/`: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    return next((d for d in (package / "configs", package.parent / "configs") if d.is_dir()), package / "configs")


DEFAULTS_BELOW = "# Defaults:"
"""The line in a saved config that separates the settings that were changed from those with default values."""


def save(config: Config, path: Path) -> None:
    """Writes `config` as TOML, atomically; in each section, settings that differ from the defaults come first."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(written(config))
    # A run that is ended here has the old file or the new one, never half of one.
    temporary.replace(path)


def written(config: Config) -> str:
    """Returns a config as TOML, with all settings: in each section, those that differ from the defaults first."""
    # A family's own defaults count as defaults, and the family as chosen unless it is the default itself.
    defaults = to_dict(replace(Config(), family=config.model.family))
    defaults["model"]["family"] = Config().model.family
    sections = []
    for section, table in to_dict(config).items():
        chosen = {name: value for name, value in table.items() if value != defaults[section].get(name)}
        unchanged = {name: value for name, value in table.items() if name not in chosen}
        parts = [
            f"[{section}]\n",
            tomli_w.dumps(chosen),
            f"{DEFAULTS_BELOW}\n" if unchanged else "",
            tomli_w.dumps(unchanged),
        ]
        sections.append("".join(parts))
    return "\n".join(sections)
