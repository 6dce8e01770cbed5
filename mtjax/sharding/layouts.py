"""The layout of a config, and which sizes it divides."""

from collections.abc import Sequence

from mtjax.config import Config, decoder_length, mlp_size, nearest_divisors, num_kv_heads, padded_vocab_size
from mtjax.errors import UserError
from mtjax.theory.layout import TENSOR_RULES, Layout
from mtjax.theory.layout import layout_of as of_model
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import Axes


def layout_of(config: Config, mesh: MeshShape) -> Layout:
    """The layout that a config asks for."""
    parallel = config.parallel
    return of_model(config.model, mesh, sequence_parallel=parallel.sequence_parallel, zero=parallel.zero)


def check_divisible(config: Config, mesh: MeshShape) -> None:
    """Checks that every split dimension whose size is known divides by the ways it is split.

    Raises:
      UserError: names the dimension, both numbers and the nearest sizes that fit.
    """
    model, layout = config.model, layout_of(config, mesh)
    sizes = {"heads": ("num_heads", model.num_heads), "mlp": ("mlp_size", mlp_size(model))}
    sizes["act_seq"] = ("sequence_length", model.sequence_length)
    if model.family == "t5" and model.sequence_length % mesh.ways(layout.rules.act_seq) == 0:
        sizes["act_seq"] = ("decoder_sequence_length", decoder_length(model))
    if model.vocab_size is not None:  # else the tokenizer will say
        sizes["vocab"] = ("the padded vocabulary", padded_vocab_size(model))
    for axis, (name, size) in sizes.items():
        ways = mesh.ways(layout.rules.axes(axis))
        if size % ways:
            raise UserError(
                f"{name} {size} does not divide over {ways} {_called(layout.rules.axes(axis))} ways of the mesh; "
                f"{_fitting(axis, size, ways, model.hidden_size)}"
            )
    ways, shared, over = mesh.ways(layout.rules.heads), num_kv_heads(model), _called(layout.rules.heads)
    if shared % ways and ways % shared:
        raise UserError(
            f"num_kv_heads {shared} is neither a multiple nor a divisor of the {ways} {over} ways of the mesh; "
            f"take model ways among the divisors or multiples of {shared}"
        )
    check_batch(config, mesh)


def check_batch(config: Config, mesh: MeshShape) -> None:
    """Checks that the global batch is a whole number of microbatches on every data rank.

    Raises:
      UserError: names global batch, microbatch and data ways, and the nearest batch that fits.
    """
    batch, micro = config.training.global_batch_size, config.training.microbatch_size
    ways = mesh.ways(TENSOR_RULES.batch)
    each = (micro or 1) * ways
    if micro is None and batch % ways:
        raise UserError(
            f"global_batch_size {batch} does not divide over {ways} data ways of the mesh; "
            f"the nearest that do are {_nearest_multiples(batch, ways)}"
        )
    if micro is not None and batch % each:
        raise UserError(
            f"global_batch_size {batch} is not a multiple of microbatch_size {micro} x {ways} data ways = {each}; "
            f"the nearest that are: {_nearest_multiples(batch, each)}"
        )


def check_ramp(config: Config, sizes: Sequence[int], mesh: MeshShape) -> None:
    """Checks that every global batch of a ramp is a whole number of microbatches on every data rank.

    Args:
      config: its own `global_batch_size` is checked by `check_batch`.
      sizes: global batches that the run goes through.
      mesh: data ways.

    Raises:
      UserError: names the ramp, the first batch that does not fit, and what START and INCREMENT must be multiples of.
    """
    micro, ways = config.training.microbatch_size, mesh.ways(TENSOR_RULES.batch)
    unit = (micro or 1) * ways
    wrong = next((size for size in sizes if size % unit), None)
    if wrong is not None:
        ramp = " ".join(map(str, config.training.rampup_batch_size or ()))
        needs = f"microbatch_size {micro} x {ways} data ways = {unit}" if micro else f"the {ways} data ways of the mesh"
        raise UserError(
            f"rampup_batch_size {ramp} passes through a global batch of {wrong}, which is not a multiple of {needs}; "
            f"take multiples of {unit} for START and INCREMENT"
        )


def num_microbatches(config: Config, mesh: MeshShape, global_batch_size: int | None = None) -> int:
    """Microbatches that a data rank accumulates in a step."""
    batch = global_batch_size or config.training.global_batch_size
    micro = config.training.microbatch_size or batch // mesh.ways(TENSOR_RULES.batch)
    return batch // (micro * mesh.ways(TENSOR_RULES.batch))


def _called(axes: Axes) -> str:
    return " x ".join(axes)


def _nearest_multiples(size: int, of: int) -> str:
    below, above = size // of * of, -(-size // of) * of
    return " and ".join(str(n) for n in (below, above) if n > 0)


def _fitting(axis: str, size: int, ways: int, hidden_size: int) -> str:
    """What would divide: heads must divide hidden_size too, so that other ways may be the only cure."""
    if axis == "heads":
        heads = [n for n in range(ways, hidden_size + 1, ways) if hidden_size % n == 0]
        near = sorted(heads, key=lambda n: abs(n - size))[:2]
        choices = [f"{' or '.join(map(str, sorted(near)))} heads"] if near else []
        choices.append(f"model ways that divide {size}: {nearest_divisors(size, ways)}")
        return f"take {', or '.join(choices)}"
    advice = " (set vocab_multiple to a multiple of the model ways)" if axis == "vocab" else ""
    return f"the nearest that do are {_nearest_multiples(size, ways)}{advice}"
