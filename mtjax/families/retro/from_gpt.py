"""A GPT as the decoder of a new Retro, whose encoder and chunked cross-attention are drawn (Retro-fitting, arXiv
2112.04426, section 4.4)."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtjax.config import Config, Model, from_dict, replace, validate
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.stream import WeightSource
from mtjax.errors import UserError
from mtjax.families.retro.config import RETRO as RETRO_SETTINGS
from mtjax.families.retro.config import is_added
from mtjax.families.retro.to_gpt import of_decoder
from mtjax.layout.mesh import MeshShape
from mtjax.layout.stacks import STACK
from mtjax.models.named_parameters import draw_named
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.device_mesh import make_mesh


class RetroSource:
    """The weights of a GPT, and drawn ones of what Retro adds."""

    def __init__(self, source: WeightSource, file: Path) -> None:
        """Reads the settings of Retro from a config.

        Args:
          source: weights of a GPT with learned positions.
          file: a TOML config with `[model]`, whose other settings, if it has any, are the GPT's.

        Raises:
          UserError: the weights are not those of such a GPT, or the config can't be read or describes another model.
        """
        origin = source.origin
        gpt, tables = origin.config.model, _tables(file)
        if gpt.family != "gpt":
            raise UserError(f"--with-encoder makes a retro of a gpt, and the weights are of a {gpt.family}: remove it")
        wanted = from_dict(tables, source=str(file))
        given = tables.get("model", {})
        if given.get("family", "retro") != "retro":
            raise UserError(f"{file} has the family {given['family']}, and --with-encoder makes a retro: change it")
        # vocab_multiple only pads the table.
        for name in sorted(given.keys() - RETRO_SETTINGS - {"family", "vocab_multiple"}):
            theirs, ours = getattr(gpt, name), getattr(wanted.model, name)
            if theirs != ours:
                raise UserError(
                    f"{file} has {name} {ours}, and the weights of the gpt have {theirs}: remove it from the file, of "
                    "which only retro settings are needed"
                )
        if not wanted.model.retro_final_norm:
            raise UserError(
                f"{file} has retro_final_norm false, and the gpt has a final norm, which would be lost: remove it from "
                "the file"
            )
        settings = {name: getattr(wanted.model, name) for name in RETRO_SETTINGS}
        # Of a run only the model is kept: how it was trained may not go along with a retro.
        plain = dataclasses.replace(Config(), model=gpt)
        # A run's choice of kernel may not support Retro.
        settings |= {"attention": Model().attention}
        self._config = replace(plain, **{**settings, **of_decoder(gpt), "family": "retro"})
        validate(self._config)
        self._source, self._seed = source, wanted.training.seed
        self.parameters: Mapping[str, Parameter] = parameters_of(self._config)
        added = [parameter for name, parameter in self.parameters.items() if is_added(name.split("."))]
        count = sum(parameter.nbytes // 4 * (parameter.num_layers or 1) for parameter in added)
        note = f"{count:,} parameters of the encoder and chunked cross-attention are drawn with seed {self._seed}"
        self.origin = dataclasses.replace(origin, config=self._config, notes=(*origin.notes, note), hugging_face={})

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer."""
        name = parameter.name
        if name in self._drawn:
            array = self._drawn[name]
            yield from [array] if parameter.num_layers is None else array
            return
        if parameter.num_layers is None:
            yield from self._source.slices(self._source.parameters[name])
            return
        # A GPT has one stack; Retro's has a stack for each kind of layer, which takes its layers from it.
        in_gpt = self._source.parameters[f"{STACK}.layers.{name.partition('.layers.')[2]}"]
        # To the end: a source verifies its fingerprint there.
        for number, array in enumerate(self._source.slices(in_gpt)):
            if number in parameter.numbers:
                yield array

    @cached_property
    def _drawn(self) -> dict[str, np.ndarray]:
        # On a CPU: conversion uses no accelerator, and the draws are the same.
        model = ShardedModel(self._config, make_mesh(MeshShape(), jax.devices("cpu")))
        names = [name for name in self.parameters if is_added(name.split("."))]
        return {name: np.asarray(array) for name, array in draw_named(model, self._seed, names).items()}


def _tables(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"--with-encoder {file} can't be read as a TOML config: {e}") from e
