"""torchtitan's checkpoints of Llama: folders of torch.distributed.checkpoint with its names, read as a source."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.sizes import head_dim
from mtjax.convert.model_types.decoder_rows import ModuleNames, decoder_rows
from mtjax.convert.named import NamedWeights
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.stream import Origin, config_of
from mtjax.convert.table import Table
from mtjax.convert.torch_dist_files import METADATA_FILE, DistributedCheckpoint
from mtjax.errors import UserError

EMBEDDING = "tok_embeddings.weight"
PREFIX = "model."
"""Of all keys in older checkpoints, beside those of the optimizer and the data."""
_NO_WEIGHT = re.compile(r"(optimizer|state|param_groups|lr_scheduler|dataloader|train_state)\b.*|freqs_cis")


def is_torchtitan(keys: Iterable[str]) -> bool:
    """Returns whether keys of a folder of torch.distributed.checkpoint are those of torchtitan."""
    return any(key.removeprefix(PREFIX) == EMBEDDING for key in keys)


def step_folder(folder: Path) -> Path:
    """Returns the folder with the files: itself, or the newest `step-N` in it.

    Raises:
      UserError: there is none.
    """
    if (folder / METADATA_FILE).is_file():
        return folder
    steps = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    # `.metadata` is written last.
    finished = [number for number, path in steps.items() if (path / METADATA_FILE).is_file()]
    if not finished:
        raise UserError(f"{folder} is not a checkpoint of torchtitan: it has no {METADATA_FILE}, and no step-N has one")
    return steps[max(finished)]


class _Tensors:
    """The tensors of a folder by name."""

    ranks = 1

    def __init__(self, folder: Path) -> None:
        self._files = DistributedCheckpoint(folder)
        keys = [key for key in self._files.keys if not _NO_WEIGHT.fullmatch(key)]
        if not is_torchtitan(keys):
            raise UserError(f"{folder} is not a checkpoint of torchtitan's Llama: it has no {EMBEDDING}")
        if missing := self._files.missing_files(keys):
            raise UserError(f"{folder} lacks {len(missing)} of its files: {', '.join(missing[:5])}")
        self._tensors = {key.removeprefix(PREFIX): self._files.tensor(key) for key in keys}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._tensors.items()}
        kinds = {tensor.dtype for tensor in self._tensors.values()}
        if odd := kinds - {"float32", "float16", "bfloat16"}:
            raise UserError(f"{folder} holds {', '.join(sorted(odd))}; weights are converted from 16 or 32 bits")
        self.dtype = kinds.pop() if len(kinds) == 1 else "float32"

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns a tensor; `rank` is 0."""
        return self._tensors[name].read()


def names_in(names: Iterable[str]) -> ModuleNames:
    """Returns torchtitan's names of a Llama's modules, of which it has changed some."""
    names = set(names)
    linear = "qkv_linear." if any(".attention.qkv_linear." in name for name in names) else ""
    return ModuleNames(
        prefix="",
        embedding="tok_embeddings",
        output="output" if "output.weight" in names else "lm_head",
        attention="attention",
        query=f"{linear}wq",
        key=f"{linear}wk",
        value=f"{linear}wv",
        attention_output="wo",
        attention_norm="attention_norm",
        mlp_norm="ffn_norm",
        mlp="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
        # torchtitan rotates neighbouring channels, as Meta's Llama does; transformers' files have the rows in another
        # order.
        interleaved=True,
    )


class TorchtitanSource:
    """A Llama that torchtitan trained, on any number of ranks."""

    def __init__(self, folder: Path, vocab_multiple: int | None, model_config: str | None) -> None:
        """Checks every tensor's name and shape against the config of the model.

        Args:
          folder: of one step, or the one above it.
          vocab_multiple: mtjax's vocabulary is padded to a multiple of this.
          model_config: a config that describes the model; the folder has none.

        Raises:
          UserError: it is not such a checkpoint, or of another model (lists all tensors that differ).
        """
        files = step_folder(folder)
        tensors = _Tensors(files)
        config = _config(files, tensors.shapes, vocab_multiple, model_config)
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        names = names_in(tensors.shapes)
        copies = {f"{names.output}.weight": EMBEDDING}
        table = Table("torchtitan's Llama", decoder_rows(names, config.model), copies=copies)
        rows = tensors.shapes[EMBEDDING][0]
        self._weights = NamedWeights(table.select(self.parameters), tensors, config, rows, str(files))
        model = config.model
        notes = (
            f"torchtitan, {len(tensors.shapes)} tensors of {files.name}, {tensors.dtype}, without the optimizer",
            # The order of a head's rows depends on the size of heads, which no shape shows.
            f"{model.num_heads} heads of {head_dim(model)} and rope_theta {model.rope_theta:g} are those of --config",
        )
        self.origin = Origin(config, tensors.dtype, folder, notes=notes, not_finite=self._weights.not_finite)

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, in the files' dtype."""
        return self._weights.slices(parameter)


def _config(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], vocab_multiple: int | None, model_config: str | None
) -> Config:
    rows, hidden = shapes[EMBEDDING]
    layers = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=-1)
    sizes = f"{layers} layers, hidden size {hidden} and a vocabulary of {rows}"
    if model_config is None:
        raise UserError(
            f"{folder} has {sizes}, but torchtitan's checkpoints do not describe the model: add --config FILE, or the "
            "name of a preset such as llama3-8b"
        )
    model = configs.load(model_config).model
    settings = {**vars(model), "vocab_size": model.vocab_size or rows}
    settings |= {"vocab_multiple": vocab_multiple} if vocab_multiple else {}
    found = {"num_layers": layers, "hidden_size": hidden, "vocab_size": rows}
    if wrong := [f"{name} is {settings[name]}, not {size}" for name, size in found.items() if settings[name] != size]:
        raise UserError(f"--config {model_config} describes another model than {folder}: {'; '.join(wrong)}")
    return config_of(settings, model_config)
