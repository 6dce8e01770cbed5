"""Embeds pieces of text: the mean of an encoder's last hidden states over the tokens of each."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.config import Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.data.cache import digest
from mtjax.data.tokens.identity import content_digest
from mtjax.errors import UserError
from mtjax.families.bert.model import Encoder as BERTEncoder
from mtjax.finetune.samples import RowEncoder
from mtjax.layout.mesh import parse_mesh
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.models.project import reshard_sequence
from mtjax.models.sharded_model import ShardedModel, Tree
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.axes import use_rules
from mtjax.sharding.global_batch import global_batch, process_rows
from mtjax.sharding.param_specs import replicated

SHORTEST = 32
"""Tokens of the shortest shape; each next one is twice as long."""
HEADS = ("head", "order", "output")
"""Modules after the encoder."""
RULE = "mean of the last hidden states, without [CLS] and [SEP]"


class Embedder:
    """An encoder on a mesh.

    Attributes:
      name: as the user typed it.
      max_tokens: tokens that are read of a text, with those before and after it; a longer one is cut.
      width: of an embedding.
      dtype: in which the encoder computes.
    """

    def __init__(
        self, name: str, *, mesh: str = "1x1", rows: int = 128, max_tokens: int = 256, dtype: str = "float32"
    ) -> None:
        """Reads the weights.

        Args:
          name: `hf:FOLDER`, a run or other weights of a BERT.
          mesh: DATAxMODEL.
          rows: texts in a batch per data-parallel rank.
          max_tokens: see the attribute.
          dtype: in which the encoder computes.

        Raises:
          UserError: there are no such weights, or they are not of an encoder.
        """
        mesh_shape = parse_mesh(mesh)
        devices = attach_devices(mesh_shape)  # before the weights are looked at, which fixes the number of devices
        self.name, self._saved = name, SavedModel.open(name, Hints(vocab_multiple_for(mesh_shape)), "--embedder")
        model = self._saved.config.model
        if model.family != "bert":
            raise UserError(
                f"--embedder {name} is of the family {model.family}, and must be a bert: it reads both ways"
            )
        if max_tokens > model.sequence_length:
            raise UserError(
                f"--embedder-tokens is {max_tokens}, and --embedder {name} reads {model.sequence_length} tokens: give "
                "at most as many"
            )
        self.max_tokens, self.width, self.dtype = max_tokens, model.hidden_size, dtype
        parallel = Parallel(mesh=mesh)
        config = for_rows(self._saved.config, parallel, rows, compute_dtype=dtype)
        self._sharded_model = ShardedModel(config, devices)
        if self._sharded_model.stages > 1 or self._sharded_model.layout.rules.seq:
            raise UserError(
                f"the mesh {mesh} has pipeline stages or context ranks, and an embedder runs without: take DATAxMODEL"
            )
        self._encoder = RowEncoder(self._saved.tokenizer()[1], model.family)
        self._batch = config.training.global_batch_size
        self._mine = process_rows(self._sharded_model.batch_sharding, self._batch)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of weights and tokenizer, of type and tokens, and of how the states become one vector."""
        # Not the name: the same weights may be elsewhere. Not the mesh: it does not change the numbers beyond rounding.
        made_by = {"weights": self._saved.content, "tokenizer": content_digest(self._encoder.tokenizer)}
        return digest({**made_by, "tokens": self.max_tokens, "dtype": self.dtype, "rule": RULE})

    @cached_property
    def _parameters(self) -> Tree:
        """The parameters of the encoder, and zeros for its heads, which folders of encoders alone don't have."""
        return self._saved.parameters(self._sharded_model, without=HEADS)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float16[texts, width]; zeros for a text without tokens.

        Raises:
          UserError: a number is not finite in float16.
        """
        out = np.zeros((len(texts), self.width), np.float16)
        ids = [ids for (ids,) in self._encoder.encode([(text,) for text in texts])]
        # Two more: [CLS] and [SEP].
        sizes = np.array([min(len(each) + 2, self.max_tokens) if len(each) else 0 for each in ids])
        # Texts are batched by length, in rows of a few lengths: each is a shape to compile.
        for length in self._lengths:
            chosen = np.flatnonzero((sizes > 0) & (sizes <= length))
            sizes[chosen] = 0
            for at in range(0, len(chosen), self._batch):
                rows = chosen[at : at + self._batch]
                out[rows] = self._embed([ids[row] for row in rows], length)
        # float16, in which the database is stored, ends at 65,504.
        if not np.isfinite(out).all():
            bad = texts[int(np.argmin(np.isfinite(out).all(axis=1)))]
            raise UserError(f"--embedder {self.name} gives numbers beyond float16, for example for {bad[:60]!r}")
        return out

    @property
    def _lengths(self) -> list[int]:
        steps = (SHORTEST << i for i in range(self.max_tokens.bit_length()))
        return [length for length in steps if length < self.max_tokens] + [self.max_tokens]

    def _embed(self, ids: Sequence[np.ndarray], length: int) -> np.ndarray:
        # Always full batches: a last one that is shorter would be another shape to compile.
        tokens = np.full((self._batch, length), self._encoder.format.pad, np.int32)
        sizes = np.full(self._batch, 3)  # rows that fill up the batch have a token, so that no mean is of nothing
        for i, each in enumerate(ids):
            row, _ = self._encoder.format.row((each,), length)
            tokens[i, : len(row)], sizes[i] = row, len(row)
        position = np.arange(length)
        # Without [CLS] and [SEP], which would make up most of the mean of a short text.
        is_text = ((position > 0) & (position < sizes[:, None] - 1)).astype(np.float32)
        arrays = {
            "tokens": tokens,
            "token_types": np.zeros_like(tokens),
            "padding_mask": (position < sizes[:, None]).astype(np.int32),
            "is_text": is_text,
        }
        local = {name: array[self._mine] for name, array in arrays.items()}
        batch = global_batch(self._sharded_model.batch_sharding, local, self._batch)
        return np.asarray(self._sharded_model.on_mesh(self._compiled, self._parameters, batch))[: len(ids)]

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._mean, out_shardings=replicated(self._sharded_model.mesh))

    def _mean(self, parameters: Tree, batch: dict[str, Array]) -> Array:
        """Returns float16[batch, width]."""
        with use_rules(self._sharded_model.layout.rules):
            model = self._sharded_model.inference_model(parameters)
            assert isinstance(model, BERTEncoder)  # checked in __init__
            hidden = model.final_norm(final_hidden_states(self._sharded_model, parameters, batch))
            # The mean in float32: a sum of 256 states in 16 bits loses digits.
            hidden = reshard_sequence(hidden, "seq").astype(jnp.float32)
            weights = batch["is_text"][:, :, None]
            return ((hidden * weights).sum(axis=1) / weights.sum(axis=1)).astype(jnp.float16)
