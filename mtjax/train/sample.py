"""A continuation of a prompt: a sample of what the trained model writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard

from mtjax.data import Tokenizer
from mtjax.models.families.gpt import GPT
from mtjax.models.placed import Placed, Tree
from mtjax.sharding.axes import WHOLE, use_rules

CONTINUES_TEXT = ("gpt", "llama")
"""Families that predict the next token."""


def continue_text(
    placed: Placed,
    parameters: Tree,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    length: int = 96,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """`prompt` and up to `length` tokens after it, sampled from the `top_k` most likely: the same on every mesh.

    Spaces at the prompt's end are left out: in most vocabularies a word's token begins with the space before it, and
    after a separate space the model would be in the middle of a word. The whole window is computed again for each
    token: good enough for one look at a model, not for serving.
    """
    ids = tokenizer.encode(prompt.rstrip(" "))[-placed.config.model.sequence_length // 2 :] or [tokenizer.eod]
    window = min(placed.config.model.sequence_length, len(ids) + length)
    tokens = np.full((1, window), tokenizer.eod, np.int32)
    tokens[0, : len(ids)] = ids
    # One sample does not split over data ranks, nor do a few tokens over model ranks: all ranks do the same work.
    rules = dataclasses.replace(placed.layout.rules, batch=(), act_seq=())

    def sample(parameters: Tree, tokens: Array, key: Array) -> Array:
        with use_rules(rules):
            model = placed.model_in_use(parameters)
            assert isinstance(model, GPT)  # other families don't continue text

            def append(position: Array, tokens: Array) -> Array:
                stream = placed.final_stream(parameters, {"tokens": tokens})
                hidden = lax.dynamic_slice_in_dim(model.final_norm(stream), position - 1, 1, axis=1)
                logits = reshard(model.logits(hidden), WHOLE)[0, 0, : tokenizer.vocab_size]
                likely, their_ids = lax.top_k(logits, min(top_k, tokenizer.vocab_size))
                chosen = their_ids[jax.random.categorical(jax.random.fold_in(key, position), likely / temperature)]
                return lax.dynamic_update_slice(tokens, chosen.astype(jnp.int32)[None, None], (0, position))

            return lax.fori_loop(len(ids), window, append, tokens)

    with jax.set_mesh(placed.mesh):
        out = np.asarray(jax.jit(sample)(parameters, jnp.asarray(tokens), jax.random.key(seed)))[0].tolist()
    new = out[len(ids) :]
    return tokenizer.decode(out[: len(ids)] + new[: new.index(tokenizer.eod) if tokenizer.eod in new else None])
