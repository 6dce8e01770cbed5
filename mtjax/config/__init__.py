"""Configuration of a run as frozen dataclasses: defaults of the paper, overridden by a TOML file, overridden by the
command line.

Every setting has one name, unique over all sections: it is an option (`--hidden-size 256`) and a TOML key (`hidden_size
= 256` under `[model]`). `mtjax train --help` shows the docstrings below the fields. The field's metadata holds its
bounds and whether it is part of the model's architecture (`field_metadata.py`).
"""

from mtjax.config.checks import validate
from mtjax.config.data import Data
from mtjax.config.finetuning import Finetuning
from mtjax.config.lists import options_in_order
from mtjax.config.model import Model
from mtjax.config.optimizer import Optimizer
from mtjax.config.output import Output
from mtjax.config.parallel import Parallel
from mtjax.config.run import Config, replace
from mtjax.config.toml import find, from_dict, load, read_toml, save, shipped_folder, to_dict, written
from mtjax.config.training import Training

__all__ = [
    "Config",
    "Data",
    "Finetuning",
    "Model",
    "Optimizer",
    "Output",
    "Parallel",
    "Training",
    "find",
    "from_dict",
    "load",
    "options_in_order",
    "read_toml",
    "replace",
    "save",
    "shipped_folder",
    "to_dict",
    "validate",
    "written",
]
