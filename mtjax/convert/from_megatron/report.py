"""A translation as TOML, and what is told about it."""

from collections.abc import Iterable, Iterator
from typing import Any

import tomli_w

from mtjax import config
from mtjax.config.run import section_by_setting
from mtjax.convert.from_megatron.given import Given
from mtjax.convert.from_megatron.translated import Translation
from mtjax.errors import UserError
from mtjax.migrate.megatron import by_dest
from mtjax.theory.mesh import MeshShape


def tables_of(to: Translation) -> dict[str, dict[str, Any]]:
    """Returns the settings that were given, and those of Megatron's defaults that differ from ours, by section."""
    usual = config.to_dict(config.replace(config.Config(), family=to.settings["family"]))
    sections = section_by_setting()
    order = [name for name in sections if name in to.settings]
    found: dict[str, dict[str, Any]] = {section: {} for section in usual}
    for name in order:
        value = to.settings[name]
        value = list(value) if isinstance(value, tuple) else value
        if name not in to.implied or value != usual[sections[name]].get(name):
            found[sections[name]][name] = value
    return {section: table for section, table in found.items() if table}


def config_of(to: Translation) -> config.Config:
    """Returns the translated run.

    Raises:
      UserError: its settings don't fit each other.
    """
    try:
        run = config.from_dict(tables_of(to), source=to.given.source)
        config.validate(run)
    except UserError as e:
        raise UserError(f"the settings that {to.given.source} translates to can't be used: {e}") from e
    return run


def toml_of(to: Translation, mesh: MeshShape) -> str:
    """Returns the run as TOML, with a comment after what follows from Megatron's defaults."""
    lines = [f"# Translated by `mtjax from-megatron` from {to.given.source}; {mesh.size:,} GPUs."]
    for section, table in tables_of(to).items():
        lines += ["", f"[{section}]"]
        for name, value in table.items():
            lines.append(f"{name} = {_toml(value)}" + ("  # Megatron-LM's default" if name in to.implied else ""))
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML writes it, a list on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def told(to: Translation, refused: str | None) -> str:
    """Returns what did not carry over: by kind, one argument a line.

    Args:
      to: the translation.
      refused: why mtjax would not start the run, None where it would.
    """
    given = to.given
    parts = [
        *_part("no equal in mtjax, and what changes", _named(given, to.without)),
        *_part("on by default in mtjax, or not needed", _named(given, to.needless)),
        *_part("translated, with a difference", ((line, "") for line in to.differs)),
        *_part("not in the table of arguments, and left out", ((typed, "") for typed in given.unlisted)),
        *_part("could not be read", given.unread),
        *_part("notes on the script", ((note, "") for note in given.notes)),
        *_part("to type when the run is started", ((option, "") for option in to.with_run)),
    ]
    if refused is not None:
        parts += [f"mtjax train refuses this run: {refused}"]
    return "\n".join(parts)


def _named(given: Given, found: dict[str, str]) -> Iterator[tuple[str, str]]:
    order = list(given.values)
    for dest, why in sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 0):
        yield given.typed.get(dest, by_dest()[dest].names[0]), why


def _part(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    width = min(max((len(typed) for typed, why in listed if why), default=0), 44)
    lines = [f"  {typed:{width}}  {why}".rstrip() if why else f"  {typed}" for typed, why in listed]
    return [f"{heading}:", *lines] if lines else []
