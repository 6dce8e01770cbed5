"""Old name of `mtjax.config.training`."""

from mtjax.config.training import Training as Training
