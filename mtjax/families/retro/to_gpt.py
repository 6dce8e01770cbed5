"""The decoder of a Retro as a GPT: without the encoder and chunked cross-attention."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from mtjax.config import Model, replace
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.stream import WeightSource
from mtjax.errors import UserError
from mtjax.families.retro.config import RETRO as RETRO_SETTINGS
from mtjax.families.retro.layout import FIRST_ATTENTION, FIRST_REST, PLAIN, RETRO
from mtjax.layout.stacks import STACK


class DecoderSource:
    """The weights of a Retro's decoder, as those of a GPT."""

    def __init__(self, source: WeightSource) -> None:
        """Selects the weights of another source.

        Raises:
          UserError: they are not a Retro's, or its decoder is not a GPT.
        """
        origin = source.origin
        if origin.config.model.family != "retro":
            raise UserError(
                f"--without-encoder is for the family retro, and the weights are of a {origin.config.model.family}: "
                "remove it"
            )
        if not origin.config.model.retro_final_norm:
            raise UserError("--without-encoder writes a gpt, which has a final norm, and retro_final_norm is false")
        plain = {name: getattr(Model(), name) for name in RETRO_SETTINGS}
        config = replace(
            origin.config, neighbours=None, **{**plain, **of_decoder(origin.config.model), "family": "gpt"}
        )
        self._source = source
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        note = "without the encoder and chunked cross-attention: it reads no neighbours"
        self.origin = dataclasses.replace(origin, config=config, notes=(*origin.notes, note), hugging_face={})

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer."""
        stack, _, name = parameter.name.partition(".layers.")
        if stack != STACK:
            yield from self._source.slices(self._source.parameters[parameter.name])
            return
        of_layer = {}
        for path in (PLAIN, FIRST_ATTENTION, FIRST_REST, RETRO):
            if (of_name := self._source.parameters.get(f"{path}.layers.{name}")) is not None:
                # One iterator for all layers of a stack: they are read in order, each once.
                of_layer |= dict.fromkeys(of_name.numbers, self._source.slices(of_name))
        for number in range(parameter.num_layers or 0):
            yield next(of_layer[number])
        for rest in set(of_layer.values()):
            left = next(rest, None)  # it verifies its fingerprint at the end, also where asserts are off
            assert left is None


def of_decoder(model: Model) -> dict[str, object]:
    """Returns the settings that a change of family would set to its defaults."""
    names = ("norm", "norm_epsilon", "position", "activation", "bias", "tie_embeddings")
    return {name: getattr(model, name) for name in (*names, "hidden_dropout", "attention_dropout")}
