"""A run as frozen dataclasses: defaults are the paper's, TOML in and out, command line over file over default.

Every field has one name, unique over all sections, so that it is an option (`--hidden-size 256`) and a TOML key
(`hidden_size = 256` under `[model]`). `mtjax train --help` is made from the docstrings below the fields. Bounds of a
field, and whether it shapes the model, are its metadata (`setting.py`).
"""

from mtjax.config.checks import validate
from mtjax.config.data import Data
from mtjax.config.finetuning import Finetuning
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
    "read_toml",
    "replace",
    "save",
    "shipped_folder",
    "to_dict",
    "validate",
    "written",
]
