"""Translates arguments of Megatron-LM to a run of mtjax."""

from functools import cache

from mtjax.config import Config
from mtjax.convert.from_megatron.given import GivenArguments
from mtjax.convert.from_megatron.model import translate_model
from mtjax.convert.from_megatron.output import translate_output
from mtjax.convert.from_megatron.parallel import translate_layout, translate_mesh
from mtjax.convert.from_megatron.training import (
    translate_batches_and_rates,
    translate_data,
    translate_optimizer_memory,
    translate_plain,
    translate_precision,
    translate_qk_clip,
)
from mtjax.convert.from_megatron.translated import Translation
from mtjax.errors import UserError
from mtjax.help import options_of
from mtjax.layout.mesh import MeshShape
from mtjax.migrate.megatron import by_dest


def translate(given: GivenArguments) -> tuple[Translation, MeshShape]:
    """Translates a run; returns the translation and its mesh.

    Raises:
      UserError: arguments are missing, of the wrong type, or contradict each other.
    """
    to = Translation(given)
    _check_types(given)
    # The order matters: the mesh needs the batch sizes that `translate_plain` copies; the steps of the learning rate
    # schedule need the global batch size, which may follow from the mesh; and later functions remove settings that
    # earlier ones have copied.
    translate_model(to)
    translate_plain(to)
    mesh = translate_mesh(to)
    translate_batches_and_rates(to)
    translate_precision(to)
    translate_layout(to, mesh)
    translate_optimizer_memory(to)
    translate_qk_clip(to)
    translate_data(to)
    translate_output(to)
    for dest in given.values:
        row = by_dest()[dest]
        # Reported already, with a reason that fits this run.
        if dest in to.unsupported or dest in to.unneeded:
            continue
        # Arguments without a setting: an unsupported feature matters only if it is switched on.
        is_default = given.values[dest] == row.default or (row.same is not None and given.values[dest] in row.same)
        if row.status == "default":
            to.unneeded[dest] = row.note
        elif row.status == "none" and is_default:
            to.unneeded[dest] = "Megatron's default; the same in mtjax"
        elif row.status == "none":
            to.drop(dest)
    return to, mesh


_SIZES = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by"),
        *("micro_batch_size", "global_batch_size", "train_iters", "train_samples"),
        *(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "non_persistent_save_interval"),
        *("check_weight_hash_across_dp_replicas_interval", "distributed_timeout_minutes", "num_experts"),
        *("moe_ffn_hidden_size", "moe_router_topk", "num_distributed_optimizer_instances"),
    }
)
"""Attributes of arguments that are integers above 0."""
_COUNTS = frozenset({"lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"})
_FRACTIONS = frozenset({"lr_warmup_fraction"})
_NUMBERS = frozenset({"rotary_seq_len_interpolation_factor", "end_weight_decay"})
"""Attributes of arguments that are numbers, although neither their default nor an equal setting is."""
_SEVERAL = frozenset(
    {
        *(f"{split}data_path" for split in ("", "train_", "valid_", "test_")),
        *("split", "moe_router_load_balancing_type", "moe_layer_freq", "cp_comm_type"),
        *("window_size", "window_attn_skip_freq", "no_rope_freq"),
    }
)
"""Attributes of arguments that may have several values."""


def _check_types(given: GivenArguments) -> None:
    """Checks the types of arguments that must be numbers.

    Raises:
      UserError: one has the wrong type.
    """
    for dest, value in given.values.items():
        is_int = type(value) is int
        is_number = is_int or type(value) is float
        row = by_dest()[dest]
        wanted = ""
        if dest in _SIZES:
            wanted = "" if is_int and value > 0 else "an integer above 0"
        elif dest in _COUNTS:
            wanted = "" if is_int and value >= 0 else "an integer, 0 or more"
        elif dest in _FRACTIONS:
            wanted = "" if is_number and 0 <= value <= 1 else "a number from 0 to 1"
        elif dest == "rampup_batch_size":
            is_ramp = isinstance(value, tuple) and len(value) == 3 and all(type(item) is int for item in value)
            wanted = "" if is_ramp else "three integers: START INCREMENT SAMPLES"
        elif dest == "moe_aux_loss_coeff" and isinstance(value, tuple):
            wanted = "" if all(type(item) in (int, float) for item in value) else "numbers"
        elif (
            dest in _NUMBERS
            or row.setting in _numbers()
            or (type(row.default) in (int, float) and dest != "moe_layer_freq")
        ):
            wanted = "" if is_number else "a number"
        # `--lr $LR` with an empty variable leaves the bare argument, whose value True would count as 1.
        elif row.status == "equal" and value is True and row.stores is True and row.default is not False:
            wanted = "followed by a value (a variable may be empty)"
        elif row.status == "equal" and isinstance(value, tuple) and dest not in _SEVERAL:
            wanted = "one value"
        if wanted:
            raise UserError(f"{given.source}: {given.typed.get(dest, dest)}: must be {wanted}")


@cache
def _numbers() -> frozenset[str]:
    """Returns the names of settings that are numbers."""
    return frozenset(option.field for option in options_of(Config) if option.type in (int, float))
