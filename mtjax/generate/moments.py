"""Second moments of the inputs of each matrix of a decoder's layers, over the tokens of a text (for GPTQ)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError
from mtjax.generate.inference_weights import layer_locations, take_layer
from mtjax.generate.matrix_product import matrix_product
from mtjax.generate.weights import LoadedModel
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.layout.stacks import stacks_of
from mtjax.models.kv_cache import CachePositions, empty_caches
from mtjax.sharding.axes import REPLICATED, PartitionSpec, use_rules
from mtjax.sharding.param_specs import dotted
from mtjax.sharding.stored_weight import StoredWeight

WINDOW = 512
"""Tokens of a sample."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observed(StoredWeight):
    """A matrix that notes the moments of its inputs."""

    matrix: Float[Array, "..."]
    noted: list[Array] = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.matrix.ndim

    def product(self, x: Float[Array, "..."], inputs: int, sharding: PartitionSpec) -> Float[Array, "..."]:
        """See `StoredWeight.product`."""
        flat = x.reshape(-1, int(np.prod(x.shape[x.ndim - inputs :])), out_sharding=REPLICATED)
        # GPTQ inverts the sum: products in TF32 or bfloat16, the default on accelerators, would lose its small
        # eigenvalues.
        self.noted.append(jnp.einsum("ti,tj->ij", flat, flat, precision=jax.lax.Precision.HIGHEST))
        return matrix_product(x, self.matrix, inputs, sharding)


def input_moments(loaded: LoadedModel, ids: Sequence[int], samples: int) -> dict[tuple[str, int], np.ndarray]:
    """Runs the model, with its weights as they are, over the first windows of a text.

    Args:
      loaded: a decoder in float32 on one device.
      ids: tokens of the text.
      samples: number of windows of `WINDOW` tokens, or of the model's context if that is shorter.

    Returns:
      The sum of outer products of the inputs [inputs, inputs], by the parameter's name and the layer in its stack.

    Raises:
      UserError: the text is too short.
    """
    sharded_model, length = loaded.sharded_model, min(WINDOW, loaded.sharded_model.config.model.sequence_length)
    if len(ids) < samples * length:
        raise UserError(
            f"--calibration has {len(ids)} tokens, and --calibration-samples {samples} of {length} tokens need "
            f"{samples * length}: give a longer text or fewer samples"
        )
    model: Any = sharded_model.inference_model(loaded.parameters)
    paths = [f"{stack.path}.layers" for stack in stacks_of(sharded_model.config.model)]
    # Keyed by identity: `layer_locations` returns these objects, and removes them from the model.
    prefixes = {id(stack.layers): path for stack, path in zip(model.decoder_stacks, paths, strict=True)}
    model, locations = layer_locations(model)
    positions = CachePositions(jnp.arange(length)[None], jnp.int32(0), jnp.int32(length))
    tokens = jnp.asarray(ids[: samples * length], jnp.int32).reshape(samples, 1, length)
    found: dict[tuple[str, int], np.ndarray] = {}
    with jax.set_mesh(sharded_model.mesh), use_rules(sharded_model.layout.rules.with_replicated_activations):
        # Samples are independent texts: each begins with empty caches, and what a layer returns of them is dropped.
        states = empty_caches(sharded_model.config.model, 1, length, jnp.float32)

        @jax.jit
        def run(model: Any, layer: Any, x: Array, tokens: Array, number: Array) -> tuple[Array, dict[str, Array]]:
            context = dataclasses.replace(model.embed_new(tokens, positions, length)[1], layer=number)
            return _observe(layer, x, context, states)

        embed = jax.jit(lambda model, tokens: model.embed_new(tokens, positions, length)[0])
        hidden = [embed(model, each) for each in tokens]
        with BytesProgress("calibrating", len(locations)) as progress:
            for number, (stack, index) in enumerate(locations):
                layer = take_layer(stack, jnp.int32(index))
                sums: dict[str, Any] = {}
                # Layer by layer over all samples, so that the moments of one layer are in memory at a time.
                for i, each in enumerate(tokens):
                    hidden[i], noted = run(model, layer, hidden[i], each, jnp.int32(number))
                    sums = {name: moments + sums.get(name, 0) for name, moments in noted.items()}
                for name, moments in sums.items():
                    found[f"{prefixes[id(stack)]}.{name}", index] = np.asarray(moments)
                progress.update(number + 1, number + 1)
    return found


def _observe(layer: Any, x: Array, context: Any, states: Any) -> tuple[Array, dict[str, Array]]:
    """Applies a layer; returns its output, and the moments of the inputs of each module with a matrix."""
    noted: dict[str, list[Array]] = {}

    def watch(path: Any, variable: Any) -> Any:
        if not gathers_in_compute_dtype(variable.get_metadata()["axes"]):
            return variable
        return variable.replace(Observed(variable[...], noted.setdefault(dotted(path), [])))

    watched = jax.tree_util.tree_map_with_path(watch, layer, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    output, _ = watched(x, context, states)
    return output, {name.rpartition(".")[0]: sum(each[1:], each[0]) for name, each in noted.items() if each}
