"""Old name of `mtjax.config.model`."""

from mtjax.config.model import Model as Model
