"""The config of a run: seven sections in one frozen dataclass, and access to settings by name."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from mtjax.config.data import Data
from mtjax.config.families import family_of
from mtjax.config.finetuning import Finetuning
from mtjax.config.layer_pattern import num_pattern_layers
from mtjax.config.model import Model
from mtjax.config.optimizer import Optimizer
from mtjax.config.output import Output
from mtjax.config.parallel import Parallel
from mtjax.config.training import Training
from mtjax.errors import UserError, nearest


@dataclass(frozen=True)
class Config:
    """The config of a run."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    output: Output = field(default_factory=Output)
    finetuning: Finetuning = field(default_factory=Finetuning)


def replace(config: Config, **values: Any) -> Config:
    """Returns `config` with settings changed by name, whatever section they are in.

    A change of family also sets the defaults of the new family, and a pattern of layers their number, except for
    settings given here.

    Raises:
      UserError: a name that no section has.
    """
    sections = section_by_setting()
    if values.get("family", config.model.family) != config.model.family:
        # The defaults replace settings that belonged to another family, but not those of the same call, which the user
        # chose.
        values = {**family_of(values["family"]).defaults, **values}
    # A pattern that can't be read is not reported here: `validate` names it with what is wrong.
    if layers := num_pattern_layers(values.get("layer_pattern", "")):
        values = {"num_layers": layers, **values}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in sections:
            raise UserError(f"no setting is called {name!r}{nearest(name, sections)}")
        section = changed.get(sections[name], getattr(config, sections[name]))
        changed[sections[name]] = dataclasses.replace(section, **{name: value})
    return dataclasses.replace(config, **changed)


def section_by_setting() -> dict[str, str]:
    """Returns the section of each setting. Names are unique over all sections."""
    return {f.name: section for section, cls in get_type_hints(Config).items() for f in dataclasses.fields(cls)}
