"""Reads Megatron-LM's arguments from a checkpoint, which has all of them: those that were given and the defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtjax.convert.from_megatron.given import GivenArguments
from mtjax.convert.megatron_files import MegatronCheckpoint
from mtjax.convert.megatron_formats import checkpoint_folder, is_torch_dist
from mtjax.convert.torch_dist import TorchDistCheckpoint
from mtjax.errors import UserError, shortened
from mtjax.families.hybrid.megatron_arguments import letters_in
from mtjax.migrate.megatron import SAVED_AS, TABLE
from mtjax.migrate.model_arguments import LATENT

_OF_FEATURE = {"fp8_": ("fp8", "fp8_format"), "fp4_": ("fp4", "fp4_format"), "timing_log_": ("timing_log_level",)}
"""Prefixes of arguments that have defaults, and matter only with a feature, and the arguments that switch it on."""
_PLAIN = (bool, int, float, str, list, tuple)


def from_checkpoint(folder: Path) -> GivenArguments:
    """Returns the arguments of a checkpoint of Megatron-LM that differ from its defaults.

    Raises:
      UserError: it is not such a checkpoint, or has no arguments.
    """
    files = checkpoint_folder(folder)
    found = TorchDistCheckpoint(files) if is_torch_dist(files) else MegatronCheckpoint(files)
    if not found.arguments:
        raise UserError(f"{files} has no args: translate the launch script of its run")
    # Arguments do not say which program made a checkpoint; its tensors do.
    is_bert = any(name.startswith(("lm_head.", "binary_head.")) for name in found.shapes)
    family = "bert" if is_bert else "hybrid" if letters_in(found.shapes) else "gpt"
    given = from_arguments(found.arguments, str(files), family)
    for dest in ("save", "load"):  # a run of mtjax has a folder of its own
        given.values.pop(dest, None)
    unknown = len(set(found.arguments) - {row.dest for row in TABLE})
    given.notes.append(f"{unknown} other arguments of the checkpoint follow from these, or are not known to mtjax")
    given.notes.append(f"to start from its weights: mtjax train --init-from megatron:{folder}, with this config")
    given.notes.append(
        f"to go on where it stopped: mtjax convert --from megatron:{folder} --to mtjax:DIR --with-optimizer"
    )
    return given


def from_arguments(arguments: Mapping[str, Any], source: str, family: str = "gpt") -> GivenArguments:
    """Returns the arguments of a checkpoint that differ from Megatron's defaults.

    Args:
      arguments: attribute -> value, as Megatron saves them after it has filled in what follows from others.
      source: the folder, for messages.
      family: gpt, hybrid or bert.
    """
    given = GivenArguments(source, family=family)
    for row in TABLE:
        # Megatron-Core saves some arguments under the names of its TransformerConfig.
        value = _plain(arguments.get(row.dest, arguments.get(SAVED_AS.get(row.dest, ""))))
        if row.status == "default" and row.default is None and row.same is None:
            continue  # mtjax needs no such setting, whatever the value
        # A switch that is off is False, () or "" in a checkpoint, and has no default in the table.
        if value is None or value == row.default or (row.default is None and value in (False, (), "")):
            continue
        given.values[row.dest] = value
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is row.stores else str(value)
        given.typed[row.dest] = shortened(f"{row.names[0]} {shown}".strip(), 70)
    # Arguments that Megatron has filled in were not given by the user, and some contradict those that they follow from
    # (train_iters and train_samples).
    for dest in _following(arguments):
        given.values.pop(dest, None)
    world = arguments.get("world_size")
    given.gpus = world if isinstance(world, int) and world > 0 else None
    chunks = arguments.get("virtual_pipeline_model_parallel_size")
    if isinstance(chunks, int) and chunks > 1:
        # Megatron computes the number of chunks from it, and saves both.
        given.values.pop("num_layers_per_virtual_pipeline_stage", None)
        given.values["num_virtual_stages_per_pipeline_rank"] = chunks
        given.typed["num_virtual_stages_per_pipeline_rank"] = f"--num-virtual-stages-per-pipeline-rank {chunks}"
    return given


def _following(arguments: Mapping[str, Any]) -> set[str]:
    """Returns the arguments that Megatron has filled in because of others."""
    found = {"padded_vocab_size"} | ({"num_query_groups"} if not arguments.get("group_query_attention") else set())
    for prefix, switches in _OF_FEATURE.items():
        if not any(arguments.get(switch) for switch in switches):
            found |= {row.dest for row in TABLE if row.dest.startswith(prefix)}
    if arguments.get("optimizer") in (None, "adam"):
        found |= {"muon_momentum", "sgd_momentum"}
    if arguments.get("train_samples"):
        found.add("train_iters")
    if (arguments.get("weight_decay_incr_style") or "constant") == "constant":
        found |= {"start_weight_decay", "end_weight_decay"}
    if not arguments.get("multi_latent_attention"):
        found |= {row.dest for row in LATENT}
    if arguments.get("position_embedding_type") != "rope":
        found |= {"rotary_base", "rotary_percent"}
    return found


def _plain(value: Any) -> Any:
    """Returns a plain value; None for an object of one of Megatron's classes, which is not loaded."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else None
