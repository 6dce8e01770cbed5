"""Writes a translation as TOML, and a report of what it does not contain."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import tomli_w

from mtjax import config
from mtjax.config.run import section_by_setting
from mtjax.convert.from_megatron.given import GivenArguments
from mtjax.convert.from_megatron.translated import Translation
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.migrate.megatron import by_dest

_PYTORCH = r"NVTE_|TORCH_|PYTORCH_"
"""Environment variables of libraries that mtjax does not use."""


def tables_of(to: Translation) -> dict[str, dict[str, Any]]:
    """Returns settings by section: those of arguments that were given, and Megatron's defaults if mtjax's differ."""
    defaults = config.to_dict(config.replace(config.Config(), family=to.settings["family"]))
    sections = section_by_setting()
    # In the order of mtjax's settings, not of the arguments: a config reads like the documentation.
    order = [name for name in sections if name in to.settings]
    found: dict[str, dict[str, Any]] = {section: {} for section in defaults}
    for name in order:
        value = to.settings[name]
        # TOML has no tuples.
        value = list(value) if isinstance(value, tuple) else value
        # What was given is written even if it is mtjax's default: the config says what the script says.
        if name not in to.implied or value != defaults[sections[name]].get(name):
            found[sections[name]][name] = value
    return {section: table for section, table in found.items() if table}


def config_of(to: Translation) -> config.Config:
    """Returns the translated run.

    Raises:
      UserError: the settings are incompatible.
    """
    try:
        run = config.from_dict(tables_of(to), source=to.given.source)
        config.validate(run)
    except UserError as e:
        raise UserError(f"the settings that {to.given.source} translates to can't be used: {e}") from e
    return run


def toml_of(to: Translation, mesh: MeshShape) -> str:
    """Returns the run as TOML, with a comment on settings that follow from Megatron's defaults."""
    lines = [f"# Translated by `mtjax from-megatron` from {to.given.source}; {mesh.size:,} GPUs."]
    for section, table in tables_of(to).items():
        lines += ["", f"[{section}]"]
        for name, value in table.items():
            lines.append(f"{name} = {_toml(value)}" + ("  # Megatron-LM's default" if name in to.implied else ""))
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Formats a value as TOML, a list on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # tomli_w writes documents, not values.
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def report(to: Translation, config_error: str | None) -> str:
    """Returns a report of the arguments that were not translated exactly, one per line under a heading for each kind.

    Args:
      to: the translation.
      config_error: why `mtjax train` would reject the config; None if it would not.
    """
    given = to.given
    lines = [
        *_section("NOT TRANSLATED (unknown); the run may differ", ((typed, "") for typed in given.unlisted)),
        *_section("not supported by mtjax, and the effect", _named(given, to.unsupported)),
        *_section("on by default in mtjax, or not needed", [*_named(given, to.unneeded), *_not_read(given)]),
        *_section("translated, with a difference", ((line, "") for line in to.differences)),
        *_section("could not be read", given.unread),
        *_section("notes on the script", ((note, "") for note in given.notes)),
        *_section("run first", ((command, "") for command in to.run_first)),
        *_section("environment variables to set when starting the run", ((each, "") for each in to.environment)),
        *_section("environment variables of the script that hold for mtjax, too: set them as there", _kept(given)),
        *_section("options to add when starting the run", ((option, "") for option in to.run_options)),
    ]
    if config_error is not None:
        lines += [f"mtjax train will reject this config: {config_error}"]
    return "\n".join(lines)


def _named(given: GivenArguments, found: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields arguments as typed, in the order in which they were given, each with its reason."""
    order = list(given.values)
    for dest, why in sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 0):
        yield given.typed.get(dest, by_dest()[dest].names[0]), why


def _not_read(given: GivenArguments) -> Iterator[tuple[str, str]]:
    """Yields the script's environment variables that have no effect here, each with the reason."""
    for name, value in given.environment.items():
        if name == "CUDA_DEVICE_MAX_CONNECTIONS":
            yield f"{name}={value}", "it orders Megatron-LM's kernels and collectives; XLA orders its own"
        elif re.match(_PYTORCH, name):
            yield f"{name}={value}", "of PyTorch or Transformer Engine"


def _kept(given: GivenArguments) -> Iterator[tuple[str, str]]:
    """Yields the script's environment variables of libraries that mtjax uses, too."""
    for name, value in given.environment.items():
        if name != "CUDA_DEVICE_MAX_CONNECTIONS" and not re.match(_PYTORCH, name):
            yield f"{name}={value}", ""


def _section(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """Formats arguments and reasons in two columns; returns no lines if there are no rows."""
    listed = list(rows)
    # At most 44, so that one long argument does not push all reasons off the terminal.
    width = min(max((len(typed) for typed, why in listed if why), default=0), 44)
    lines = [f"  {typed:{width}}  {why}".rstrip() if why else f"  {typed}" for typed, why in listed]
    return [f"{heading}:", *lines] if lines else []
