"""Holds a program's logits, loss and gradients against a network of transformers with the same weights."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config import Config
from mtjax.sharding.axes import use_rules
from mtjax.train.step import make_program
from tests.tiny import batch_of, host_batch, mesh_of

Named = Mapping[str, np.ndarray]
"""transformers' tensors, weights or gradients, under its names."""


def relative(found: Any, expected: Any) -> float:
    """The largest error beside the largest number."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def shaken(network: Any) -> Any:
    """The network with weights large enough for every part to matter; torch's seed is set."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def assert_next_token_parity(
    network: Any, config: Config, mesh: str, as_ours: Callable[[Named], dict[str, Any]], tolerance: float
) -> None:
    """Logits, masked loss and every gradient of a decoder, relative to the largest number of each."""
    import torch

    batch = host_batch(config, 0)
    tokens, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("tokens", "labels"))
    mask = torch.tensor(batch["loss_mask"])
    network.zero_grad()
    logits = network(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()

    program = make_program(config, mesh_of(mesh))
    weights = as_ours({n: p.detach().numpy() for n, p in network.named_parameters()})
    parameters = jax.tree.map(
        lambda array, sharding: jax.device_put(jnp.asarray(array), sharding),
        weights,
        program.state_sharding.parameters,
    )
    placed = batch_of(program, 0)

    def our_logits(parameters: Any, tokens: jax.Array) -> jax.Array:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model.logits(model(tokens))

    with jax.set_mesh(program.mesh):
        found_logits = np.asarray(jax.jit(our_logits)(parameters, placed["tokens"]))
        found_loss, _, gradients = jax.jit(lambda p, b: program.gradients(p, b, None))(parameters, placed)

    assert relative(found_logits[..., : config.model.vocab_size], logits.detach().numpy()) < tolerance
    assert abs(float(found_loss) / loss.item() - 1) < tolerance
    expected = as_ours({n: p.grad.numpy() for n, p in network.named_parameters()})
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    assert paths == [path for path, _ in jax.tree_util.tree_leaves_with_path(gradients)]
    for path, theirs, ours in zip(paths, jax.tree.leaves(expected), jax.tree.leaves(gradients), strict=True):
        assert relative(ours, theirs) < tolerance, jax.tree_util.keystr(path)
