"""What generating text takes, by formula.

Symbols as in `mtjax.theory.flops`; L tokens of context. Source: arXiv 2211.05102, section 2; memory-bound decoding.
"""

import math
from dataclasses import dataclass

from mtjax.config.sizes import padded_vocab_size
from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.counts import active_share, on_device, parameters
from mtjax.theory.hardware import Server
from mtjax.theory.layout import LAYERS, Layout, is_matrix, layout_of
from mtjax.theory.machine import Constants
from mtjax.theory.mesh import MeshShape
from mtjax.theory.parts.attention import Attention, CrossAttention
from mtjax.theory.parts.part import Weight

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes per parameter of stored weights, without scales."""

READS_ENCODED = "cross.key_value"
"""What a decoder's layer computes once a text, not once a token."""


SAMPLING_ARRAYS = 7
"""Of 4 bytes, as long as a device's part of the vocabulary: counts of tokens, and what drawing works with - logits, as
they are warped, over the temperature, in their order as integers, probabilities and noise."""


def flops_per_token(anatomy: Anatomy, context: int = 0) -> float:
    """FLOPs to generate one token: 2 per parameter that it meets, and `4Lq` a layer for attention over the context.

    It meets all layers but an encoder's, which has read its text before, and the output projection; of other tables
    only a row is read.
    """
    tied = anatomy.model.tie_embeddings
    head = [w for part in (*anatomy.head, *(anatomy.embed[:1] if tied else ())) for w in part.weights]
    layers = sum(stack.layers * _layer_flops(anatomy, stack, context) for stack in anatomy.decoder_stacks)
    return layers + 2 * sum(w.size for w in head)


def _layer_flops(anatomy: Anatomy, stack: Stack, context: int) -> float:
    weights = [w for part in stack.parts for w in part.weights if not w.name.startswith(READS_ENCODED)]
    scores = [part.scores for part in stack.parts if part.scores]
    met = sum(w.size * active_share(anatomy.model, w) for w in weights)
    return 2 * met + 4 * context * sum(s.heads * s.width for s in scores)


def weight_bytes(anatomy: Anatomy, precision: str) -> float:
    """Bytes of all weights."""
    return parameters(anatomy) * WEIGHT_BYTES[precision]


def cache_bytes(anatomy: Anatomy, batch: int, context: int, element_bytes: float = 2) -> float:
    """Bytes of keys and values: `2 l k L` elements per sequence; of a decoder also those of the text it reads."""
    stacks = anatomy.decoder_stacks
    elements = sum(stack.layers * part.kv_elements(context) for stack in stacks for part in stack.parts)
    return elements * batch * element_bytes


@dataclass(frozen=True)
class DecodingMemory:
    """Bytes on a device of `mtjax generate`, while it writes a token of every sequence."""

    weights: float
    """Matrices in the compute type or in 8 bits, vectors in float32."""
    cache: float
    """Keys and values of the device's own heads; where key heads are fewer than the model ways, of one."""
    sampling: float
    """Arrays as long as the device's part of the vocabulary (`SAMPLING_ARRAYS`)."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.cache + self.sampling


def decoding_memory(
    anatomy: Anatomy, model_ways: int, sequences: int, context: int, element_bytes: float = 2, *, int8: bool = False
) -> DecodingMemory:
    """Memory of a step of decoding; a T5's with its encoder, and as long a cache for what it reads.

    Args:
      anatomy: of the model.
      model_ways: over which heads, MLP and vocabulary are split.
      sequences: that are written at a time.
      context: tokens of each for which the cache has room.
      element_bytes: of the compute type.
      int8: whether matrices are kept in 8 bits, as `--weights-dtype int8` says.
    """
    mesh, model = MeshShape(model=model_ways), anatomy.model
    layout = layout_of(model, mesh)
    weights, narrow = 0.0, in_8_bits(anatomy) if int8 else frozenset()
    for weight in anatomy.weights:
        elements = on_device(weight, layout, mesh)
        if "kv_heads" in weight.names:  # each rank has those that its queries need
            heads = weight.shape[weight.names.index("kv_heads")]
            elements = weight.size // heads * max(heads, model_ways) // model_ways
        if weight.name in narrow:
            weights += elements + 4 * elements / _inputs(weight, layout, mesh)
        else:
            weights += elements * (element_bytes if is_matrix(weight.names) else 4)
    cached = 0
    for stack in anatomy.decoder_stacks:
        for part in stack.parts:
            if isinstance(part, Attention | CrossAttention):
                heads = part.kv_heads if isinstance(part, Attention) else part.heads
                cached += stack.layers * 2 * max(heads, model_ways) // model_ways * part.head_dim
    cache = cached * sequences * context * element_bytes
    return DecodingMemory(weights, cache, SAMPLING_ARRAYS * 4 * sequences * padded_vocab_size(model) / model_ways)


def in_8_bits(anatomy: Anatomy) -> frozenset[str]:
    """Names of what `--weights-dtype int8` keeps so: matrices of the layers that write, and the table of the logits."""
    tables = [w for part in (*anatomy.embed, *anatomy.head) for w in part.weights if w.names == ("vocab", "embed")]
    layers = [w for stack in anatomy.decoder_stacks for w in stack.weights]
    return frozenset(w.name for w in (*layers, tables[-1]) if is_matrix(w.names))


def _inputs(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Elements of a matrix for each scale on a device: those over which its product sums there."""
    outputs = weight.names[-1] == "embed" and weight.names[0] != "vocab"
    names = [n for n in weight.names if n != LAYERS and (n != "embed") == outputs]
    sizes = {
        name: size // mesh.degree(layout.rules.axes(name))
        for name, size in zip(weight.names, weight.shape, strict=True)
    }
    return math.prod(sizes[name] for name in names)


@dataclass(frozen=True)
class Generation:
    """Time of a batch on t model ways."""

    prefill_seconds: float
    """To read the entire context once, at the sustained rate of products."""
    token_seconds: float
    """Of each further token: the longer of reading weights and cache once, and computing."""

    @property
    def tokens_per_second(self) -> float:
        """Of one sequence."""
        return 1 / self.token_seconds


def generation(
    anatomy: Anatomy, server: Server, model_ways: int, batch: int, context: int, precision: str = "bfloat16"
) -> Generation:
    """Bounds on prefill and decoding; communication between the model ways is left out."""
    gpu, constants = server.gpu, Constants()
    rate = model_ways * gpu.peak_flops("bfloat16" if "bfloat16" in gpu.peak else "float16") * gpu.sustained_products
    reading = (weight_bytes(anatomy, precision) + cache_bytes(anatomy, batch, context)) / (
        model_ways * gpu.bandwidth * constants.memory
    )
    return Generation(
        prefill_seconds=batch * context * flops_per_token(anatomy, context // 2) / rate,
        token_seconds=max(reading, batch * flops_per_token(anatomy, context) / rate),
    )
