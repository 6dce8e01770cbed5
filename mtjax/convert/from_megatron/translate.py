"""From arguments of Megatron-LM to a run of mtjax."""

from mtjax.convert.from_megatron.given import Given
from mtjax.convert.from_megatron.model import translate_model
from mtjax.convert.from_megatron.parallel import translate_layout, translate_mesh, translate_output
from mtjax.convert.from_megatron.training import (
    translate_data,
    translate_plain,
    translate_precision,
    translate_schedule,
)
from mtjax.convert.from_megatron.translated import Translation
from mtjax.errors import UserError
from mtjax.migrate.megatron import by_dest
from mtjax.theory.mesh import MeshShape


def translate(given: Given) -> tuple[Translation, MeshShape]:
    """Returns the translation of a run, and its mesh.

    Raises:
      UserError: arguments are missing, of the wrong type, or contradict each other.
    """
    to = Translation(given)
    _check_types(given)
    translate_model(to)
    translate_plain(to)
    mesh = translate_mesh(to)
    translate_schedule(to)
    translate_precision(to)
    translate_layout(to, mesh)
    translate_data(to)
    translate_output(to)
    for dest in given.values:
        row = by_dest()[dest]
        if dest in to.without or dest in to.needless:
            continue
        is_default = given.values[dest] == row.default or (row.same is not None and given.values[dest] in row.same)
        if row.status == "default":
            to.needless[dest] = row.note
        elif row.status == "none" and is_default:
            to.needless[dest] = "Megatron's default, and as in mtjax"
        elif row.status == "none":
            to.drop(dest)
    return to, mesh


def _check_types(given: Given) -> None:
    """Checks that an argument which is a number is one.

    Raises:
      UserError: one is not.
    """
    whole = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size")
    sizes = [dest for dest in given.values if dest.endswith("parallel_size")]
    more = ("train_iters", "train_samples", "lr_decay_samples", "lr_warmup_samples", "make_vocab_size_divisible_by")
    more += ("vocab_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    for dest in (*whole, *sizes, *more, "max_position_embeddings"):
        value = given.values.get(dest)
        if value is not None and (type(value) is not int or value < (1 if dest not in more else 0)):
            raise UserError(f"{given.source}: {given.typed.get(dest, dest)} must be a whole number above 0")
    fraction = given.values.get("lr_warmup_fraction")
    if fraction is not None and not (type(fraction) in (int, float) and 0 <= fraction <= 1):
        raise UserError(f"{given.source}: {given.typed['lr_warmup_fraction']} must be a number from 0 to 1")
