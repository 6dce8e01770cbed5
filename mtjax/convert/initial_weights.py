"""Initial weights in another format, `--init-from hf:DIR`, `megatron:DIR` or `peft:DIR`, read onto a mesh."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax.config.model_identity import differences
from mtjax.convert.saved_model import SavedModel
from mtjax.convert.weights_path import ADAPTERS
from mtjax.data.tokens.folder import GENERATION_CONFIG
from mtjax.errors import UserError
from mtjax.train.folder.tokenizer import files_of_weights, read_files
from mtjax.train.step import TrainStep

KINDS = ("hf", "megatron", ADAPTERS)


@dataclass(frozen=True)
class ForeignWeights:
    """Weights of another format, as `InitialWeights`."""

    saved: SavedModel

    @property
    def folder(self) -> Path:
        """Their folder."""
        return self.saved.folder

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer next to them, as `--tokenizer` names it."""
        return self.saved.source.origin.tokenizer

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files beside them that the run's folder keeps, by name."""
        origin = self.saved.source.origin
        files = files_of_weights(origin.files, origin.hugging_face, vocabulary=False)
        return read_files(origin.generation_config.parent, (GENERATION_CONFIG,)) | files

    def check(self, program: TrainStep) -> None:
        """Checks that they are of a program's model; the padding of the vocabulary may differ.

        Raises:
          UserError: they are not (lists all differences).
        """
        theirs, ours = self.saved.config.model, program.config.model
        # A mesh may need more rows of padding, which are zeros and have no effect.
        ours = dataclasses.replace(ours, vocab_multiple=theirs.vocab_multiple)
        if listed := "".join(f"\n  {difference}" for difference in differences(theirs, ours)):
            raise UserError(f"the weights in {self.folder} are of another model; use its settings:{listed}")

    def read(self, program: TrainStep) -> Any:
        """Reads the parameters with the program's shardings.

        Raises:
          UserError: they are corrupted, or can't be read.
        """
        return self.saved.parameters(program)


def open_foreign(text: str) -> ForeignWeights | None:
    """Opens what `--init-from` names with a kind; None for a folder of mtjax.

    Raises:
      UserError: there are no such weights.
    """
    if text.partition(":")[0] not in KINDS or Path(text).exists():
        return None
    return ForeignWeights(SavedModel.open(text, option="--init-from"))
