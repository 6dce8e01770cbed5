"""The text sample at the end of a training run, generated on the run's devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.config import Parallel
from mtjax.config.sizes import divisors, longest_text
from mtjax.convert.saved_model import without_training
from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms, prompt_chunk
from mtjax.generate.engine import Engine, sampling_batch
from mtjax.generate.request import Request, Sampling
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.device_mesh import make_mesh

Tree = Any
SAMPLING = Sampling(max_tokens=96, temperature=0.7, top_k=40)


def continue_text(trained: ShardedModel, parameters: Tree, tokenizer: Tokenizer, prompt: str) -> str:
    """Returns `prompt` and up to 96 tokens after it, sampled with top-k 40: the same text on every mesh.

    Meanwhile the devices hold a second copy of the model, in the compute dtype.

    Args:
      trained: a GPT or Llama.
      parameters: as they are stored in training.
      tokenizer: the model's tokenizer.
      prompt: a text.
    """
    prompt_tokens = PromptTokens.of(trained, tokenizer, prompt)
    ids = list(prompt_tokens.ids)

    def on_token(token: Any) -> bool:
        ids.append(token.id)
        return False

    if prompt_tokens.fits:
        decoder = GenerationPrograms(
            generation_model(trained), parameters, trained=trained, vocab_size=tokenizer.vocab_size
        )
        engine = Engine(decoder, sequences=1, state_snapshots=0)
        engine.submit(Request(prompt_tokens.ids, SAMPLING, frozenset({tokenizer.eod}), on_token=on_token))
        engine.run()
    return tokenizer.decode(ids)


def lower_continuation(trained: ShardedModel, tokenizer: Tokenizer, prompt: str) -> list[jax.stages.Lowered]:
    """Lowers the programs of `continue_text` from abstract parameters."""
    prompt_tokens, programs = PromptTokens.of(trained, tokenizer, prompt), Programs({})
    if prompt_tokens.fits:
        target, size = trained.restore_target, tokenizer.vocab_size
        decoder = GenerationPrograms(generation_model(trained), target, trained=trained, vocab_size=size, call=programs)
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
    """An encoded prompt."""

    ids: tuple[int, ...]
    fits: bool
    """Whether the context has space for at least one more token."""

    @classmethod
    def of(cls, trained: ShardedModel, tokenizer: Tokenizer, prompt: str) -> "PromptTokens":
        """Encodes a text, truncated to its last tokens if it is longer than half of the context."""
        most = longest_text(trained.config.model)
        # Without trailing spaces: in most vocabularies a word's token begins with the space before it, so that after a
        # separate space the model would be in the middle of a word.
        # Documents begin after an end of document in training: it stands for an empty prompt.
        ids = tokenizer.encode(prompt.rstrip(" "))[-most // 2 :] or [tokenizer.eod]
        return cls(tuple(ids), len(ids) < most)


@dataclass(frozen=True)
class Programs:
    """Collects programs, each once, by lowering them instead of calling them."""

    lowered: dict[Any, jax.stages.Lowered]

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """Lowers `function`; returns the shapes of its outputs."""
        traced = function.trace(*arguments)
        # A jitted function is one program for each set of shapes.
        key = function, str(traced.jaxpr.in_avals)
        if key not in self.lowered:
            self.lowered[key] = traced.lower()
        return traced.out_info


def generation_model(trained: ShardedModel) -> ShardedModel:
    """Reshards a model for generation on its devices; on the CPU devices of one process, on the first device only."""
    # Multiple CPU devices of a process share the same cores: collectives between them would only cost time.
    devices = list(trained.mesh.devices.flat)
    return reshard_for_generation(
        trained, devices[:1] if devices[0].platform == "cpu" and jax.process_count() == 1 else devices
    )


def reshard_for_generation(trained: ShardedModel, devices: list[Any]) -> ShardedModel:
    """Reshards a model over these devices with the highest tensor parallel degree that the model supports.

    This replaces the pipeline stages and the distributed optimizer's shards, which also bounded the memory per device.
    """
    for degree in sorted(divisors(len(devices)), reverse=True):
        mesh_shape = parse_mesh(f"{len(devices) // degree}x{degree}")
        batch = {"global_batch_size": mesh_shape.size, "microbatch_size": None}
        config = without_training(trained.config, Parallel(mesh=str(mesh_shape)), **batch)
        try:
            check_config(config, mesh_shape)
        # The degree does not divide the heads, the vocabulary or another dimension.
        except UserError:
            continue
        return ShardedModel(config, make_mesh(mesh_shape, devices))
    raise AssertionError("tensor parallel degree 1 is always valid")
