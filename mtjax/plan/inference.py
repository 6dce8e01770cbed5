"""Memory and time of text generation, by formula.

Symbols as in `mtjax.analysis.flops`; L tokens of context. Source: arXiv 2211.05102, section 2; memory-bound decoding.
"""

import math
from dataclasses import dataclass

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.counts import active_share, on_device, parameters
from mtjax.analysis.hardware import Server
from mtjax.analysis.machine import Constants
from mtjax.analysis.parts.attention import AttentionPart, CrossAttentionPart
from mtjax.analysis.parts.latent_attention import LatentAttentionPart
from mtjax.analysis.parts.part import Weight
from mtjax.config.sizes import attention_windows, latent_width, padded_vocab_size
from mtjax.config.storage import PLAIN, Storage
from mtjax.layout.layouts import LAYERS, Layout, is_matrix, layout_of
from mtjax.layout.mesh import MeshShape

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes per parameter of stored weights, without scales."""

READS_ENCODED = "cross.key_value"
"""Prefix of the weights that a decoder's layer applies once per encoded text, not once per token."""


SAMPLING_ARRAYS = 7
"""Arrays of 4 bytes per entry of a device's vocabulary shard: counts of tokens, and of sampling the logits, warped,
divided by the temperature, as order-preserving integers, probabilities and noise."""


def flops_per_token(anatomy: Anatomy, context: int = 0) -> float:
    """Returns the FLOPs to generate one token: 2 per active parameter, and `4Lq` per layer for attention.

    Active are all layers but an encoder's, and the output projection; of other tables only a row is read.
    """
    # A tied table is read whole for the logits, an untied embedding by the row.
    tied = anatomy.model.tie_embeddings
    head = [w for part in (*anatomy.head, *(anatomy.embed[:1] if tied else ())) for w in part.weights]
    layers = sum(
        _layer_flops(anatomy, stack, read)
        for stack in anatomy.decoder_stacks
        for read in _read(anatomy, stack, context)
    )
    return layers + 2 * sum(w.size for w in head)


def _layer_flops(anatomy: Anatomy, stack: StackParts, context: int) -> float:
    read = [w for part in stack.parts for w in (*part.weights, *part.shared_weights)]
    weights = [w for w in read if not w.name.startswith(READS_ENCODED)]
    scores = [part.scores for part in stack.parts if part.scores]
    active = sum(w.size * active_share(anatomy.model, w) for w in weights)
    # Latent attention scores and mixes cached latents (`mtjax.models.mixers.latent_attention.AbsorbedUp`).
    latent = latent_width(anatomy.model) + anatomy.model.kv_lora_rank
    return 2 * active + 2 * context * sum(s.heads * (latent or s.widths) for s in scores)


def weight_bytes(anatomy: Anatomy, precision: str) -> float:
    """Returns the bytes of all weights."""
    return parameters(anatomy) * WEIGHT_BYTES[precision]


def cache_bytes(anatomy: Anatomy, batch: int, context: int) -> float:
    """Returns the bytes of the KV cache in 16 bits: `2 l k L` elements per sequence, less in layers with a window, and
    with cross-attention also the encoder's; and of the states of state-space layers."""
    elements = sum(
        part.kv_elements(kept)
        for stack in anatomy.decoder_stacks
        for kept in _kept(anatomy, stack, context)
        for part in stack.parts
    )
    states = sum(stack.layers * part.state_bytes(1, 2) for stack in anatomy.decoder_stacks for part in stack.parts)
    return batch * (2 * elements + states)


def _read(anatomy: Anatomy, stack: StackParts, context: int) -> list[int]:
    """Returns of each layer of a stack how many of `context` tokens a token attends to at most."""
    windows = attention_windows(anatomy.model)
    return [min(windows[number], context) if windows else context for number in stack.layer_numbers]


def _kept(anatomy: Anatomy, stack: StackParts, context: int) -> list[int]:
    """Returns of each layer of a stack for how many of `context` tokens it has a KV cache: for those of its window."""
    # Latent attention keeps all of them.
    return [context] * stack.layers if anatomy.model.kv_lora_rank else _read(anatomy, stack, context)


@dataclass(frozen=True)
class DecodingMemory:
    """Bytes on a device of `mtjax generate` in a decode step."""

    weights: float
    """Matrices in the compute dtype or quantized, vectors in float32."""
    cache: float
    """KV cache of the device's heads, at least one key and one value head, and states of state-space layers."""
    sampling: float
    """Arrays of the length of the device's vocabulary shard (`SAMPLING_ARRAYS`)."""
    snapshots: float
    """Snapshots of recurrent states (`mtjax.generate.prefix_cache`)."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.weights + self.cache + self.sampling + self.snapshots


def decoding_memory(
    anatomy: Anatomy,
    tensor_degree: int,
    sequences: int,
    context: int,
    element_bytes: float = 2,
    storage: Storage = PLAIN,
    snapshots: int = 0,
) -> DecodingMemory:
    """Returns the memory of a decode step; a T5's with its encoder, and a cross-attention cache of the same length.

    Args:
      anatomy: of the model.
      tensor_degree: tensor parallel degree.
      sequences: decoded together.
      context: length of the KV cache in tokens.
      element_bytes: of the compute dtype.
      storage: how matrices are quantized.
      snapshots: number of snapshots of recurrent states.
    """
    mesh, model = MeshShape(model=tensor_degree), anatomy.model
    layout = layout_of(model, mesh)
    weights, narrow = 0.0, quantized(anatomy, storage)
    for weight in anatomy.weights:
        elements = on_device(weight, layout, mesh)
        # Each rank has the key heads of its query heads, and the groups of its state-space heads.
        for axis in {"kv_heads", "groups"} & set(weight.names):
            heads = weight.shape[weight.names.index(axis)]
            elements = weight.size // heads * max(heads, tensor_degree) // tensor_degree
        if weight.name in narrow:
            weights += elements * _bytes_of_weight(storage, _inputs(weight, layout, mesh), element_bytes)
        else:
            weights += elements * (element_bytes if is_matrix(weight.names) else 4)
    cached, states = 0.0, 0.0
    for stack in anatomy.decoder_stacks:
        kept = sum(_kept(anatomy, stack, context))
        for part in stack.parts:
            states += stack.layers * part.state_bytes(tensor_degree, element_bytes)
            if isinstance(part, AttentionPart | CrossAttentionPart):
                heads = part.kv_heads if isinstance(part, AttentionPart) else part.heads
                # In 8 bits, a scale of 4 bytes for each token and head.
                number = element_bytes if storage.cache_dtype is None else 1 + 4 / part.head_dim
                cached += kept * 2 * max(heads, tensor_degree) // tensor_degree * part.head_dim * number
            elif isinstance(part, LatentAttentionPart):
                cached += kept * part.kv_elements(1) * element_bytes
    sampling = SAMPLING_ARRAYS * 4 * sequences * padded_vocab_size(model) / tensor_degree
    return DecodingMemory(weights, sequences * (cached + states), sampling, snapshots * states)


def _bytes_of_weight(storage: Storage, inputs: int, element_bytes: float) -> float:
    """Returns the bytes of a quantized weight with its share of scales and zero points."""
    if storage.weights_dtype in ("int8", "fp8"):
        return 1 + 4 / inputs
    return 0.5 + (element_bytes + 0.5 * storage.weights_zero_point) / storage.weights_group


def quantized(anatomy: Anatomy, storage: Storage) -> frozenset[str]:
    """Returns the names of the weights that are quantized: decoder matrices, and in 8 bits the output table."""
    if storage.weights_dtype is None:
        return frozenset()
    tables = [w for part in (*anatomy.embed, *anatomy.head) for w in part.weights if w.names == ("vocab", "embed")]
    layers = [w for stack in anatomy.decoder_stacks for w in stack.weights]
    # The last is the output's, or the tied one; int4 leaves it as it is.
    tables = tables[-1:] if storage.weights_dtype in ("int8", "fp8") else []
    return frozenset(w.name for w in (*layers, *tables) if is_matrix(w.names))


def _inputs(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Returns the elements of a matrix per scale on a device: its contracted dimensions there."""
    # A product into the residual stream contracts everything but "embed", any other one "embed" alone.
    outputs = weight.names[-1] == "embed" and weight.names[0] != "vocab"
    names = [n for n in weight.names if n != LAYERS and (n != "embed") == outputs]
    sizes = {
        name: size // mesh.degree(layout.rules.axes(name))
        for name, size in zip(weight.names, weight.shape, strict=True)
    }
    return math.prod(sizes[name] for name in names)


@dataclass(frozen=True)
class GenerationTimes:
    """Estimated times of generation for a batch."""

    prefill_seconds: float
    """Prefill of the entire context, at the sustained rate of matmuls."""
    token_seconds: float
    """Decode step of each further token: the longer of reading weights and cache, and computing."""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of one sequence."""
        return 1 / self.token_seconds


def generation(
    anatomy: Anatomy, server: Server, tensor_degree: int, batch: int, context: int, storage: Storage = PLAIN
) -> GenerationTimes:
    """Returns lower bounds on the times of prefill and decoding; tensor parallel communication is not counted."""
    gpu, constants = server.gpu, Constants()
    # V100 has no bfloat16.
    rate = tensor_degree * gpu.peak_flops("bfloat16" if "bfloat16" in gpu.peak else "float16") * gpu.sustained_products
    # In decoding each step reads all weights and caches once, whatever it computes: reading them is the bound of small
    # batches.
    read = (weight_bytes(anatomy, "bfloat16") + cache_bytes(anatomy, batch, context)) / tensor_degree
    if storage != PLAIN:
        memory = decoding_memory(anatomy, tensor_degree, batch, context, storage=storage)
        read = memory.weights + memory.cache
    reading = read / (gpu.bandwidth * constants.memory)
    return GenerationTimes(
        # On average a token attends to half of the context.
        prefill_seconds=batch * context * flops_per_token(anatomy, context // 2) / rate,
        token_seconds=max(reading, batch * flops_per_token(anatomy, context) / rate),
    )
