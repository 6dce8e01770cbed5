"""Saved parameters without the rest of a run's state: in a run's folder or one written by `mtjax convert`, read slice
by slice.

Both have the same layout: `state/`, with every parameter as a zarr array under its dotted name (in Orbax's single
key-value store, or in a folder of its own), and `page/metadata`, with the model's config and the fingerprint of each
array.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import tensorstore as ts

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.float8 import STATE
from mtjax.config.model_identity import differences
from mtjax.errors import UserError, first_line, parse_json_object
from mtjax.layout.stages import PLAIN, LayerOrder, Orders, order_of
from mtjax.runtime.checkpoints.arrays import open_array, place_array
from mtjax.runtime.checkpoints.checkpoint import fingerprints_of, saved_orders
from mtjax.runtime.checkpoints.corruption import CorruptedCheckpoint, read_metadata, read_on_all_processes
from mtjax.runtime.processes.coordination import check_same
from mtjax.sharding.param_specs import dotted

Tree = Any

CONVERTED = "weights"
"""Subfolder of a converted folder that corresponds to a run's `checkpoints/STEP`."""
CHECKPOINTS = "checkpoints"
"""Subfolder of a run with its checkpoints by step."""
BEST = "best"
"""Subfolder of a run with its best checkpoint."""
SPECIAL_IDS = "special_token_ids.json"
"""File of a run that started with Hugging Face weights: the token ids in their `config.json` (`special_ids`)."""
PREFIX = "parameters"
"""Prefix of the names of parameters in a state."""


@dataclass(frozen=True)
class Weights:
    """Saved parameters."""

    folder: Path
    """Contains `state` and `page`."""
    metadata: Mapping[str, Any]

    @cached_property
    def config(self) -> Config:
        """The config of the run that saved them; for converted weights, only the model's settings are set."""
        return configs.from_dict(self.metadata["config"], source=str(self.folder))

    @cached_property
    def orders(self) -> Orders:
        """Order in which the layers were stacked when saved."""
        return saved_orders(self.metadata["config"])

    @property
    def names(self) -> list[str]:
        """Dotted names of the parameters, without `parameters.`, and without the scales of 8-bit training."""
        names = (name.partition(".") for name in self.metadata["fingerprints"])
        return [name for prefix, _, name in names if prefix == PREFIX and STATE not in name.split(".")]

    @property
    def root(self) -> Path:
        """Folder of the run or the conversion, with the tokenizer: the parent of `weights` or of `checkpoints/STEP`."""
        above = self.folder.parent
        return above.parent if above.name in (CHECKPOINTS, BEST) else above

    @property
    def is_run(self) -> bool:
        """Whether a run saved the tokenizer next to them, or they were converted from such weights."""
        return self.metadata["origin"].get("is_run", False) if "origin" in self.metadata else True

    @cached_property
    def hugging_face(self) -> Mapping[str, Any]:
        """The `config.json` of converted weights, or the `special_token_ids` of a run that started with such weights.

        Raises:
          UserError: the run's file is not a JSON object.
        """
        converted, saved_ids = self.metadata.get("origin", {}).get("hugging_face"), self.root / SPECIAL_IDS
        if converted or not saved_ids.is_file():
            return converted or {}
        return parse_json_object(saved_ids.read_bytes(), saved_ids)

    def open(self, name: str, prefix: str = PREFIX) -> ts.TensorStore:
        """Opens a parameter, with its layers in the model's order, for reading by slices:
        `weights.open(name)[3].read().result()`.

        Raises:
          UserError: it is not there or can't be read.
        """
        try:
            return open_array(self.folder / "state", f"{prefix}.{name}", order_of(name, self.orders))
        except (ValueError, OSError) as e:
            raise UserError(f"{self.folder}: {name} can't be read: {first_line(e)}") from e


def special_ids(hugging_face: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the token ids (begin, end, padding) and the model type in a `config.json`."""
    return {k: value for k, value in hugging_face.items() if k == "model_type" or k.endswith("_token_id")}


def find_weights(folder: Path) -> Weights:
    """Finds the weights in `folder`: a converted folder, a run's folder (its best checkpoint if it keeps one, else its
    newest), or one checkpoint.

    Raises:
      UserError: there are none, they are in another format (names the command that converts them), they can't be read,
        or their metadata are corrupted.
    """
    try:
        path = next((path for path in _candidates(folder) if (path / "page" / "metadata").is_file()), None)
        if path is None:
            raise UserError(f"{folder} holds no mtjax weights{_advice(folder)}")
        try:
            metadata = read_metadata(path)
        except CorruptedCheckpoint as e:
            raise UserError(f"{path} is corrupted: {e}") from e
    except OSError as e:
        raise UserError(f"the weights in {folder} can't be read: {first_line(e)}") from e
    return Weights(path, metadata)


def _candidates(folder: Path) -> list[Path]:
    """Lists where weights may be, in order of preference."""
    steps = [p for parent in (folder / CHECKPOINTS, folder) for p in parent.glob("*") if p.name.isdigit()]
    best = [p for p in (folder / BEST).glob("*") if p.name.isdigit()]
    return [folder, folder / CONVERTED, *best, *sorted(steps, key=lambda p: int(p.name), reverse=True)]


def _advice(folder: Path) -> str:
    # An address of `mtjax convert`, unless there is a folder of this name.
    if str(folder).startswith(("hf:", "megatron:", "peft:")) and not folder.exists():
        return f": convert them first, `mtjax convert --from {folder} --to mtjax:NEW`, and use NEW"
    if not folder.exists():
        return ": it does not exist"
    kind = None
    if any(folder.glob("*.safetensors")) or (folder / "config.json").is_file():
        kind = ("Hugging Face's", "hf")
    elif any(any(folder.glob(f"{above}{file}")) for above in ("", "*/") for file in ("mp_rank_*", "*.distcp")):
        kind = ("Megatron-LM's", "megatron")
    if kind is None:
        return ": expected a run's folder, one of its checkpoints, or a folder that `mtjax convert` wrote"
    return f", but {kind[0]}: convert them first, `mtjax convert --from {kind[1]}:{folder} --to mtjax:NEW`, and use NEW"


def restore_weights(weights: Weights, abstract: Tree, orders: Orders = PLAIN) -> Tree:
    """Restores the parameters in the sharding of `abstract`; each device reads only its shards.

    Args:
      weights: the weights to read, checked by `check_same_weights`.
      abstract: tree of `jax.ShapeDtypeStruct` with shardings.
      orders: order in which layers are to be stacked.

    Raises:
      UserError: they are corrupted, can't be read, or differ between processes.
    """
    # Each process reads its shards from its own folder, perhaps on another machine.
    prints = json.dumps(weights.metadata["fingerprints"], sort_keys=True)
    check_same("weights", hashlib.sha256(prints.encode()).hexdigest(), weights.folder)
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    source = f"the weights in {weights.folder}"

    def read() -> list[jax.Array]:
        arrays = []
        for path, leaf in leaves:
            name = dotted(path)
            store = weights.open(name)
            # Read as they were saved, so that fingerprints can be compared before they are cast.
            saved = leaf.update(dtype=store.dtype.numpy_dtype)
            arrays.append(place_array(store, saved, order_of(name, orders)))
        return arrays

    try:
        tree = jax.tree_util.tree_unflatten(structure, read_on_all_processes(source, weights.folder, read))
    except CorruptedCheckpoint as e:
        raise UserError(f"{source} are corrupted: {e}") from e
    now = fingerprints_of({PREFIX: tree}, leaves[0][1].sharding.mesh, orders)
    wrong = [name for name, number in now.items() if weights.metadata["fingerprints"][name] != number]
    if wrong:
        raise UserError(f"{source} are corrupted: {', '.join(wrong)} are not what was saved")
    # Master weights may have been saved in another type; fingerprints are of the bits that were saved.
    cast = lambda array, leaf: array if array.dtype == leaf.dtype else array.astype(leaf.dtype)  # noqa: E731
    return jax.tree.map(cast, tree, abstract)


def check_same_weights(weights: Weights, abstract: Tree, config: Config, orders: Orders = PLAIN) -> None:
    """Checks that weights fit a run's model, in settings and shapes.

    Raises:
      UserError: lists all differences, with both values.
    """
    differing = differences(weights.config.model, config.model)
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    wanted = {dotted(path): shape_without_padding(leaf, order_of(dotted(path), orders)) for path, leaf in leaves}
    saved = set(weights.names)
    differing += [f"{name} is missing" for name in wanted if name not in saved]
    # Shapes are read from the disk, array by array: not before all names fit.
    if not differing:
        shapes = {name: weights.open(name).shape for name in wanted}
        differing += [f"{n} is {shapes[n]} there and {wanted[n]} here" for n in wanted if shapes[n] != wanted[n]]
    if differing:
        listed = "".join(f"\n  {difference}" for difference in differing)
        raise UserError(
            f"the weights in {weights.folder} are of another model; use its settings, or weights of this model:{listed}"
        )


def shape_without_padding(leaf: Any, order: LayerOrder | None) -> tuple[int, ...]:
    """Returns the shape without padding rows, which stand for layers that a stage does not have."""
    return leaf.shape if order is None else (1 + max(order.flat), *leaf.shape[1:])
