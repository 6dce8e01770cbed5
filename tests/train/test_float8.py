"""Training in 8-bit floats: products beside NumPy's, losses on any mesh, scales of delayed scaling, steps skipped."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.float8 import float8_state_bytes
from mtjax.config import replace, to_dict
from mtjax.config.checks import validate
from mtjax.config.float8 import ENDS
from mtjax.errors import UserError
from mtjax.layout.float8 import float8_note, float8_problems
from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.models.named_parameters import without_other_modules
from mtjax.models.sharded_model import ShardedModel
from mtjax.models.teacher import HARD, SOFT
from mtjax.runtime.checkpoints.past import Past
from mtjax.sharding.axes import use_rules
from mtjax.sharding.float8 import E4M3, E5M2, Recipe, Scales, float8_product, quantized
from mtjax.sharding.float8_rows import rowwise_product
from mtjax.sharding.float8_scales import fitting_scale, inverse_of, scale_at, scale_index
from mtjax.sharding.float8_weights import quantize_stack
from mtjax.sharding.trainable import select_frozen
from mtjax.train.first_scales import FirstScales
from mtjax.train.float8 import next_states, split
from mtjax.train.float8_resume import check_float8_layers
from mtjax.train.step import make_train_step
from tests.same_numbers import BATCHES, LOSSES, numbers
from tests.tiny import batch_of, initial_state, mesh_of, program_of, run_steps, tiny_config

PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def inverse_scale(a: np.ndarray, kind: Any, digits: int = 1) -> float:
    """The least inverse scale, of so many binary digits, that leaves all of `a` in the type's range."""
    quotient = Fraction(float(np.abs(a).max())) / Fraction(float(ml_dtypes.finfo(kind).max))
    if not quotient:
        return 1.0
    unit = Fraction(2) ** (math.floor(math.log2(quotient)) + 1 - digits)
    return float(math.ceil(quotient / unit) * unit)


def scale_of(a: np.ndarray, kind: Any, digits: int = 1) -> np.float32:
    return 1 / np.float32(inverse_scale(a, kind, digits))


def quantized_by_numpy(a: np.ndarray, kind: Any, inverse: float) -> np.ndarray:
    top = float(ml_dtypes.finfo(kind).max)
    return np.clip(a.astype(np.float32) * (1 / np.float32(inverse)), -top, top).astype(kind).astype(np.float64)


def rounded(a: np.ndarray, kind: Any, inverse: float) -> np.ndarray:
    return quantized_by_numpy(a, kind, inverse) * inverse


@pytest.mark.parametrize(
    ("recipe", "is_quantized"),
    [
        *[(Recipe(False), False), (Recipe(False, E4M3), False), (Recipe(True), False), (Recipe(True), True)],
        *[(Recipe(False, digits=8), False), (Recipe(True, digits=4), False), (Recipe(True, digits=4), True)],
    ],
    ids=str,
)
def test_a_product_and_its_gradients_are_those_of_numpys_rounded_operands_bit_by_bit(
    recipe: Recipe, is_quantized: bool
) -> None:
    # Integers, so that float32 adds them without rounding, in any order; of more digits than 8-bit types have.
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-200, 200, shape).astype(np.float32) for shape in ((2, 8, 32), (32, 16), (2, 8, 16)))
    if recipe.digits > 1:  # and with largest values whose inverse scales are 3, 5 and 3 times a power of two
        x, w, g = (7 * np.clip(np.rint(a / 7), -n, n) for a, n in ((x, 24), (w, 20), (g, 24)))
    w, g = w / 1024, g / 2**20
    inverses = (2.0, 2.0**-11, 2.0**-27) if recipe.digits == 1 else (3 / 8, 5 / 2**14, 3 / 2**28)
    given = [float(1 / np.float32(inverse)) for inverse in inverses]  # delayed: g is too large and saturates
    scales = Scales(jnp.asarray(given), jnp.zeros((2, 4, 96 * 2 ** (recipe.digits - 1)))) if recipe.is_delayed else None
    dims = ("ab", "c", "d")
    with jax.set_mesh(mesh_of("1x2")), use_rules(TENSOR.rules):
        on_ranks = [jax.device_put(a, jax.NamedSharding(jax.sharding.get_mesh(), s)) for a, s in _sharded(x, w, g)]
        before = quantized(on_ranks[1], E4M3, jnp.float32(given[1])) if is_quantized else None
        place = PartitionSpec(None, None, "model")
        run = jax.jit(lambda x, w, s: float8_product(recipe, dims, place, x, w, s, before))
        # A weight that was quantized before is not read: zeros have its gradient.
        y, pull = jax.vjp(run, on_ranks[0], jnp.zeros_like(on_ranks[1]) if is_quantized else on_ranks[1], scales)
        dx, dw, counts = pull(on_ranks[2])
    kinds = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, np.dtype(recipe.gradient_type).type)
    found = [inverse_scale(a, kind, recipe.digits) for a, kind in zip((x, w, g), kinds, strict=True)]
    of = inverses if recipe.is_delayed else found
    x8, w8, g8 = (rounded(a, kind, s) for a, kind, s in zip((x, w, g), kinds, of, strict=True))
    assert (np.abs(x8 - x).max(), np.abs(g8 - g).max()) > (0, 0)
    np.testing.assert_array_equal(y, x8 @ w8)
    np.testing.assert_array_equal(dx, g8 @ w8.T)
    np.testing.assert_array_equal(dw, np.einsum("abc,abd->cd", x8, g8))
    if recipe.is_delayed:  # each of the two ranks has found the largest of its part, in its rows
        expected = [scale_of(part, kinds[0], recipe.digits) for part in (x, x)]
        expected += [scale_of(part, kinds[2], recipe.digits) for part in np.split(g, 2, axis=2)]
        rows = np.asarray(counts.age).reshape(4, 2, -1)[:, 0]
        np.testing.assert_array_equal(scale_at(jnp.asarray(rows.argmax(-1)), recipe.digits), np.asarray(expected))
        np.testing.assert_array_equal(np.asarray(counts.age).sum(-1), 1)


@pytest.mark.parametrize(("digits", "kind"), [(1, E5M2), (4, E4M3), (8, E4M3)])
def test_a_scale_is_the_largest_of_its_digits_that_fits_and_numbers_are_in_order(digits: int, kind: Any) -> None:
    values = np.exp(np.random.default_rng(0).normal(0, 6, 500)).astype(np.float32)
    values = np.concatenate([values, np.asarray([448, 57344, 1.75, 1.7500001, 1.7499999, 2, 2**-20], np.float32)])
    known = np.dtype(kind).type
    expected = [scale_of(value, known, digits) for value in values]
    inside = (np.asarray(expected) >= 2.0**-32) & (np.asarray(expected) < 2.0**64)
    assert inside.sum() > 480
    number = np.arange(96 * 2 ** (digits - 1))

    @jax.jit
    def run(values: Any) -> tuple[Any, ...]:
        scales = scale_at(number, digits)
        largest = inverse_of(scales) * float(jnp.finfo(kind).max)
        return fitting_scale(values, kind, digits), scales, inverse_of(scales), scale_index(largest, kind, digits)

    found, scales, inverses, again = map(np.asarray, run(values))
    np.testing.assert_array_equal(found[inside], np.asarray(expected)[inside])
    np.testing.assert_array_equal(scales, 1 / inverses)
    assert (np.diff(scales) > 0).all()
    np.testing.assert_array_equal(again, number)


def test_matrices_are_quantized_as_numpy_rounds_their_compute_type_each_with_its_scale() -> None:
    stack = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)
    scale = np.asarray([16.0, 64.0, 128.0], np.float32)
    with jax.set_mesh(mesh_of("1x1")):
        pair = quantize_stack(jnp.asarray(stack), jnp.asarray(scale), "bfloat16")
    wide = stack.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = np.stack([quantized_by_numpy(a, E4M3, 1 / s) for a, s in zip(wide, scale, strict=True)])
    np.testing.assert_array_equal(np.asarray(pair.values).astype(np.float64), expected)
    np.testing.assert_array_equal(pair.master, stack)
    at_once = np.clip(stack * scale[:, None, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (at_once.astype(np.float64) != expected).any()  # in two steps, some numbers round to another one


def _casts(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of all that a program rounds to the 8-bit type of weights, loops and calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == E4M3:
            shaped: Any = equation.outvars[0].aval
            yield shaped.shape
        for inner in jaxprs_in_params(equation.params):
            yield from _casts(inner)


@pytest.mark.parametrize(("fields", "times"), [({}, 1), ({"fp8_bf16_last_layers": 1}, 0)], ids=str)
def test_each_matrix_is_quantized_once_a_step(fields: dict[str, Any], times: int) -> None:
    program = program_of("2x1", zero=1, microbatch_size=1, recompute="full", fp8="delayed", **fields, **PLAIN)
    arguments = program.abstract_state, program.abstract_step_batch()
    with jax.set_mesh(program.mesh):
        casts = Counter(_casts(jax.make_jaxpr(program._step)(*arguments).jaxpr))
    records: list[Any] = jax.tree.leaves(program.records)
    shapes = [r.shape for r in records if r.is_matrix and r.is_stacked]
    assert len(shapes) == 4
    for shape in shapes:
        assert casts[shape] == times
        assert (casts[shape[1:]] == 0) == bool(times)  # a layer's alone, in a loop


@pytest.mark.parametrize("digits", [1, 8])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_a_product_with_a_scale_for_each_row_is_that_of_numpys_rounded_operands_bit_by_bit(
    kind: Any, digits: int
) -> None:
    rng = np.random.default_rng(0)
    sizes = {"x": (2, 8, 4, 8), "w": (4, 8, 2, 8), "g": (2, 8, 2, 8)}
    x, w, g = (rng.integers(-200, 200, shape).astype(np.float32) for shape in sizes.values())
    x *= 2.0 ** rng.integers(-3, 3, (2, 8, 1, 1))  # rows of other sizes
    w, g = w * 2.0 ** rng.integers(-12, -8, (1, 1, 2, 8)).astype(np.float32), g / 2**20
    w[:, :, 1, 2] = 0
    with jax.set_mesh(mesh_of("1x1")):
        dims = ("ab", "cd", "ef")
        spec = PartitionSpec(None, None, None, None)

        @jax.jit
        def run(x: Any, w: Any, g: Any) -> tuple[Any, ...]:
            recipe = Recipe(False, kind, digits=digits)
            y, pull = jax.vjp(lambda x, w: rowwise_product(recipe, dims, spec, x, w), x, w)
            return y, *pull(g)

        y, dx, dw = map(np.asarray, run(x, w, g))
    tall, flat, wide = x.reshape(16, 32), w.reshape(32, 16), g.reshape(16, 16)
    known, g_kind = ml_dtypes.float8_e4m3fn, np.dtype(kind).type

    def product(a: np.ndarray, b: np.ndarray, kinds: tuple[Any, Any]) -> np.ndarray:
        """Of rows of `a` and columns of `b`; multiplied by their inverse scales in float32, as the result is."""
        of_rows = [inverse_scale(row, kinds[0], digits) for row in a]
        of_columns = [inverse_scale(column, kinds[1], digits) for column in b.T]
        a8 = np.stack([quantized_by_numpy(row, kinds[0], s) for row, s in zip(a, of_rows, strict=True)])
        b8 = np.stack([quantized_by_numpy(column, kinds[1], s) for column, s in zip(b.T, of_columns, strict=True)])
        by_rows, by_columns = (np.asarray(each, np.float32) for each in (of_rows, of_columns))
        return (a8 @ b8.T).astype(np.float32) * by_rows[:, None] * by_columns

    np.testing.assert_array_equal(y, product(tall, flat, (known, known)).reshape(y.shape))
    np.testing.assert_array_equal(dx, product(wide, flat.T, (g_kind, known)).reshape(dx.shape))
    np.testing.assert_array_equal(dw, product(tall.T, wide, (known, g_kind)).reshape(dw.shape))


def _sharded(x: Any, w: Any, g: Any) -> list[tuple[Any, PartitionSpec]]:
    """Operands of a column-parallel product with the shardings of their types."""
    return [(x, PartitionSpec()), (w, PartitionSpec(None, "model")), (g, PartitionSpec(None, None, "model"))]


def test_what_is_not_finite_stays_so_and_zeros_are_zeros() -> None:
    a = np.asarray([0.0, -0.0, 1e-30, 1e30, np.inf, -np.inf, np.nan, 448.0, 465.0], np.float32)
    for kind, known in ((E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
        top = float(ml_dtypes.finfo(known).max)
        expected = np.where(np.isinf(a), np.nan, np.clip(a, -top, top)).astype(known)
        found = np.asarray(quantized(jnp.asarray(a), kind, jnp.float32(1)))
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    zeros = jnp.zeros((16, 16))
    with jax.set_mesh(mesh_of("1x1")):
        dims = (("a", "b", "c"), PartitionSpec(None, None))
        y, pull = jax.vjp(lambda x, w: float8_product(Recipe(False), *dims, x, w, None), zeros, zeros)
        assert not any(np.asarray(a).any() for a in (y, *pull(zeros)))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_value_that_is_not_finite_makes_all_results_nan_that_read_it_and_no_others(recipe: str, bad: float) -> None:
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(1, 9, shape).astype(np.float32) for shape in ((4, 16), (16, 32), (4, 32)))
    x[1, 3] = g[2, 5] = bad
    dims, digits = (("a", "b", "c"), PartitionSpec(None, None)), 8 if recipe == "tensorwise" else 1
    how = Recipe(recipe == "delayed", digits=digits)
    scales = Scales(jnp.ones(3), jnp.zeros((2, 4, 96))) if how.is_delayed else None

    @jax.jit
    def run(x: Any, w: Any, g: Any) -> tuple[Any, ...]:
        product = rowwise_product if recipe == "rowwise" else lambda *given: float8_product(*given, scales)
        y, pull = jax.vjp(lambda x, w: product(how, *dims, x, w), x, w)
        return y, *pull(g)

    with jax.set_mesh(mesh_of("1x1")), use_rules(TENSOR.rules):
        found = run(x, w, g)
    for own, numpys in zip(found, (x @ w, g @ w.T, x.T @ g), strict=True):
        assert 0 < np.isnan(own).sum() < own.size
        np.testing.assert_array_equal(np.isfinite(own), np.isfinite(numpys))


def losses(mesh: str, steps: int = 3, **fields: Any) -> tuple[list[float], Any, Any]:
    """Losses of the first steps, the state after them, and the program."""
    program = program_of(mesh, **PLAIN, **fields)
    state, metrics = run_steps(program, steps, program.initialize(1))
    return [each["loss"] for each in metrics], state, program


LLAMA = {"family": "llama", "num_kv_heads": 4}
# All experts of a token: what 8 bits round to another number would choose another expert where two are nearly equal.
EXPERTS = {"num_experts": 4, "experts_top_k": 4, "shared_expert_size": 32, "num_layers": 3, "first_dense_layers": 1}
EXPERTS |= LLAMA
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 32, "num_heads": 4, "family": "llama"}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 16}
PARALLEL = {"zero", "microbatch_size", "sequence_parallel", "unroll_layers", "recompute", "offload"}
"""Settings that a run on one device has not."""
LONG = pytest.mark.long
NO_FIRST = {"first_dense_layers": 0, "num_layers": 4}
AVERAGED = {"optimizer": "schedule-free", "decay_style": "constant"}
MESHES = [
    pytest.param(
        "2x2",
        {"zero": 3, "sequence_parallel": True, "microbatch_size": 2},
        id="zero 3, split sequences",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("1x2", {"microbatch_size": 4}, id="accumulation", marks=pytest.mark.exhaustive),
    pytest.param("2x1", {"zero": 1}, id="zero 1", marks=pytest.mark.exhaustive),
    pytest.param("2x2", {"sequence_parallel": True, "lora_rank": 4}, id="LoRA", marks=pytest.mark.exhaustive),
    pytest.param(
        "data=1,stage=2,context=2",
        {"microbatch_size": 2, "position": "rope", "sequence_length": 32},
        id="stages, context",
        marks=LONG,
    ),
    pytest.param("1x2x1", {"microbatch_size": 2}, id="stages", marks=pytest.mark.exhaustive),
    pytest.param(
        "4x1",
        {"zero": 3, "num_layers": 6, "fp8_bf16_first_layers": 2, "fp8_bf16_last_layers": 1},
        id="layers in 16 bits",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,context=2",
        {"position": "rope", "sequence_length": 32},
        id="context",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "2x2",
        {"zero": 1, "sequence_parallel": True, "microbatch_size": 2, **EXPERTS},
        id="experts",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("data=2,expert=2", {"zero": 3, **EXPERTS, "moe_every": 2} | NO_FIRST, id="experts apart", marks=LONG),
    pytest.param(
        "2x2", {"zero": 3, "sequence_parallel": True, **LATENT}, id="latent attention", marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "2x2", {"sequence_parallel": True, "mtp_num_layers": 1, **LLAMA}, id="prediction", marks=pytest.mark.exhaustive
    ),
    pytest.param("2x1", {"zero": 1, "offload": "optimizer"}, id="offload", marks=pytest.mark.exhaustive),
    pytest.param(
        "2x2",
        {"zero": 3, "sequence_parallel": True, "microbatch_size": 2, "fp8_scales": "exact", "num_layers": 4}
        | {"fp8_bf16_first_layers": 2, "fp8_bf16_last_layers": 1},
        id="exact scales, layers in 16 bits",
        marks=LONG,
    ),
    pytest.param(
        "2x2",
        {"zero": 3, "sequence_parallel": True, "microbatch_size": 2, "fp8_scales": "exact"},
        id="exact scales",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "2x2", {"zero": 1, "optimizer": "muon", "sequence_parallel": True}, id="muon", marks=pytest.mark.exhaustive
    ),
    pytest.param("2x2", {"zero": 3, "optimizer": "lion"}, id="lion", marks=pytest.mark.exhaustive),
    pytest.param(
        "1x2x1", {"zero": 1, "optimizer": "sgd", "microbatch_size": 2}, id="sgd", marks=pytest.mark.exhaustive
    ),
    pytest.param("2x2", {"zero": 1, "optimizer": "adafactor"}, id="adafactor", marks=pytest.mark.exhaustive),
    pytest.param("2x2", {"zero": 1, **AVERAGED}, id="schedule-free", marks=pytest.mark.exhaustive),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param("4x1", {"zero": 3, "num_layers": 5}, marks=pytest.mark.exhaustive),
        pytest.param("2x1", {"zero": 1, "num_layers": 5}, marks=pytest.mark.exhaustive),
        # Ranks have other layers.
        (
            "3x1",
            {"zero": 2, "num_layers": 3, "global_batch_size": 6, "microbatch_size": 1, "recompute": "full"},
        ),
        pytest.param("3x1", {"zero": 1, "num_layers": 3, "global_batch_size": 6}, marks=pytest.mark.exhaustive),
        pytest.param("2x2", {"zero": 2, "microbatch_size": 1, "recompute": "full"}, marks=pytest.mark.exhaustive),
        pytest.param("2x1", {"microbatch_size": 1}, marks=pytest.mark.exhaustive),
        pytest.param("1x4", {"zero": 1, "family": "llama", "num_kv_heads": 2}, marks=pytest.mark.exhaustive),
        pytest.param("data=2,stage=2,model=1", {"zero": 1, "microbatch_size": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_weights_quantized_once_a_step_change_no_bit(mesh: str, fields: dict[str, Any]) -> None:
    fields = {"fp8": "delayed", "compute_dtype": "bfloat16", **PLAIN, **fields}
    once = make_train_step(tiny_config(**fields), mesh_of(mesh))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mtjax.train.float8.quantizes_once", lambda *_: False)
        often = make_train_step(tiny_config(**fields), mesh_of(mesh))
        expected = run_steps(often, 2, often.initialize(1))
    found = run_steps(once, 2, once.initialize(1))
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.tree.map(np.asarray, s.parameters) for s in (found[0], expected[0]))
    )
    assert [m["loss"] for m in found[1]] == [m["loss"] for m in expected[1]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param("2x1", {"zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param("2x1", {"zero": 1, "microbatch_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            "2x2", {"microbatch_size": 2, "recompute": "none", "fp8_bf16_last_layers": 1}, marks=pytest.mark.exhaustive
        ),
        ("2x2", {"zero": 3, "sequence_parallel": True, **LLAMA}),
        pytest.param("2x1", {"zero": 3, "fp8": "tensorwise", **LLAMA}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_unrolled_layers_change_no_bit(mesh: str, fields: dict[str, Any]) -> None:
    """Without clipping: unrolled layers add up the norm's squares in another order."""
    fields = {"fp8": "delayed", "compute_dtype": "bfloat16", "clip_grad_norm": 0.0, **PLAIN, **fields}
    programs = [program_of(mesh, unroll_layers=unrolled, **fields) for unrolled in (True, False)]
    found, expected = (run_steps(program, 2, program.initialize(1)) for program in programs)
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.tree.map(np.asarray, s.parameters) for s in (found[0], expected[0]))
    )
    assert [m["loss"] for m in found[1]] == [m["loss"] for m in expected[1]]


@LONG
def test_ends_of_unrolled_layers_are_recomputed_in_16_bits_too() -> None:
    fields: dict[str, Any] = {"fp8": "tensorwise", "recompute": "full"}
    (found, *_), (expected, *_), (without, *_) = (
        losses("1x1", unroll_layers=unrolled, fp8_bf16_last_layers=last, **fields)
        for unrolled, last in ((True, 1), (False, 1), (True, 0))
    )
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[0] != pytest.approx(without[0], rel=1e-6)


@pytest.mark.parametrize(("mesh", "fields"), MESHES)
def test_losses_of_delayed_scaling_do_not_depend_on_the_mesh(mesh: str, fields: dict[str, Any]) -> None:
    fields = {**LLAMA, **fields} if fields.get("lora_rank") or fields.get("zero") == 3 else fields
    alone = {name: value for name, value in fields.items() if name not in PARALLEL}
    if mesh == "4x1":  # in the order of these ranks' sums: 8 bits round those of another order to other numbers
        alone |= {"microbatch_size": 2}
    expected, state, _ = losses("1x1", fp8="delayed", **alone)
    found, other, program = losses(mesh, fp8="delayed", **fields)
    plain, _, _ = losses("1x1", **{name: value for name, value in alone.items() if name not in ENDS})
    assert found == pytest.approx(expected, rel=1e-5)
    assert max(abs(a / b - 1) for a, b in zip(expected, plain, strict=True)) > 1e-6  # something was rounded
    scales = [jax.tree.map(np.asarray, split(s.parameters)[1]) for s in (state, other)]
    jax.tree.map(np.testing.assert_array_equal, *scales)
    held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(split(other.parameters)[1]))
    model, plan = program.config.model, Plan.of(program.config, program.mesh_shape)
    assert held == float8_state_bytes(anatomy_of(model), plan)[0]


@LONG
@pytest.mark.parametrize("offload", [pytest.param("none", marks=pytest.mark.exhaustive), "optimizer"])
def test_losses_of_a_student_do_not_depend_on_the_mesh(offload: str) -> None:
    fields = {"fp8": "delayed", "family": "llama", "task": "chat", "teacher": "a test", "teacher_width": 24, **PLAIN}
    found = numbers(program_of("2x2", zero=1, microbatch_size=2, offload=offload, **fields), BATCHES[0])
    expected = numbers(program_of("1x1", **fields), BATCHES[0])
    names = [name for name in LOSSES if name in expected]
    assert {HARD, SOFT} <= set(names)
    for name in names:
        assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-5)


@pytest.mark.parametrize("digits", [1, 4])
def test_a_scale_fits_the_largest_value_of_the_last_steps_and_remains_where_there_is_none(digits: int) -> None:
    rng, history, number = np.random.default_rng(0), 4, 96 * 2 ** (digits - 1)
    each = np.asarray(scale_at(jnp.arange(number), digits))
    numbers = rng.integers(number // 8, number - 4, (30, 2, 2))  # steps, layers, operands: the scale that would fit
    numbers[10:20, 0, 1] = -1  # nothing but zeros
    state = {"scale": jnp.full((2, 3), 8.0), "age": jnp.full((2, 2, 4, number), 2.0**20)}
    with jax.set_mesh(mesh_of("1x1")):
        for step in range(30):
            counts = np.zeros((2, 2, 4, number), np.float32)
            for layer, operand in np.ndindex(2, 2):
                k = numbers[step, layer, operand]
                if k >= 0:
                    counts[layer, operand, rng.integers(4), k] = 1e-3  # as small as a loss scale makes it
                    counts[layer, operand, rng.integers(4), k + rng.integers(3)] += 5  # of smaller values
            before, state = state, next_states(state, {"age": jnp.asarray(counts)}, history)
            recent = np.where(numbers < 0, number, numbers)[max(step - history + 1, 0) : step + 1].min(0)
            kept = np.asarray(before["scale"])[:, ::2]
            expected = np.where(recent == number, kept, each[np.minimum(recent, number - 1)])
            np.testing.assert_array_equal(np.asarray(state["scale"])[:, ::2], expected)


def _scales(state: Any) -> list[np.ndarray]:
    """Scales of each product, [layers, 3]."""
    return [np.asarray(a) for a in jax.tree.leaves(split(state.parameters)[1]) if a.shape[1:] == (3,)]


def test_weights_scales_fit_the_point_at_which_schedule_free_takes_gradients() -> None:
    program: Any = program_of("1x1", fp8="delayed", **AVERAGED, **PLAIN)
    state = initial_state(program)
    averaged = state.optimizer[1][0]
    fast = jax.tree.map(lambda z: 40 * z, averaged.z)
    optimizer = (state.optimizer[0], (averaged._replace(z=fast),))
    state = program.on_mesh(program._with_weight_scales, dataclasses.replace(state, optimizer=optimizer))
    weights = split(state.parameters)[0]["stack"]["layers"]["mlp"]["up"]["weight"]
    scales = state.parameters["stack"]["layers"]["mlp"]["up"]["rule"]["scale"][:, 1]
    share = 1 - program.config.optimizer.beta1
    for weight, scale in zip(np.asarray(weights), np.asarray(scales), strict=True):
        assert scale == scale_of((share * 40 + 1 - share) * weight, ml_dtypes.float8_e4m3fn)
        assert scale != scale_of(weight, ml_dtypes.float8_e4m3fn)


def _unclipped(program: Any, state: Any, batch: Any) -> float:
    """The gradients' norm with scales so small that nothing is clipped, in an 8-bit type as wide as float32."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mtjax.sharding.float8.quantized", lambda a, kind, scale: a * scale)
        patched.setattr("mtjax.train.float8.quantizes_once", lambda *_: False)
        return float(program.on_mesh(jax.jit(program._step), state, batch)[1]["grad_norm"])


@pytest.mark.parametrize("fields", [{}, pytest.param({"offload": "optimizer"}, marks=LONG)], ids=str)
def test_the_first_scales_are_found_before_the_first_update_and_nothing_else_changes(fields: dict[str, Any]) -> None:
    program: Any = program_of("1x1", fp8="delayed", fp8_bf16_first_layers=1, **fields, **PLAIN)
    batch, fresh = batch_of(program, 0), jax.tree.map(np.asarray, program.initialize(1))
    place = lambda state: jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), state, program.abstract_state)  # noqa: E731
    norm = _unclipped(program, place(fresh), batch)
    at_once = program.step(place(fresh), batch)[1]  # with fixed scales
    assert abs(float(at_once["grad_norm"]) / norm - 1) > 0.05
    bad = batch | {"loss_mask": batch["loss_mask"] * jnp.inf}
    said: list[str] = []
    find = FirstScales(program, said.append)
    state = find(place(fresh), bad)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), fresh)
    state = find(state, batch)
    (line,) = said
    assert re.fullmatch("note    fp8's first scales were found in [3-5] passes over the first batch, .*", line)
    scales = [np.log2(scale) for scale in _scales(state)]
    found = jax.tree.map(np.asarray, dataclasses.replace(state, parameters=split(state.parameters)[0]))
    expected = dataclasses.replace(fresh, parameters=split(fresh.parameters)[0])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert find(state, batch) is state
    assert program.with_first_scales(state, batch) == (state, None)  # as when it is resumed
    state, metrics = program.step(state, batch)
    assert int(state.step) == 1
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=0.02)
    for before, after in zip(scales, _scales(state), strict=True):
        np.testing.assert_array_equal(before[:, ::2], np.log2(after)[:, ::2])


def test_a_skipped_step_leaves_weights_scales_and_ages_as_they_were() -> None:
    _, state, program = losses("1x1", 1, fp8="delayed", fp8_bf16_first_layers=1)
    for scale in _scales(state):
        first, second = np.log2(scale)[:, ::2]
        np.testing.assert_array_equal(first, [2, 24])  # of a layer in 16 bits: as at the beginning
        assert first[0] != second[0]
    bad = batch_of(program, 1)
    bad["loss_mask"] = bad["loss_mask"] * jnp.inf
    before = jax.tree.map(np.asarray, state.parameters)
    state, metrics = program.step(state, bad)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.parameters))
    assert not split(state.optimizer[1][0].mu)[1]  # no moments of scales
    plain = ShardedModel(replace(program.config, fp8="none"), program.mesh, trains=True)
    assert jax.tree.structure(without_other_modules(plain, state.parameters)) == jax.tree.structure(
        plain.abstract_parameters
    )


def test_a_product_that_no_layer_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtjax.models.float8.float8_products", lambda *_: ("mlp.up", "mlp.gate"))
    with pytest.raises(LookupError, match="no layer has mlp.gate, which"):
        make_train_step(tiny_config(fp8="delayed"), mesh_of("1x1"))


LORA: dict[str, Any] = {"lora_rank": 4, "family": "llama"}


@LONG
@pytest.mark.parametrize(
    ("recipe", "mesh", "fields"),
    [
        ("tensorwise", "2x2", {"zero": 3, "sequence_parallel": True, **LLAMA}),
        pytest.param("tensorwise", "2x1", {"zero": 1, "recompute": "full", **LLAMA}, marks=pytest.mark.exhaustive),
        ("rowwise", "2x1", {"zero": 1, **LLAMA}),
    ],
    ids=str,
)
def test_adapters_beside_frozen_matrices_in_8_bits_do_not_depend_on_the_mesh(
    recipe: str, mesh: str, fields: Any
) -> None:
    found, state, _ = losses(mesh, fp8=recipe, **LORA | fields)
    fields = LORA | {name: value for name, value in fields.items() if name not in PARALLEL}
    expected, alone, program = losses("1x1", 3, fp8=recipe, **fields)
    plain, _, _ = losses("1x1", 3, **fields)
    assert found == pytest.approx(expected, rel=1e-4)  # of each microbatch its own scales: docs/float8.md
    assert max(abs(a / b - 1) for a, b in zip(expected, plain, strict=True)) > 1e-6
    frozen = select_frozen(program.records, jax.tree.map(np.asarray, alone.parameters))
    first = select_frozen(program.records, jax.tree.map(np.asarray, program.initialize(1).parameters))
    jax.tree.map(np.testing.assert_array_equal, frozen, first)
    jax.tree.map(
        np.testing.assert_array_equal,
        frozen,
        select_frozen(program.records, jax.tree.map(np.asarray, state.parameters)),
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fp8": "none", "fp8_format": "e4m3"}, "fp8_format is e4m3, and fp8 is none"),
        ({"fp8": "none", "fp8_scales": "exact"}, "fp8_scales is exact, and fp8 is none"),
        ({"fp8": "none", "fp8_amax_history": 8}, "fp8_amax_history is 8, and fp8 is none"),
        ({"fp8": "tensorwise", "fp8_amax_history": 8}, "fp8 tensorwise has no history"),
        ({"fp8": "rowwise", "fp8_amax_history": 8}, "fp8 rowwise has no history"),
        ({"fp8": "none", "fp8_bf16_last_layers": 1}, "fp8_bf16_last_layers is 1, and fp8 is none"),
        ({"fp8_bf16_first_layers": 1, "fp8_bf16_last_layers": 1}, "leave none of the 2 layers in 8 bits"),
        (
            {"fp8_bf16_first_layers": 1, "recompute": "full", "recompute_num_layers": 2},
            "fp8_bf16_first_layers 1 does not support groups of layers",
        ),
        ({"compute_dtype": "float16"}, "does not support compute_dtype float16"),
        ({"fp8_bf16_first_layers": 1, "lora_rank": 4}, "fp8_bf16_first_layers 1 does not support LoRA"),
        ({"family": "bert"}, "does not support the family bert"),
        ({"family": "t5"}, "does not support the family t5"),
        ({"family": "hybrid", "layer_pattern": "*-"}, "does not support the family hybrid"),
        ({"num_experts": 4, "lora_rank": 4}, "LoRA of experts, and num_experts is 4: .* would gain less than 1%"),
        ({"lora_rank": 4, **LATENT}, "does not support LoRA of latent attention, and kv_lora_rank is 16"),
        (
            {"fp8_bf16_first_layers": 1, **EXPERTS},
            "fp8_bf16_first_layers 1 does not support dense layers",
        ),
    ],
)
def test_what_does_not_go_along_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate(tiny_config(**{"fp8": "delayed", **fields}))


def test_what_remains_in_16_bits_is_said_and_latent_attention_has_no_maxima_over_ranks() -> None:
    plan = Plan.of(tiny_config(fp8="delayed", **EXPERTS), parse_mesh("1x1"))
    assert plan.fp8 == "delayed"
    assert float8_note(tiny_config(**EXPERTS).model, plan) == ("not in 8 bits: experts' grouped matmuls, and routers")
    ahead = tiny_config(mtp_num_layers=1, mlp_size=40).model
    assert float8_note(ahead, plan) == (
        "not in 8 bits: layers of multi-token prediction; as a rank's sizes are not multiples of 16: mlp.up 32 x 40, "
        "mlp.down 40 x 32"
    )
    config = tiny_config(fp8="tensorwise", **LATENT)
    assert not list(float8_problems(config.model, Plan.of(config, parse_mesh("2x1"))))
    (problem,) = float8_problems(config.model, Plan.of(config, parse_mesh("1x2")))
    assert problem.startswith("fp8 tensorwise does not support latent attention with tensor parallelism, and mesh 1x2")


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"fp8": "delayed"}, "saved with fp8 none, and fp8 is delayed: .*; resume with --fp8 none, or"),
        ({"fp8": "delayed"}, {}, "saved with fp8 delayed, and fp8 is none: .*; resume with --fp8 delayed, or"),
        ({"fp8": "delayed"}, {"fp8": "tensorwise"}, "saved with fp8 delayed, and fp8 is tensorwise"),
        ({"fp8": "delayed"}, {"fp8": "delayed", "mesh": "1x4"}, r"mesh 1x1, and mesh is 1x4, .* \(mlp.down, mlp.up\)"),
        ({"fp8": "delayed", "fp8_bf16_last_layers": 1}, {"fp8": "delayed"}, "last_layers 1, and .* is 0: layers"),
        (
            {"fp8": "delayed"},
            {"fp8": "delayed", "fp8_scales": "exact"},
            "saved with fp8_scales power-of-two, and .* is exact: .*; resume with --fp8-scales power-of-two, or",
        ),
        (
            {"fp8": "delayed"},
            {"fp8": "delayed", "fp8_format": "e4m3"},
            "saved with fp8_format hybrid, and fp8_format is e4m3: .*; resume with --fp8-format hybrid, or",
        ),
        ({"fp8": "rowwise", "fp8_format": "e4m3"}, {"fp8": "rowwise"}, None),
        ({"fp8": "tensorwise"}, {}, None),
        ({"fp8": "rowwise", "fp8_scales": "exact"}, {"fp8": "tensorwise"}, None),
        ({"fp8": "delayed"}, {"fp8": "delayed", "mesh": "2x2"}, None),
    ],
    ids=str,
)
def test_scales_of_earlier_steps_are_needed_and_may_not_be_lost(then: Any, now: Any, message: str | None) -> None:
    sizes = {"hidden_size": 64, "num_heads": 4, "mlp_size": 96}
    past = Past(step=5, consumed_samples=40, tables=to_dict(tiny_config(**{"mesh": "1x1"} | sizes | then)))
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_float8_layers(past, tiny_config(**{"mesh": "1x1"} | sizes | now))


@pytest.mark.long
def test_exact_first_scales_are_found_in_as_few_passes() -> None:
    """Rounding moves exact scales by a step of 1/8 at most, which does not need another pass."""
    program: Any = program_of("1x1", fp8="delayed", fp8_scales="exact", num_layers=8, **PLAIN)
    said: list[str] = []
    FirstScales(program, said.append)(program.initialize(1), batch_of(program, 0))
    assert re.fullmatch("note    fp8's first scales were found in [3-5] passes over the first batch, .*", said[0])
