"""A model as generation runs it: weights prepared once, and the programs that read and write a cache.

Layers are not a stack here: each has arrays of its own, and programs run one after the other. Scanning over a stack
copies a layer's weights out of it for every token, which on CPUs takes twice as long as the products
(docs/generate.md). Matrices are in the compute type, those of grouped queries, keys and values are assembled, and on a
CPU they lie turned.

A T5's encoder, which reads a text once, stays a stack; its decoder's layers keep keys and values of that text.

Every device of a mesh works on all sequences; heads, MLP, vocabulary and cache are split over the model ways.
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

from mtjax.config.sizes import decoder_layers, decoder_length, head_dim, named, num_kv_heads, padded_vocab_size
from mtjax.errors import UserError
from mtjax.generate.inference_weights import Call, DecoderWeights, prepare_weights, stacks_of
from mtjax.generate.resharding import LayerwiseTransfer
from mtjax.generate.sampling import (
    LogitsParams,
    SampledTokens,
    SamplingBatch,
    count_drawn,
    count_prompt,
    draw_tokens,
    score_tokens,
)
from mtjax.generate.weight_format import WeightFormat
from mtjax.models.families.registry import WRITERS
from mtjax.models.families.t5 import T5
from mtjax.models.kv_cache import CachePositions, CrossKVCache, KVCache
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import num_shards, spec, use_rules
from mtjax.theory.mesh import check_no_context_parallel

Tree = Any
Cache = list[dict[str, Any]]
"""Of each layer the states of its mixers by name: `KeyValues` of "attention", `EncodedText` of "cross"."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """The sequences that are being written, on the devices; each array is [sequences, ...]."""

    tokens: Int[Array, " sequences"]
    """The newest token of each, which no layer has read yet."""
    positions: Int[Array, " sequences"]
    """Of these tokens."""
    draws: SamplingBatch
    counts: Int[Array, "sequences vocab"]
    """See `mtjax.generate.sampling.count_prompt`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptChunk:
    """Some tokens of a prompt, filled up to a static length."""

    tokens: Int[Array, " seq"]
    targets: Int[Array, " seq"]
    """The token after each; of the filling, -1."""
    start: Int[Array, ""]
    """Position of the first."""
    count: Int[Array, ""]
    """Tokens without the filling."""
    sequence: Int[Array, ""]
    """To which they belong."""
    draws: SamplingBatch
    """Of this sequence, with one row: for the token after the chunk."""
    is_first: Bool[Array, ""]
    """Whether no chunk of this prompt was read before: what was counted in the sequence is another's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderInput:
    """A text that a sequence answers, filled up to a static length."""

    tokens: Int[Array, " seq"]
    count: Int[Array, ""]
    """Tokens without the filling."""


class Decoder:
    """A model on a mesh, ready to continue sequences.

    Programs are compiled when a shape is first used: number of sequences, length of the cache, length of a chunk.
    """

    def __init__(
        self,
        placed: ShardedModel,
        parameters: Tree,
        start_id: int = 0,
        *,
        int8: bool = False,
        trained: ShardedModel | None = None,
        vocab_size: int | None = None,
        call: Call | None = None,
    ) -> None:
        """Prepares the weights; abstract ones, of which programs are only lowered, stay abstract.

        Args:
          placed: the model.
          parameters: as they are stored.
          start_id: with which each text of a T5 begins; that of all published ones is 0.
          int8: whether the matrices of its layers and the table of its logits are kept in 8 bits
            (`mtjax.sharding.int8`); a T5's encoder is not.
          trained: the GPT or Llama as these parameters are stored, where that is not `placed` but on another mesh of
            the same devices (`mtjax.generate.resharding`).
          vocab_size: ids from here on are not drawn; the model's own size when None.
          call: what is to be done with each program; the default runs it, and of abstract ones finds the shapes.

        Raises:
          UserError: the family writes no text, the mesh has stages or shares samples, or experts were to be kept in 8
            bits.
        """
        if not issubclass(placed.family, WRITERS):
            raise UserError(f"a {named(placed.config.model)} does not write text; gpt, llama and t5 do")
        if placed.stages > 1:
            raise UserError(f"generating needs a mesh without stages, and this one is {placed.shape}")
        check_no_context_parallel(placed.shape)
        if int8 and (count := placed.config.model.num_experts):
            raise UserError(
                f"weights_dtype int8 is for layers without experts, and num_experts is {count}: leave it out"
            )
        self.placed, self.config, self.start_id, self.int8 = placed, placed.config, start_id, int8
        self.reads_text = issubclass(placed.family, T5)
        self.rules = placed.layout.rules.with_whole_samples
        self.dtype = jnp.dtype(self.config.training.compute_dtype)
        alone_on_cpu = placed.mesh.size == 1 and placed.mesh.devices.flat[0].platform == "cpu"
        self._keeping = WeightFormat(self.dtype, int8, alone_on_cpu)
        size = vocab_size or self.config.model.vocab_size
        assert size is not None  # the table has rows
        self.vocab_size = size
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parameters))
        self._call = call or (jax.eval_shape if is_abstract else _call)
        with self._traced():
            parts = (
                LayerwiseTransfer(trained, placed, self._call).of(parameters)
                if trained
                else stacks_of(placed, parameters)
            )
            weights = prepare_weights(*parts, self._keeping, self._call)
        # Programs take the weights as a list: flax's modules take half a millisecond to flatten, for each step.
        self._leaves, self._structure = jax.tree.flatten(weights)

    @classmethod
    def abstract(cls, placed: ShardedModel, *, int8: bool = False) -> "Decoder":
        """One without weights, whose programs can be lowered.

        Raises:
          UserError: as of the constructor.
        """
        return cls(placed, placed.restore_target, int8=int8)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the tables."""
        return padded_vocab_size(self.config.model)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest sequence; of a T5, without the text that it answers."""
        model = self.config.model
        return max(model.sequence_length, decoder_length(model)) if self.reads_text else model.sequence_length

    def empty(self, sequences: int, length: int) -> tuple[Cache, Sequences]:
        """A cache with room for `length` tokens of each of some sequences, none of which is being written."""
        with self._traced():
            return self._call(self._compiled_empty, sequences, length)

    def resized(self, cache: Cache, length: int) -> Cache:
        """The cache with room for `length` tokens of each sequence."""
        with self._traced():
            return self._call(self._compiled_resize, cache, length)

    def prefill(self, cache: Cache, sequences: Sequences, chunk: PromptChunk, scored: bool) -> tuple[Any, ...]:
        """Reads a chunk of a prompt, and draws the token after it.

        Returns:
          Cache and sequences, in the memory of those given; the drawn token; and of each token of the chunk, if
          `scored`, how likely its target was.
        """
        with self._traced():
            return self._call(self._compiled_read, self._leaves, cache, sequences, chunk, scored)

    def prefill_encoder(
        self, cache: Cache, sequences: Sequences, text: EncoderInput, chunk: PromptChunk
    ) -> tuple[Any, ...]:
        """Reads the text that a sequence answers, and then as `read`, without scores."""
        with self._traced():
            return self._call(self._compiled_read_text, self._leaves, cache, sequences, text, chunk)

    def copy_sequence(self, cache: Cache, source: int, target: int) -> Cache:
        """The cache, in the memory of the one given, with a sequence as a copy of another."""
        with self._traced():
            return self._call(self._compiled_copy, cache, jnp.int32(source), jnp.int32(target))

    def reorder(self, cache: Cache, sequences: Sequences, sources: Any, tokens: Any) -> tuple[Cache, Sequences]:
        """Each sequence becomes a copy of another, [sequences], with another newest token."""
        with self._traced():
            return self._call(self._compiled_follow, cache, sequences, sources, tokens)

    def decode(
        self, cache: Cache, sequences: Sequences, active: Bool[Array, " sequences"]
    ) -> tuple[Cache, Sequences, SampledTokens]:
        """Reads the newest token of each active sequence and draws the next; in the memory of those given."""
        with self._traced():
            return self._call(self._compiled_step, self._leaves, cache, sequences, active)

    def lower_step(self, sequences: int, length: int) -> jax.stages.Lowered:
        """The program of `step`."""
        with self._traced():
            cache, state = jax.eval_shape(partial(self._empty, sequences, length))
            active = jax.ShapeDtypeStruct((sequences,), jnp.bool_)
            return self._compiled_step.lower(self._leaves, cache, state, active)

    # --- what is compiled

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with jax.set_mesh(self.placed.mesh), use_rules(self.rules):
            yield

    def _of_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of weights as one of their leaves."""

        @wraps(function)
        def of_leaves(leaves: list[Array], *arguments: Any) -> Any:
            return function(jax.tree.unflatten(self._structure, leaves), *arguments)

        return of_leaves

    @cached_property
    def _compiled_step(self) -> Any:
        return jax.jit(self._of_leaves(self._step), donate_argnums=(1, 2))

    @cached_property
    def _compiled_read(self) -> Any:
        return jax.jit(self._of_leaves(self._read), donate_argnums=(1, 2), static_argnums=4)

    @cached_property
    def _compiled_read_text(self) -> Any:
        return jax.jit(self._of_leaves(self._read_text), donate_argnums=(1, 2))

    @cached_property
    def _compiled_copy(self) -> Any:
        def copy(cache: Cache, source: Array, target: Array) -> Cache:
            return jax.tree.map(lambda rows: rows.at[target].set(rows[source]), cache)

        return jax.jit(copy, donate_argnums=0)

    @cached_property
    def _compiled_follow(self) -> Any:
        def follow(cache: Cache, state: Sequences, sources: Array, tokens: Array) -> tuple[Cache, Sequences]:
            cache, state = jax.tree.map(lambda rows: jnp.take(rows, sources, axis=0), (cache, state))
            return cache, dataclasses.replace(state, tokens=tokens)

        return jax.jit(follow, donate_argnums=(0, 1))

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
        kinds = {"attention": KVCache, "cross": CrossKVCache} if self.reads_text else {"attention": KVCache}
        sizes = (max(num_kv_heads(model), num_shards("heads")), length, head_dim(model), self.dtype)
        cache = [
            {name: kind.empty(sequences, *sizes) for name, kind in kinds.items()} for _ in range(decoder_layers(model))
        ]
        counts = jnp.zeros((sequences, padded_vocab_size(model)), jnp.int32, out_sharding=spec("batch", "vocab"))
        zeros = jnp.zeros(sequences, jnp.int32)
        return cache, Sequences(zeros, zeros, greedy_batch(sequences), counts)

    def _step(self, weights: DecoderWeights, cache: Cache, state: Sequences, active: Array) -> tuple[Any, ...]:
        positions = jnp.where(active, state.positions, cache_length(cache))  # beyond it nothing is written
        hidden, cache = self._hidden(weights, cache, state.tokens[:, None], CachePositions(positions[:, None]))
        table = weights.model.output_table[...]
        drawn = draw_tokens(hidden[:, 0], table, state.counts, state.draws, self.vocab_size)
        draws = dataclasses.replace(state.draws, number=state.draws.number + active)
        tokens = jnp.where(active, drawn.token, state.tokens)
        counts = count_drawn(state.counts, jnp.where(active, drawn.token, -1))
        return cache, Sequences(tokens, state.positions + active, draws, counts), drawn

    def _read(
        self, weights: DecoderWeights, cache: Cache, state: Sequences, chunk: PromptChunk, scored: bool
    ) -> tuple[Any, ...]:
        place, own = jnp.arange(len(chunk.tokens)), chunk.sequence
        reading = CachePositions((chunk.start + place)[None], own)
        hidden, cache = self._hidden(weights, cache, chunk.tokens[None], reading)
        prompt = jnp.where(place < chunk.count, chunk.tokens, -1)
        counts = count_prompt(state.counts, own, prompt, chunk.is_first)
        table, size = weights.model.output_table[...], self.vocab_size
        last = lax.dynamic_index_in_dim(hidden[0], chunk.count - 1, keepdims=True)
        own_counts = lax.dynamic_index_in_dim(counts, own, keepdims=True)
        drawn = draw_tokens(last, table, own_counts, chunk.draws, size)
        scores = score_tokens(hidden[0], table, jnp.maximum(chunk.targets, 0), size) if scored else None
        is_last = chunk.targets[chunk.count - 1] < 0
        counts = count_drawn(counts, jnp.where((jnp.arange(len(state.tokens)) == own) & is_last, drawn.token[0], -1))
        put = lambda all_rows, row: all_rows.at[own].set(row[0])  # noqa: E731
        draws = jax.tree.map(put, state.draws, dataclasses.replace(chunk.draws, number=chunk.draws.number + 1))
        position = (chunk.start + chunk.count)[None]
        state = Sequences(put(state.tokens, drawn.token), put(state.positions, position), draws, counts)
        return cache, state, drawn, scores

    def _read_text(
        self, weights: DecoderWeights, cache: Cache, state: Sequences, text: EncoderInput, chunk: PromptChunk
    ) -> tuple[Any, ...]:
        mask = (jnp.arange(len(text.tokens)) < text.count).astype(jnp.int32)[None]
        encoded = weights.model.encoded(text.tokens[None], mask)
        after = []
        for layer, states in zip(weights.layers, cache, strict=True):
            key_value = layer.cross.keys_and_values(encoded)
            after.append(states | {"cross": states["cross"].replaced(*key_value, chunk.sequence, text.count)})
        return self._read(weights, after, state, chunk, False)

    def _hidden(
        self, weights: DecoderWeights, cache: Cache, tokens: Array, reading: CachePositions
    ) -> tuple[Float[Array, "batch seq embed"], Cache]:
        """Final hidden states of tokens, and the cache with them."""
        x, context = weights.model.embed_new(tokens, reading, cache_length(cache))
        after = []
        with jax.named_scope("layers"):
            for layer, states in zip(weights.layers, cache, strict=True):
                x, states = layer(x, context, states)
                after.append(states)
        return weights.model.final_hidden(x), after


def prompt_chunk(
    prompt: Sequence[int], start: int, length: int, sequence: int, draws: SamplingBatch, first: int = 0
) -> PromptChunk:
    """`length` tokens of a prompt from `start` on, or those that are left of it; reading began at `first`."""
    own, after = prompt[start : start + length], prompt[start + 1 : start + length + 1]
    at, count, place = (jnp.int32(number) for number in (start, len(own), sequence))
    is_first = jnp.array(start == first)
    return PromptChunk(_filled(own, length, 0), _filled(after, length, -1), at, count, place, draws, is_first)


def filled_text(ids: Sequence[int], length: int) -> EncoderInput:
    """A text that is answered, filled up to a length."""
    return EncoderInput(_filled(ids, length, 0), jnp.int32(len(ids)))


def _filled(ids: Sequence[int], length: int, filling: int) -> Array:
    filled = np.full(length, filling, np.int32)
    filled[: len(ids)] = ids
    return jnp.asarray(filled)


def cache_length(cache: Cache) -> int:
    """Tokens for which each sequence has room."""
    return cache[0]["attention"].length


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def greedy_batch(rows: int) -> SamplingBatch:
    """The most likely tokens, nothing reported."""
    zeros, ones, none = jnp.zeros(rows), jnp.ones(rows), jnp.zeros(rows, jnp.int32)
    warping = LogitsParams(zeros, none, ones, zeros, ones, zeros, zeros)
    return SamplingBatch(warping, jnp.zeros((rows, 2), jnp.uint32), none, jnp.zeros(rows, bool))
