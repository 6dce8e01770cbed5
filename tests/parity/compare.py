"""Holds a program's logits, loss and gradients against a network of transformers with the same weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config import Config
from mtjax.config.sizes import padded_vocab_size
from mtjax.sharding.axes import use_rules
from mtjax.train.step import make_train_step
from tests.tiny import batch_of, final_hidden, host_batch, mesh_of, model_logits

Named = Mapping[str, np.ndarray]
"""transformers' tensors, weights or gradients, under its names."""
AsOurs = Callable[[Named], dict[str, Any]]
"""Gives transformers' tensors our names and shapes."""


def relative(found: Any, expected: Any) -> float:
    """The largest error beside the largest number, or by itself if all numbers are 0."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def shaken(make: Callable[[], Any], scale: float = 1.0) -> Any:
    """A network with weights large enough for every part to matter, the same at every call; `scale` is of its own."""
    import torch

    torch.manual_seed(0)
    network = make()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(scale).add_(0.1 * torch.randn_like(parameter))
    return network


def padded(config: Config, table: np.ndarray) -> np.ndarray:
    """A table, or biases, of the vocabulary with our number of rows."""
    return np.pad(table, [(0, padded_vocab_size(config.model) - len(table))] + [(0, 0)] * (table.ndim - 1))


def weights_of(network: Any) -> Named:
    """Its parameters."""
    return {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}


def gradients_of(network: Any) -> Named:
    """What `backward` left; parameters without effect have none."""
    return {n: p.grad.numpy() for n, p in network.named_parameters() if p.grad is not None}


def next_token_loss(logits: Any, batch: Mapping[str, np.ndarray]) -> Any:
    """torch's masked mean over a batch with `labels` and `loss_mask`."""
    import torch

    labels, mask = torch.tensor(batch["labels"]).long(), torch.tensor(batch["loss_mask"])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


@dataclass(frozen=True)
class Computed:
    """What our program makes of the first batch."""

    outputs: Any
    """As `forward` gives them; logits with the padding of the vocabulary."""
    loss: float
    parts: Mapping[str, Any]
    """The losses that it is the sum of."""
    gradients: Any


def computed(config: Config, mesh: str, weights: Any, forward: Callable[[Any, Any], Any]) -> Computed:
    """Runs `forward(model, batch)` and the differentiated step with these weights on a mesh."""
    program = make_train_step(config, mesh_of(mesh))
    places = program.state_sharding.parameters
    parameters = jax.tree.map(lambda array, place: jax.device_put(jnp.asarray(array), place), weights, places)
    batch = batch_of(program, 0)

    def run(parameters: Any, batch: Any) -> Any:
        with use_rules(program.layout.rules):
            return forward(program.model(parameters), batch)

    with jax.set_mesh(program.mesh):
        outputs = jax.tree.map(np.asarray, jax.jit(run)(parameters, batch))
        loss, parts, gradients = jax.jit(lambda p, b: program.gradients(p, b, None))(parameters, batch)
    return Computed(outputs, float(loss), parts, gradients)


def assert_same_gradients(found: Any, expected: Any, tolerance: float) -> None:
    """Every one, relative to its largest number."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    flat = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), ours in zip(flat, jax.tree.leaves(found), strict=True):
        assert relative(ours, theirs) < tolerance, jax.tree_util.keystr(path)


def assert_next_token_parity(network: Any, config: Config, mesh: str, as_ours: AsOurs, tolerance: float) -> None:
    """Logits, masked loss and every gradient of a decoder, relative to the largest number of each; no logits where
    ranks share samples or have some of the layers, which only the loss computes."""
    import torch

    batch = host_batch(config, 0)
    network.zero_grad()
    logits = network(torch.tensor(batch["tokens"]).long()).logits
    loss = next_token_loss(logits, batch)
    loss.backward()

    weights = as_ours(weights_of(network))
    entire = "context" not in mesh and mesh.count("x") < 2
    found = computed(
        config,
        mesh,
        weights,
        lambda model, batch: model_logits(model, final_hidden(model, batch["tokens"])) if entire else 0,
    )
    if entire:
        assert relative(found.outputs[..., : config.model.vocab_size], logits.detach().numpy()) < tolerance
    assert abs(found.loss / loss.item() - 1) < tolerance
    assert_same_gradients(found.gradients, as_ours(gradients_of(network)), tolerance)
