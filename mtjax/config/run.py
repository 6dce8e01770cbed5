"""A run: seven sections in one frozen dataclass, and settings by their bare names."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from mtjax.config.data import Data
from mtjax.config.families import FAMILIES
from mtjax.config.finetuning import Finetuning
from mtjax.config.model import Model
from mtjax.config.optimizer import Optimizer
from mtjax.config.output import Output
from mtjax.config.parallel import Parallel
from mtjax.config.training import Training
from mtjax.errors import UserError, nearest


@dataclass(frozen=True)
class Config:
    """A run."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    output: Output = field(default_factory=Output)
    finetuning: Finetuning = field(default_factory=Finetuning)


def replace(config: Config, **values: Any) -> Config:
    """`config` with settings changed by their bare names, whatever section they are in.

    Another family brings its own defaults, except for settings that are given here too.

    Raises:
      UserError: a name that no section has.
    """
    sections = section_by_setting()
    if values.get("family", config.model.family) != config.model.family:
        values = {**FAMILIES[values["family"]].defaults, **values}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in sections:
            raise UserError(f"no setting is called {name!r}{nearest(name, sections)}")
        section = changed.get(sections[name], getattr(config, sections[name]))
        changed[sections[name]] = dataclasses.replace(section, **{name: value})
    return dataclasses.replace(config, **changed)


def section_by_setting() -> dict[str, str]:
    """Name of a setting -> name of its section. Names are unique over all sections."""
    return {f.name: section for section, cls in get_type_hints(Config).items() for f in dataclasses.fields(cls)}
