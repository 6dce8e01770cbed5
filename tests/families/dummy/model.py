"""The network of the dummy family; a test says what a layer of the kind `plain` is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.families.gpt.model import GPT
from mtjax.layout.stacks import stacks_of
from mtjax.models.language_model import HiddenStates, Section, embed_tokens, vocabulary_table
from mtjax.models.layer import Stack
from mtjax.models.layer_context import LayerContext
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy


class Dummy(GPT):
    """Embedding, layers of a kind of their own, and a loss: nothing of GPT's but what a batch is."""

    def __init__(self, config: Any, *, key: Any) -> None:
        table_key, stack_key = jax.random.split(key)
        model, loop_settings = config.model, LayerLoopSettings.of(config.training)
        self.table = vocabulary_table(model, table_key)
        layer_stack = dataclasses.replace(stacks_of(model)[0], kind="plain")
        self.layers_of_mine = Stack(
            model,
            jnp.float32,
            layer_stack=layer_stack,
            loop_settings=loop_settings,
            parallel=config.parallel,
            key=stack_key,
        )

    @property
    def sections(self) -> dict[str, Section]:
        return {"layers_of_mine": Section(self.layers_of_mine, self._embed, self._context)}

    def _embed(self, batch: Any, keys: Any, before: HiddenStates | None, positions: Any = None) -> HiddenStates:
        return HiddenStates(embed_tokens(self.table, None, batch["tokens"], jnp.float32))

    def _context(self, batch: Any, keys: Any, hidden: HiddenStates) -> LayerContext:
        return LayerContext(keys)

    def losses(self, trunk_output: HiddenStates, batch: Any, keys: Any, options: LossOptions) -> dict[str, Any]:
        return {"loss": vocab_parallel_cross_entropy(trunk_output.x, self.table[...], batch["labels"], options)}
