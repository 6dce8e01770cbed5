"""A model for generation: weights that are converted once, and the programs that read and write a KV cache.

Layers are not stacked and scanned: each layer has separate arrays, and the layers are unrolled. A scan over stacked
weights copies a layer's weights out of the stack for every token, which takes twice as long as the matrix products on
CPUs (docs/generate.md). Matrices are in the compute dtype, grouped query, key and value projections are joined into one
matrix, and on a CPU matrices are transposed.

A T5's encoder, which runs once for each prompt, stays a scanned stack; the layers of its decoder cache the keys and
values of the encoder's output (cross-attention).

Every device works on all sequences; heads, MLP, vocabulary and cache are sharded over the tensor parallel degree.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.config.sizes import longest_text, named, padded_vocab_size
from mtjax.config.storage import PLAIN, Storage, check_storage
from mtjax.errors import UserError
from mtjax.families.t5.model import T5
from mtjax.generate.caches import Cache, cache_length, empty_cache
from mtjax.generate.inference_weights import Call, DecoderWeights, prepare_weights, stacks_of
from mtjax.generate.resharding import LayerwiseTransfer
from mtjax.generate.sampling import (
    SampledTokens,
    SamplingBatch,
    count_prompt,
    count_sampled,
    greedy_batch,
    sample_tokens,
    score_tokens,
)
from mtjax.generate.weight_format import WeightFormat
from mtjax.layout.generation_mesh import check_generation_mesh
from mtjax.models.kv_cache import CachePositions
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import spec, use_rules

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Decode state of the batch, on the devices; each array is [sequences, ...]."""

    tokens: Int[Array, " sequences"]
    """The newest token of each sequence: the input of the next decode step."""
    positions: Int[Array, " sequences"]
    """Positions of these tokens."""
    draws: SamplingBatch
    """Sampling parameters of each sequence."""
    counts: Int[Array, "sequences vocab"]
    """Token counts for the penalties; see `mtjax.generate.sampling.IN_PROMPT`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptChunk:
    """A chunk of a prompt, padded to a static length."""

    tokens: Int[Array, " seq"]
    targets: Int[Array, " seq"]
    """The next token of the prompt after each; -1 for the prompt's last token and for padding."""
    start: Int[Array, ""]
    """Position of the first token."""
    count: Int[Array, ""]
    """Number of tokens without padding."""
    sequence: Int[Array, ""]
    """Index of the sequence (cache slot)."""
    draws: SamplingBatch
    """Sampling parameters for the token after the chunk; one row."""
    is_first: Bool[Array, ""]
    """Whether this is the prompt's first chunk: the slot's counts still belong to its previous sequence."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderInput:
    """Input tokens of the encoder, padded to a static length."""

    tokens: Int[Array, " seq"]
    count: Int[Array, ""]
    """Number of tokens without padding."""


class GenerationPrograms:
    """The prefill and decode programs of a model on a mesh.

    A program is compiled when a shape is first used: number of sequences, cache length, chunk length.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        parameters: Tree,
        start_id: int = 0,
        *,
        storage: Storage = PLAIN,
        grids: Sequence[Tree] = (),
        trained: ShardedModel | None = None,
        vocab_size: int | None = None,
        call: Call | None = None,
    ) -> None:
        """Converts the weights; abstract weights, for programs that are only lowered, stay abstract.

        Args:
          sharded_model: the model on its mesh.
          parameters: as they are stored in training.
          start_id: the decoder's first token in an encoder-decoder model; 0 in all published T5 models.
          storage: how matrices are quantized (`mtjax.generate.byte_matrix`, `int4`); a T5's encoder is not.
          grids: scales, and perhaps zero points, of matrices that were quantized before, as trees like `parameters`.
          trained: the GPT or Llama that `parameters` are sharded for, if it is on another mesh of the same devices
            (`mtjax.generate.resharding`); None for `sharded_model`.
          vocab_size: token ids from here on are not sampled; the model's vocabulary size if None.
          call: calls each program; by default runs it, or infers its output shapes if the weights are abstract.

        Raises:
          UserError: the model family can't generate text, the mesh has pipeline or context parallelism, or matrices
            are quantized in a model with experts or latent attention.
        """
        _check_model(sharded_model)
        check_storage(sharded_model.config.model, storage)
        self.sharded_model, self.config = sharded_model, sharded_model.config
        self.start_id, self.storage = start_id, storage
        self.is_encoder_decoder = issubclass(sharded_model.model_class, T5)
        self.rules = sharded_model.layout.rules.with_replicated_activations
        self.dtype = jnp.dtype(self.config.training.compute_dtype)
        # XLA: on CPUs, products of few rows are faster with transposed matrices (docs/generate.md).
        alone_on_cpu = sharded_model.mesh.size == 1 and sharded_model.mesh.devices.flat[0].platform == "cpu"
        self._weight_format = WeightFormat(self.dtype, storage, alone_on_cpu)
        size = vocab_size or self.config.model.vocab_size
        assert size is not None  # the embedding table has rows
        self.vocab_size = size
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parameters))
        # One path for weights and shapes: `lower_decode` and a planned continuation see the programs that a run would
        # use.
        self._call = call or (jax.eval_shape if is_abstract else _call)
        with self._traced():
            model_and_layers = (
                LayerwiseTransfer(trained, sharded_model, self._call).of(parameters)
                if trained
                else stacks_of(sharded_model, parameters)
            )
            of_grids = [stacks_of(sharded_model, grid)[1] for grid in grids]
            weights = prepare_weights(*model_and_layers, self._weight_format, self._call, of_grids)
        # The weights are passed as a flat list: flattening Flax modules would take half a millisecond for each step.
        self._leaves, self._structure = jax.tree.flatten(weights)

    @classmethod
    def abstract(cls, sharded_model: ShardedModel, storage: Storage = PLAIN) -> "GenerationPrograms":
        """Builds a decoder with abstract weights, whose programs can be lowered; raises as the constructor does."""
        return cls(sharded_model, sharded_model.restore_target, storage=storage)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding tables, padding included."""
        return padded_vocab_size(self.config.model)

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of a sequence; for a T5, the larger maximum of encoder and decoder."""
        return longest_text(self.config.model)

    def empty(self, sequences: int, length: int) -> tuple[Cache, Sequences]:
        """Allocates a cache for `length` tokens of each sequence, and the decode state of inactive sequences."""
        with self._traced():
            return self._call(self._compiled_empty, sequences, length)

    def resized(self, cache: Cache, length: int) -> Cache:
        """Returns a copy of the cache with space for `length` tokens of each sequence."""
        with self._traced():
            return self._call(self._compiled_resize, cache, length)

    def prefill(self, cache: Cache, sequences: Sequences, chunk: PromptChunk, scored: bool) -> tuple[Any, ...]:
        """Prefills a chunk of a prompt and samples the token after it; the buffers of cache and sequences are donated.

        Returns:
          The cache, the decode state, the sampled token (one row), and, if `scored`, the log-probability of each
          token's target (else None).
        """
        with self._traced():
            return self._call(self._compiled_prefill, self._leaves, cache, sequences, chunk, scored)

    def prefill_encoder(
        self, cache: Cache, sequences: Sequences, text: EncoderInput, chunk: PromptChunk
    ) -> tuple[Any, ...]:
        """Runs the encoder, caches keys and values for cross-attention, and prefills the decoder as `prefill` does."""
        with self._traced():
            return self._call(self._compiled_prefill_encoder, self._leaves, cache, sequences, text, chunk)

    def call(self, program: Any, *arguments: Any) -> Any:
        """Calls a program of caches, as those of `mtjax.generate.sequence_copies`."""
        with self._traced():
            return self._call(program, *arguments)

    def reorder(self, cache: Cache, sequences: Sequences, sources: Any, tokens: Any) -> tuple[Cache, Sequences]:
        """Replaces each sequence by a copy of `sources` [sequences] with newest tokens `tokens` (beam search)."""
        with self._traced():
            return self._call(self._compiled_reorder, cache, sequences, sources, tokens)

    def decode(
        self, cache: Cache, sequences: Sequences, active: Bool[Array, " sequences"]
    ) -> tuple[Cache, Sequences, SampledTokens]:
        """Samples the next token of each active sequence; the buffers of cache and sequences are donated."""
        with self._traced():
            return self._call(self._compiled_decode, self._leaves, cache, sequences, active)

    def lower_decode(self, sequences: int, length: int) -> jax.stages.Lowered:
        """Lowers the program of `decode`."""
        with self._traced():
            cache, state = jax.eval_shape(partial(self._empty, sequences, length))
            active = jax.ShapeDtypeStruct((sequences,), jnp.bool_)
            return self._compiled_decode.lower(self._leaves, cache, state, active)

    # --- compiled programs

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with jax.set_mesh(self.sharded_model.mesh), use_rules(self.rules):
            yield

    def _on_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of `DecoderWeights` as a function of their flat leaves."""

        @wraps(function)
        def on_leaves(leaves: list[Array], *arguments: Any) -> Any:
            return function(jax.tree.unflatten(self._structure, leaves), *arguments)

        return on_leaves

    @cached_property
    def _compiled_decode(self) -> Any:
        # XLA: without donation a step would allocate a second cache, and copy all of the first for one token of each
        # sequence.
        return jax.jit(self._on_leaves(self._decode), donate_argnums=(1, 2))

    @cached_property
    def _compiled_prefill(self) -> Any:
        # `scored` is static: only a program for echoed prompts computes logits of every position, the others of one.
        return jax.jit(self._on_leaves(self._prefill), donate_argnums=(1, 2), static_argnums=4)

    @cached_property
    def _compiled_prefill_encoder(self) -> Any:
        return jax.jit(self._on_leaves(self._prefill_encoder), donate_argnums=(1, 2))

    @cached_property
    def _compiled_reorder(self) -> Any:
        def reorder(cache: Cache, state: Sequences, sources: Array, tokens: Array) -> tuple[Cache, Sequences]:
            cache, state = jax.tree.map(lambda rows: jnp.take(rows, sources, axis=0), (cache, state))
            return cache, dataclasses.replace(state, tokens=tokens)

        return jax.jit(reorder, donate_argnums=(0, 1))

    @cached_property
    def _compiled_empty(self) -> Any:
        return jax.jit(self._empty, static_argnums=(0, 1))

    @cached_property
    def _compiled_resize(self) -> Any:
        def resize(cache: Cache, length: int) -> Cache:
            return [{name: state.resized(length) for name, state in layer.items()} for layer in cache]

        return jax.jit(resize, static_argnums=1)

    def _empty(self, sequences: int, length: int) -> tuple[Cache, Sequences]:
        model = self.config.model
        how = {"reads_encoder": self.is_encoder_decoder, "stored": self.storage.cache_dtype}
        cache = empty_cache(model, sequences, length, self.dtype, **how)
        # Sharded like the logits, so that penalties need no communication.
        counts = jnp.zeros((sequences, padded_vocab_size(model)), jnp.int32, out_sharding=spec("batch", "vocab"))
        zeros = jnp.zeros(sequences, jnp.int32)
        return cache, Sequences(zeros, zeros, greedy_batch(sequences), counts)

    def _decode(self, weights: DecoderWeights, cache: Cache, state: Sequences, active: Array) -> tuple[Any, ...]:
        """Traces a decode step; `active` is bool[sequences]."""
        # An inactive sequence gets a position past the end of the cache, where the scatter drops its keys and values.
        positions = jnp.where(active, state.positions, cache_length(cache))
        hidden, cache = self._hidden(weights, cache, state.tokens[:, None], CachePositions(positions[:, None]))
        (table, bias), output = weights.model.output_parameters, weights.model.logit_options(self.vocab_size)
        drawn = sample_tokens(hidden[:, 0], table, state.counts, state.draws, output, bias)
        # An inactive sequence may be in the middle of its prefill: nothing of its state may change, or its seed would
        # draw other noise and its penalties count a token that it never had.
        draws = dataclasses.replace(state.draws, draw_index=state.draws.draw_index + active)
        tokens = jnp.where(active, drawn.token, state.tokens)
        counts = count_sampled(state.counts, jnp.where(active, drawn.token, -1))
        return cache, Sequences(tokens, state.positions + active, draws, counts), drawn

    def _prefill(
        self, weights: DecoderWeights, cache: Cache, state: Sequences, chunk: PromptChunk, scored: bool
    ) -> tuple[Any, ...]:
        """Traces the prefill of a chunk [seq] into one sequence of the cache."""
        # A full cache gets the padding's keys, too. They are never attended to: causal attention masks later positions,
        # and each is overwritten by the token that gets its position.
        offsets, slot = jnp.arange(len(chunk.tokens)), chunk.sequence
        positions = CachePositions((chunk.start + offsets)[None], slot, chunk.count)
        hidden, cache = self._hidden(weights, cache, chunk.tokens[None], positions)
        prompt = jnp.where(offsets < chunk.count, chunk.tokens, -1)
        counts = count_prompt(state.counts, slot, prompt, chunk.is_first)
        (table, bias), output = weights.model.output_parameters, weights.model.logit_options(self.vocab_size)
        # The token after the chunk. If the prompt goes on, the result is ignored and overwritten by the next chunk.
        last = lax.dynamic_index_in_dim(hidden[0], chunk.count - 1, keepdims=True)
        slot_counts = lax.dynamic_index_in_dim(counts, slot, keepdims=True)
        drawn = sample_tokens(last, table, slot_counts, chunk.draws, output, bias)
        # Targets of -1 are scored as token 0; the engine has no ids for these rows and drops them.
        scores = score_tokens(hidden[0], table, jnp.maximum(chunk.targets, 0), output, bias) if scored else None
        # Only the prompt's last token has no target: what is sampled after other chunks is not part of the text.
        is_last_chunk = chunk.targets[chunk.count - 1] < 0
        is_counted = (jnp.arange(len(state.tokens)) == slot) & is_last_chunk
        counts = count_sampled(counts, jnp.where(is_counted, drawn.token[0], -1))
        set_row = lambda all_rows, row: all_rows.at[slot].set(row[0])  # noqa: E731
        # This was draw 0; the decode steps continue with 1, so that a text's noise does not depend on its chunks.
        next_draws = dataclasses.replace(chunk.draws, draw_index=chunk.draws.draw_index + 1)
        draws = jax.tree.map(set_row, state.draws, next_draws)
        position = (chunk.start + chunk.count)[None]
        state = Sequences(set_row(state.tokens, drawn.token), set_row(state.positions, position), draws, counts)
        return cache, state, drawn, scores

    def _prefill_encoder(
        self, weights: DecoderWeights, cache: Cache, state: Sequences, text: EncoderInput, chunk: PromptChunk
    ) -> tuple[Any, ...]:
        """Traces the encoder, the projections of its output for cross-attention, and the decoder's prefill."""
        mask = (jnp.arange(len(text.tokens)) < text.count).astype(jnp.int32)[None]
        encoded = weights.model.encoded(text.tokens[None], mask)
        updated = []
        for layer, states in zip(weights.layers, cache, strict=True):
            # Once for each prompt: these keys and values do not change while the decoder writes.
            key_value = layer.cross.keys_and_values(encoded)
            updated.append(states | {"cross": states["cross"].replaced(*key_value, chunk.sequence, text.count)})
        return self._prefill(weights, updated, state, chunk, False)

    def _hidden(
        self, weights: DecoderWeights, cache: Cache, tokens: Array, positions: CachePositions
    ) -> tuple[Float[Array, "batch seq embed"], Cache]:
        """Computes the final hidden states of tokens [batch, seq]; returns them and the updated cache."""
        x, context = weights.model.embed_new(tokens, positions, cache_length(cache))
        updated = []
        with jax.named_scope("layers"):
            for number, (layer, states) in enumerate(zip(weights.layers, cache, strict=True)):
                x, states = layer(x, dataclasses.replace(context, layer=number), states)
                # A layer without anything to keep returns no states; the cache still needs an entry, as layers and
                # caches are zipped.
                updated.append(states or {})
        return weights.model.final_hidden(x), updated


def _check_model(sharded_model: ShardedModel) -> None:
    """Raises UserError unless a model can generate text on its mesh; see `GenerationPrograms`."""
    if not hasattr(sharded_model.model_class, "embed_new"):  # a `Writer`
        raise UserError(f"a {named(sharded_model.config.model)} can't generate text: use a gpt, llama, hybrid or t5")
    if sharded_model.stages > 1:
        raise UserError(
            f"generation needs a mesh without pipeline parallelism, and the mesh is {sharded_model.mesh_shape}"
        )
    check_generation_mesh(sharded_model.mesh_shape)


def prompt_chunk(
    prompt: Sequence[int], start: int, length: int, sequence: int, draws: SamplingBatch, first: int = 0
) -> PromptChunk:
    """Builds the chunk of a prompt with the tokens from `start` on, padded to `length`.

    Args:
      prompt: all tokens of the prompt.
      start: position of the chunk's first token.
      length: static length.
      sequence: index of the cache slot.
      draws: sampling parameters, one row.
      first: position at which the prefill of this prompt began: above 0 if a prefix was reused.
    """
    tokens, targets = prompt[start : start + length], prompt[start + 1 : start + length + 1]
    position, count, slot = (jnp.int32(number) for number in (start, len(tokens), sequence))
    is_first = jnp.array(start == first)
    padded = _padded(tokens, length, 0), _padded(targets, length, -1)
    return PromptChunk(*padded, position, count, slot, draws, is_first)


def encoder_input(ids: Sequence[int], length: int) -> EncoderInput:
    """Builds the encoder's input: a prompt padded to `length`."""
    return EncoderInput(_padded(ids, length, 0), jnp.int32(len(ids)))


def _padded(ids: Sequence[int], length: int, padding: int) -> Array:
    padded = np.full(length, padding, np.int32)
    padded[: len(ids)] = ids
    return jnp.asarray(padded)


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)
