"""Initial weights of finetuning: a pretrained trunk of any format, and a head, initialized if the weights have none."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from mtjax.config import Model
from mtjax.config.model_identity import differences
from mtjax.convert.saved_model import Hints, SavedModel
from mtjax.errors import UserError
from mtjax.models.named_parameters import draw_named
from mtjax.sharding.param_specs import dotted
from mtjax.train.step import TrainStep

HEAD = "head"
"""Name of a head's module."""
POOLER = {f"{HEAD}.pooler.{kind}": f"order.pooler.{kind}" for kind in ("weight", "bias")}
"""Parameters of a head -> those of BERT's pretraining head from which they are initialized."""


@dataclass(frozen=True)
class PretrainedTrunk:
    """Pretrained weights of any format, and with any head; opened on first use, after devices are attached."""

    name: str
    hints: Hints

    @cached_property
    def saved(self) -> SavedModel:
        """The weights.

        Raises:
          UserError: they can't be read.
        """
        return SavedModel.open(self.name, self.hints)

    @property
    def folder(self) -> Path:
        """Their folder."""
        return self.saved.folder

    def check(self, program: TrainStep) -> None:
        """Checks that a program's model is that of the weights, except for the head and a shorter sequence.

        Raises:
          UserError: it differs (lists all differences).
        """
        theirs, ours = self.saved.config.model, program.config.model
        if ours.sequence_length > theirs.sequence_length and ours.position == "learned":
            raise UserError(
                f"sequence_length {ours.sequence_length} is above the {theirs.sequence_length} learned positions of "
                f"{self.folder}: lower --sequence-length"
            )
        # A task's head does not use the output table, so it is the same whether it was tied or not.
        names = ("head", "num_labels", "sequence_length", "sentence_order", "vocab_multiple", "tie_embeddings")
        names += ("lora_rank", "lora_alpha", "lora_targets")
        like_theirs = dataclasses.replace(ours, **{name: getattr(theirs, name) for name in names})
        if listed := "".join(f"\n  {difference}" for difference in differences(theirs, like_theirs)):
            raise UserError(f"the weights in {self.folder} belong to another model; use its settings:{listed}")

    def read(self, program: TrainStep) -> Any:
        """Reads the parameters with the program's shardings; initializes parameters of the head that are missing.

        Raises:
          UserError: they are corrupted, or can't be read.
        """
        # `fresh` are parameters that the weights lack: their reader draws them.
        theirs = set(self.saved.source.parameters) - self.saved.source.origin.fresh
        leaves, structure = jax.tree_util.tree_flatten_with_path(program.restore_target)
        targets = {dotted(path): leaf for path, leaf in leaves}
        # A head for the same task is loaded; else it is initialized, and its pooler taken from BERT's pretraining.
        same_head = _head_of(self.saved.config.model) == _head_of(program.config.model)
        sources = {name: name if same_head or not name.startswith(f"{HEAD}.") else POOLER.get(name) for name in targets}
        read = {source: targets[name] for name, source in sources.items() if source in theirs}
        arrays = self.saved.read({name: leaf for name, leaf in read.items() if name is not None}, program)
        missing = {name for name, source in sources.items() if source not in arrays}
        fresh = draw_named(program, program.config.training.seed, missing) if missing else {}
        parameters = [fresh[name] if name in missing else arrays[str(sources[name])] for name in targets]
        return jax.tree_util.tree_unflatten(structure, parameters)


def _head_of(model: Model) -> tuple[str, int]:
    return model.head, model.num_labels if model.head == "classification" else 1
