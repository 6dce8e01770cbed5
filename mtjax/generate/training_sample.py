"""What a model that was just trained writes: the sample at the end of a run, on the run's own devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.config import Parallel
from mtjax.config.sizes import divisors
from mtjax.convert.saved_model import without_training
from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.generate.decoder import Decoder, prompt_chunk
from mtjax.generate.engine import Engine, sampling_batch
from mtjax.generate.request import Request, Sampling
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.mesh import make_mesh
from mtjax.theory.divisibility import check_config
from mtjax.theory.mesh import parse_mesh

Tree = Any
SAMPLING = Sampling(max_tokens=96, temperature=0.7, top_k=40)


def continue_text(trained: ShardedModel, parameters: Tree, tokenizer: Tokenizer, prompt: str) -> str:
    """`prompt` and up to 96 tokens after it, drawn from the 40 most likely: the same on every mesh.

    Spaces at the prompt's end are left out: in most vocabularies a word's token begins with the space before it, and
    after a separate space the model would be in the middle of a word. Of a long prompt the end is read. For the time
    of it, the devices hold the model once more, in the compute type.

    Args:
      trained: a GPT or Llama with a head of language.
      parameters: as it stores them.
      tokenizer: its own.
      prompt: a text.
    """
    prompt_tokens = PromptTokens.of(trained, tokenizer, prompt)
    ids = list(prompt_tokens.ids)

    def on_token(token: Any) -> bool:
        ids.append(token.id)
        return False

    if prompt_tokens.fits:
        decoder = Decoder(generation_model(trained), parameters, trained=trained, vocab_size=tokenizer.vocab_size)
        engine = Engine(decoder, sequences=1)
        engine.submit(Request(prompt_tokens.ids, SAMPLING, frozenset({tokenizer.eod}), on_token=on_token))
        engine.run()
    return tokenizer.decode(ids)


def lower_continuation(trained: ShardedModel, tokenizer: Tokenizer, prompt: str) -> list[jax.stages.Lowered]:
    """The programs of `continue_text`, lowered from abstract parameters; see there."""
    prompt_tokens, programs = PromptTokens.of(trained, tokenizer, prompt), Programs({})
    if prompt_tokens.fits:
        target, size = trained.restore_target, tokenizer.vocab_size
        decoder = Decoder(generation_model(trained), target, trained=trained, vocab_size=size, call=programs)
        engine = Engine(decoder, sequences=1)
        request = Request(prompt_tokens.ids, SAMPLING)
        cache, sequences = decoder.empty(1, engine.cache_length_for(request))
        for start, length in engine.prefill_chunks(request.prompt):
            chunk = prompt_chunk(request.prompt, start, length, 0, sampling_batch(SAMPLING, False))
            cache, sequences, *_ = decoder.prefill(cache, sequences, chunk, False)
        decoder.decode(cache, sequences, jnp.ones(1, bool))
    return list(programs.lowered.values())


@dataclass(frozen=True)
class PromptTokens:
    """A prompt in tokens."""

    ids: tuple[int, ...]
    fits: bool
    """Whether a token fits behind it."""

    @classmethod
    def of(cls, trained: ShardedModel, tokenizer: Tokenizer, prompt: str) -> "PromptTokens":
        """A text, or the end of one that would fill more than half of the context."""
        most = trained.config.model.sequence_length
        ids = tokenizer.encode(prompt.rstrip(" "))[-most // 2 :] or [tokenizer.eod]
        return cls(tuple(ids), len(ids) < most)


@dataclass(frozen=True)
class Programs:
    """Each program once, lowered instead of called."""

    lowered: dict[Any, jax.stages.Lowered]

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """What `function` would return, in shapes."""
        traced = function.trace(*arguments)
        key = function, str(traced.jaxpr.in_avals)
        if key not in self.lowered:
            self.lowered[key] = traced.lower()
        return traced.out_info


def generation_model(trained: ShardedModel) -> ShardedModel:
    """The model on the devices that write: its own; of the CPU devices of one process, which are one machine's cores
    under several names, the first alone."""
    devices = list(trained.mesh.devices.flat)
    return reshard_for_generation(
        trained, devices[:1] if devices[0].platform == "cpu" and jax.process_count() == 1 else devices
    )


def reshard_for_generation(trained: ShardedModel, devices: list[Any]) -> ShardedModel:
    """The model over as many model ways of these devices as divide it.

    So a device holds little of it, whatever stages and ZeRO split before.
    """
    for ways in sorted(divisors(len(devices)), reverse=True):
        shape = parse_mesh(f"{len(devices) // ways}x{ways}")
        batch = {"global_batch_size": shape.size, "microbatch_size": None}
        config = without_training(trained.config, Parallel(mesh=str(shape)), **batch)
        try:
            check_config(config, shape)
        except UserError:
            continue
        return ShardedModel(config, make_mesh(shape, devices))
    raise AssertionError("one model way splits nothing")
