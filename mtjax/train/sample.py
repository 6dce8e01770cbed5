"""A continuation of a prompt: a sample of what the trained model writes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard

from mtjax.config import Config
from mtjax.data import Tokenizer
from mtjax.models.families.gpt import GPT
from mtjax.models.placed import Placed, Tree
from mtjax.sharding.axes import WHOLE, use_rules


def continues_text(config: Config) -> bool:
    """Whether a model predicts the next token."""
    return config.model.family in ("gpt", "llama") and config.model.head == "language"


@dataclass(frozen=True)
class Continuation:
    """A prompt and the program that continues it.

    Attributes:
      placed: the model.
      tokenizer: its tokenizer.
      ids: of the prompt.
      window: tokens in all.
      temperature: by which logits are divided.
      top_k: how many of the most likely tokens are sampled from.
    """

    placed: Placed
    tokenizer: Tokenizer
    ids: tuple[int, ...]
    window: int
    temperature: float = 0.7
    top_k: int = 40

    @classmethod
    def of(cls, placed: Placed, tokenizer: Tokenizer, prompt: str, length: int = 96) -> "Continuation":
        """Up to `length` tokens after a prompt."""
        most = placed.config.model.sequence_length
        ids = tokenizer.encode(prompt.rstrip(" "))[-most // 2 :] or [tokenizer.eod]
        return cls(placed, tokenizer, tuple(ids), min(most, len(ids) + length))

    def run(self, parameters: Tree, seed: int) -> list[int]:
        """The prompt's ids and those after it."""
        with jax.set_mesh(self.placed.mesh):
            return np.asarray(self._compiled(parameters, *self._inputs(seed)))[0].tolist()

    def lower(self, seed: int = 0) -> jax.stages.Lowered:
        """The program, lowered from abstract parameters."""
        with jax.set_mesh(self.placed.mesh):
            return self._compiled.lower(self.placed.restore_target, *self._inputs(seed))

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._sample)

    def _inputs(self, seed: int) -> tuple[Array, Array]:
        tokens = np.full((1, self.window), self.tokenizer.eod, np.int32)
        tokens[0, : len(self.ids)] = self.ids
        return jnp.asarray(tokens), jax.random.key(seed)

    def _sample(self, parameters: Tree, tokens: Array, key: Array) -> Array:
        placed, vocabulary = self.placed, self.tokenizer.vocab_size
        # One sample does not split over data ranks, nor a few tokens over model ranks: all ranks do the same work.
        with use_rules(placed.layout.rules.with_whole_samples):
            model = placed.model_in_use(parameters)
            assert isinstance(model, GPT)  # other families don't continue text

            def append(position: Array, tokens: Array) -> Array:
                stream = placed.final_stream(parameters, {"tokens": tokens})
                hidden = lax.dynamic_slice_in_dim(model.final_norm(stream), position - 1, 1, axis=1)
                logits = reshard(model.logits(hidden), WHOLE)[0, 0, :vocabulary]
                likely, their_ids = lax.top_k(logits, min(self.top_k, vocabulary))
                key_here = jax.random.fold_in(key, position)
                chosen = their_ids[jax.random.categorical(key_here, likely / self.temperature)]
                return lax.dynamic_update_slice(tokens, chosen.astype(jnp.int32)[None, None], (0, position))

            return lax.fori_loop(len(self.ids), self.window, append, tokens)


def continue_text(placed: Placed, parameters: Tree, tokenizer: Tokenizer, prompt: str, *, seed: int = 0) -> str:
    """`prompt` and up to 96 tokens after it, sampled from the 40 most likely: the same on every mesh.

    Spaces at the prompt's end are left out: in most vocabularies a word's token begins with the space before it, and
    after a separate space the model would be in the middle of a word. The whole window is computed again for each
    token: good enough for one look at a model, not for serving.
    """
    continuation = Continuation.of(placed, tokenizer, prompt)
    out, start = continuation.run(parameters, seed), len(continuation.ids)
    new = out[start:]
    return tokenizer.decode(out[:start] + new[: new.index(tokenizer.eod) if tokenizer.eod in new else None])
