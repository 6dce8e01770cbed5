"""Retro beside the real RetroModel of Megatron-Core 0.15, from a file: `tests.parity.megatron_retro` makes it anew."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import Config
from mtjax.convert.megatron_tables import LOCAL
from mtjax.convert.parameters import parameters_of
from mtjax.convert.table import name_of
from mtjax.families.retro.megatron import retro_table
from mtjax.sharding.axes import use_rules
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import make_train_step
from tests.parity.compare import assert_same_gradients, relative
from tests.parity.megatron_retro import FILE, SIZES, batch, weights
from tests.parity.trees import nested
from tests.tiny import mesh_of, model_logits, tiny_config

EXHAUSTIVE = pytest.mark.exhaustive


def config_of(**fields: Any) -> Config:
    sizes = {
        "num_layers": SIZES["layers"],
        "hidden_size": SIZES["hidden"],
        "num_heads": SIZES["heads"],
        "vocab_size": SIZES["vocab"],
        "vocab_multiple": SIZES["vocab"],
        "sequence_length": SIZES["sequence"],
        "retro_chunk": SIZES["chunk"],
        "global_batch_size": SIZES["samples"],
    }
    no_dropout = dict.fromkeys(("hidden_dropout", "attention_dropout", "retro_encoder_dropout"), 0.0)
    return tiny_config(family="retro", retro_final_norm=False, **sizes, **no_dropout, **fields)


@cache
def theirs() -> dict[str, np.ndarray]:
    return dict(np.load(FILE))


def as_ours(named: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """Megatron's tensors under our names and in our shapes, by the table of the conversion."""
    parameters, used = parameters_of(config), set()
    arrays = {name: np.zeros(parameter.stacked_shape, np.float32) for name, parameter in parameters.items()}
    for parameter, layer, tensor in retro_table(config.model, LOCAL).select(parameters).tensors():
        into = arrays[parameter.name] if layer is None else arrays[parameter.name][layer]
        used.add(name_of(tensor, layer))
        tensor.insert(tensor.view(named[name_of(tensor, layer)], parameter), into, parameter)
    assert used == named.keys(), used ^ named.keys()
    return nested(arrays)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("1x1", {}),
        ("2x2", {"sequence_parallel": True, "zero": 1, "recompute": "full"}),
        pytest.param("2x1", {"zero": 3}, marks=EXHAUSTIVE),
        pytest.param("1x2", {"microbatch_size": 1}, marks=EXHAUSTIVE),
        pytest.param("2x2", {"zero": 2, "recompute": "selective"}, marks=EXHAUSTIVE),
    ],
)
def test_logits_loss_and_gradients_are_those_of_megatron(mesh: str, fields: dict[str, Any]) -> None:
    config, known = config_of(**fields), theirs()
    gradients = {name: array for name, array in known.items() if name not in ("logits", "losses")}
    drawn = as_ours(weights({name: array.shape for name, array in gradients.items()}), config)
    program = make_train_step(config, mesh_of(mesh))
    host = batch() | {"loss_mask": np.ones_like(known["losses"]), "sample_index": np.arange(2, dtype=np.uint32)}
    placed = global_batch(program.batch_sharding, host, len(host["tokens"]))
    parameters = jax.tree.map(jax.device_put, drawn, program.state_sharding.parameters)
    with jax.set_mesh(program.mesh):
        loss, _, found = jax.jit(lambda p, b: program.gradients(p, b, None))(parameters, placed)
        if mesh == "1x1":
            logits = jax.jit(lambda p, b: logits_of(program, p, b))(parameters, placed)
            assert relative(np.asarray(logits), known["logits"]) < 2e-6
    assert abs(float(loss) / known["losses"].mean() - 1) < 1e-6
    assert_same_gradients(found, as_ours(gradients, config), 5e-6)


def logits_of(program: Any, parameters: Any, placed: Any) -> Any:
    from mtjax.models.language_model import run_sections

    with use_rules(program.layout.rules):
        model: Any = program.model(parameters)
        return model_logits(model, model.final_hidden(run_sections(model, placed, None)[0].x))
