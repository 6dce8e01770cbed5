"""What generating text takes, by formula.

Symbols as in `mtjax.plan.formulas`; L tokens of context. Source: arXiv 2211.05102, section 2; memory-bound decoding.
"""

from dataclasses import dataclass

from mtjax.plan.formulas import Shape, parameters
from mtjax.plan.hardware import Server
from mtjax.plan.timing import Constants

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes per parameter of stored weights, without scales."""


def flops_per_token(shape: Shape, context: int = 0) -> float:
    """FLOPs to generate one token: 2 per parameter of the products, and `4Lql` for attention over the context."""
    lookups = shape.sequence_length * shape.learned_positions
    lookups += 0 if shape.tied_embeddings else shape.padded_vocab_size  # then the table is read by rows alone
    products = parameters(shape) - lookups * shape.hidden_size
    return 2 * products + 4 * context * shape.query_size * shape.num_layers


def weight_bytes(shape: Shape, precision: str) -> float:
    """Bytes of all weights."""
    return parameters(shape) * WEIGHT_BYTES[precision]


def cache_bytes(shape: Shape, batch: int, context: int, element_bytes: float = 2) -> float:
    """Bytes of keys and values: `2 l k L` elements per sequence."""
    return 2 * shape.num_layers * shape.kv_size * context * batch * element_bytes


@dataclass(frozen=True)
class Generation:
    """Time of a batch on t model ways."""

    prefill_seconds: float
    """To read the whole context once, at the sustained rate of products."""
    token_seconds: float
    """Of each further token: the longer of reading weights and cache once, and computing."""

    @property
    def tokens_per_second(self) -> float:
        """Of one sequence."""
        return 1 / self.token_seconds


def generation(
    shape: Shape, server: Server, model_ways: int, batch: int, context: int, precision: str = "bfloat16"
) -> Generation:
    """Bounds on prefill and decoding; communication between the model ways is left out."""
    gpu, constants = server.gpu, Constants()
    rate = model_ways * gpu.peak_flops("bfloat16" if "bfloat16" in gpu.peak else "float16") * gpu.sustained_products
    reading = (weight_bytes(shape, precision) + cache_bytes(shape, batch, context)) / (
        model_ways * gpu.bandwidth * constants.memory
    )
    return Generation(
        prefill_seconds=batch * context * flops_per_token(shape, context // 2) / rate,
        token_seconds=max(reading, batch * flops_per_token(shape, context) / rate),
    )
