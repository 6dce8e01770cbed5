"""Memory by formula against the papers' closed forms and Megatron's published bytes."""

import dataclasses
from typing import Any

import pytest

from mtjax import config
from mtjax.analysis import counts, memory
from mtjax.analysis.anatomy import anatomy_of, gpt
from mtjax.layout import plan as plans
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from tests.counted import rank_parameters

GPT_345M = gpt(24, 1024, 16, 1024, 50_304)


def test_megatron_states_to_the_byte():
    """18 a parameter, as Megatron-LM's `theoretical_memory_usage` counts both."""
    assert 18 * counts.megatron_parameters(GPT_345M) == 6_364_827_648
    assert 18 * counts.parameters(GPT_345M) == 6_387_683_328


@pytest.mark.parametrize(
    ("precision", "plain", "kept", "sharded"),
    [
        (plans.MEGATRON_FP16, 20, 4, 16),
        (plans.MEGATRON_BF16, 18, 6, 12),
        (plans.Precision("fp32", weights=4, gradients=4, optimizer=8, reduced=4, gathered=4), 16, 8, 8),
        (plans.MTJAX, 16, 4, 12),
    ],
)
def test_bytes_per_parameter_of_zero_1(precision, plain, kept, sharded):
    assert sum(memory.bytes_per_parameter(precision, 0, 64)) == plain
    assert sum(memory.bytes_per_parameter(precision, 1, 64)) == kept + sharded / 64


def test_zero_2_and_3_shard_gradients_and_weights():
    """Weights that are their own masters from ZeRO-1 on."""
    assert memory.bytes_per_parameter(plans.MEGATRON_BF16, 2, 8) == (2, 0.5, 1.5)
    assert memory.bytes_per_parameter(plans.MEGATRON_BF16, 3, 8) == (0.25, 0.5, 1.5)
    assert memory.bytes_per_parameter(plans.MTJAX, 1, 8) == (0.5, 4, 1)
    assert memory.bytes_per_parameter(plans.MTJAX, 2, 8) == (0.5, 0.5, 1)
    assert memory.bytes_per_parameter(plans.MTJAX, 3, 8) == (0.5, 0.5, 1)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("b", [1, 4])
def test_activations_of_a_layer_are_the_published_sums(t, b):
    s, h, a = 1024, 3072, 32
    (stack,) = gpt(72, h, a, s, 51_200).stacks

    def total(**settings: bool) -> float:
        plan = Plan(MeshShape(model=t), b, b, residuals="megatron", **settings)
        return sum(memory.layer_activations(stack, plan).values())

    assert total() == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert total(sequence_parallel=True) == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert total(flash_attention=True) == pytest.approx(s * b * h * (10 + 24 / t))
    assert total(sequence_parallel=True, flash_attention=True) == pytest.approx(s * b * h * 34 / t)


MEGATRON = Plan(parse_mesh("64x1x8"), 512, 8, residuals="megatron")
GPT_8B = gpt(72, 3072, 32, 1024, 51_200)


def test_recompute_keeps_less():
    plans_ = {r: dataclasses.replace(MEGATRON, recompute=r) for r in ("none", "selective", "full")}
    kept = {r: memory.stage_memory(GPT_8B, plan).kept for r, plan in plans_.items()}
    sbh, layers = 1024 * 8 * 3072, 72
    assert kept["full"] == 2 * sbh * layers
    assert kept["selective"] == pytest.approx(sbh * (10 + 24 / 8) * layers)
    assert kept["none"] - kept["selective"] == pytest.approx(layers * 5 * 32 * 1024**2 * 8 / 8)
    split = dataclasses.replace(MEGATRON, recompute="full", sequence_parallel=True)
    assert memory.stage_memory(GPT_8B, split).kept == 2 * sbh * layers / 8


def test_what_jax_keeps_of_a_layer():
    s, h, a, b, t = 1024, 768, 12, 8, 1
    (stack,) = gpt(12, h, a, s, 51_200).stacks
    plan = Plan(MeshShape(model=t), b, b)
    kinds = memory.layer_activations(stack, plan)
    # Three bfloat16 arrays and two masks of [b,s,h], three more for query, key and value; one of [b,s,4h]; float32
    # probabilities and a mask of [b,a,s,s]: the stacks of the compiled scan.
    assert sum(kinds.values()) == b * s * h * (3 * 2 + 2 + 3 * 2 + 4 * 2) + b * a * s * s * (4 + 1)
    flash = memory.layer_activations(stack, dataclasses.replace(plan, flash_attention=True))
    assert flash["attention probabilities"] == 0


def test_what_jax_needs_in_the_backward_pass_of_attention():
    s, h, a, b = 1024, 768, 12, 8
    plan = Plan(MeshShape(), b, b, recompute="full")
    # Scores: float32 probabilities and their mask; gradients of these and of the scores in bfloat16.
    # Stream: query, key, value and attention's output; inputs and results of two norms; its gradient with and without
    # a mask; outside the loop the embeddings with their mask, the last layer's output and its gradient.
    scores, stream = 4 + 1 + 2 + 2, (4 + 4 + 2 + 3) * 2 + 1
    found = memory.stage_memory(gpt(12, h, a, s, 51_200), plan)
    assert found.working == b * a * s * s * scores + b * s * h * stream
    dry = memory.stage_memory(gpt(12, h, a, s, 51_200), dataclasses.replace(plan, dropout=False))
    assert found.working - dry.working == b * a * s * s + b * s * h


def test_a_decoders_layers_are_free_when_the_encoder_is_at_work():
    model = config.load("t5-small").model
    plan = Plan(MeshShape(), 16, 16, recompute="full")
    found = memory.stage_memory(anatomy_of(model), plan)
    deeper = memory.stage_memory(anatomy_of(dataclasses.replace(model, num_decoder_layers=2 * model.num_layers)), plan)
    one_stack = model.num_layers * 2 * 16 * model.hidden_size * 128
    assert deeper.kept - found.kept == one_stack
    assert found.working - deeper.working == one_stack


def test_relative_positions_are_made_once_and_their_gradients_summed():
    model = config.load("t5-small").model
    kept = memory.stage_memory(anatomy_of(model), Plan(parse_mesh("1x2"), 16, 16)).activations
    assert kept["relative positions"] == 2 * 4 * model.num_heads / 2 * (512**2 + 128**2)


def test_microbatches_add_to_one_sum_of_gradients():
    one = memory.stage_memory(GPT_8B, Plan(parse_mesh("64x1x8"), 512, 8))
    many = memory.stage_memory(GPT_8B, Plan(parse_mesh("64x1x8"), 512, 1))
    assert one.gradients == 4 * rank_parameters(GPT_8B, 8)
    outside = (51_200 / 8 + 1024 + 2) * 3072
    assert many.gradients == one.gradients + 4 * outside


def test_stages_hold_their_layers_embeddings_and_microbatches_in_flight():
    plan = Plan(parse_mesh("1x4x8"), 64, 1, recompute="full", residuals="megatron")
    stages = [memory.stage_memory(GPT_8B, plan, i) for i in range(4)]
    each = 2 * 1024 * 3072 * 18
    assert [m.kept for m in stages] == [each * n for n in (4, 3, 2, 1)]
    assert [m.logits > 0 for m in stages] == [False, False, False, True]
    table, layer = 51_200 * 3072 / 8, (rank_parameters(GPT_8B, 8) - 51_200 * 3072 / 8 - 1026 * 3072) / 72
    expected = [18 * layer + table + 1024 * 3072, 18 * layer, 18 * layer, 18 * layer + table + 2 * 3072]
    assert [counts.stage_counts(GPT_8B, plan, i).all for i in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [({}, 18), ({"pipeline_schedule": "interleaved", "chunks": 3}, 18), ({"layers_per_stage": (17, 19, 19, 17)}, 19)],
)
def test_every_stage_of_mtjax_holds_what_is_outside_and_as_many_layers_as_the_fullest(settings, layers):
    plan = Plan(parse_mesh("1x4x8"), 64, 1, **settings)
    table, vectors = 51_200 * 3072 / 8, (1024 + 2) * 3072
    layer = (rank_parameters(GPT_8B, 8) - table - vectors) / 72
    assert {counts.stage_counts(GPT_8B, plan, i).all for i in range(4)} == {layers * layer + table + vectors}
    assert len({memory.stage_memory(GPT_8B, plan, i).total for i in range(4)}) == 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_splits_what_a_stage_holds_over_data_ways_that_divide_a_dimension(zero):
    plan = Plan(parse_mesh("4x2x8"), 64, 1, zero=zero)
    held, one = (memory.stage_memory(GPT_8B, dataclasses.replace(plan, zero=z)) for z in (zero, 0))
    parts = [("optimizer", 1), ("gradients", 2), ("weights", 1)]
    for name, stage in parts:
        share = getattr(held, name) / getattr(one, name)
        assert share == (pytest.approx(1 / 4, rel=0.05) if zero >= stage else 1)
    odd = Plan(parse_mesh("7x2x8"), 56, 1, zero=zero)  # 7 divides neither 3072 nor 12,288 nor the padded vocabulary
    held, one = (memory.stage_memory(GPT_8B, dataclasses.replace(odd, zero=z)) for z in (zero, 0))
    assert (held.weights, held.optimizer) == (one.weights, one.optimizer)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"recompute": "full"}, (2 * 4 - 1 + 1, 0, 1)),
        ({"recompute": "full", "pipeline_schedule": "gpipe"}, (32 + 1, 0, 1)),
        ({"recompute": "full", "pipeline_schedule": "interleaved", "chunks": 2}, (2 * 4 + 3 + 1, 0, 1 / 2)),
        ({"recompute": "none"}, (8, 8, 8 + 1)),
        ({"recompute": "selective"}, (8, 8, 8 + 1)),
    ],
)
def test_slots_of_stages_keep_inputs_or_residuals(settings, kept):
    """Inputs and outputs of chunks in slots, one of them for what does not count; residuals of a chunk in each slot and
    at work, or there alone."""
    plan = Plan(parse_mesh("2x4x8"), 64, 1, **settings)
    inputs, outputs, residuals = kept
    (stack,) = GPT_8B.stacks
    found, stream = memory.stage_memory(GPT_8B, plan).activations, 2 * 1024 * 3072
    assert found["stage inputs"] == inputs * stream
    assert found.get("stage outputs", 0) == outputs * stream
    for name, size in memory.layer_activations(stack, plan).items():
        dropped = name == "attention probabilities" and plan.recompute == "selective"
        assert found.get(name, 0) == (0 if dropped else residuals * 18 * size)


def test_both_streams_of_t5_travel_and_wait_together():
    model = config.load("t5-small").model
    plan = Plan(parse_mesh("1x2x1"), 16, 4, recompute="full")
    found = memory.stage_memory(anatomy_of(model), plan).activations
    # Two chunks of each of two stages: 2 * 2 + 1 in flight, and a slot for what does not count.
    assert found["stage inputs"] == 6 * 2 * 4 * model.hidden_size * (512 + 128)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_gather_once_what_a_step_needs(zero):
    """Layers' matrices in two bytes, all else in four, beside a part of them in four. Layers without a loop no more,
    but for vectors that ZeRO-2 leaves whole, which stand there for matrices."""
    model, plan = gpt(4, 512, 8, 512, 51_200), Plan(parse_mesh("2x1"), 16, 4, zero=zero)
    every, matrices = counts.parameters(model), 4 * 12 * 512 * 512
    for one in (plan, dataclasses.replace(plan, unrolled=True)):
        found = memory.stage_memory(model, one)
        whole = counts.stage_counts(model, one).replicated
        rows = 2 * whole if one.unrolled else 0
        assert found.activations[memory.COPIES] == 2 * matrices + 4 * (every - whole - matrices) + rows
        assert found.weights == 4 * (whole + (every - whole) / 2)
    for other in ({"mesh": parse_mesh("1x1")}, {"zero": 0}, {"zero": 3}):
        assert memory.COPIES not in memory.stage_memory(model, dataclasses.replace(plan, **other)).activations


def test_layers_without_a_loop_keep_a_ranks_matrices_cast_with_zero_3():
    """And what two gathered layers and the gradients of one take, as in a loop that prefetches."""
    plan = Plan(parse_mesh("8x1"), 16, 2, zero=3)
    looped, unrolled = (memory.stage_memory(GPT_8B, dataclasses.replace(plan, unrolled=u)) for u in (False, True))
    width, heads = GPT_8B.model.hidden_size, GPT_8B.model.num_heads
    matrices = GPT_8B.model.num_layers * 12 * width**2
    assert heads % 8 == 0 and unrolled.activations[memory.COPIES] == 2 * matrices / 8
    assert memory.COPIES not in looped.activations


def test_layers_without_a_loop_keep_their_matrices_cast_and_nothing_twice():
    """Gradients of a single microbatch's layers come as what the layers kept goes."""
    model = gpt(4, 512, 8, 512, 51_200)
    plan = Plan(MeshShape(), 8, 4)
    looped, unrolled = (memory.stage_memory(model, dataclasses.replace(plan, unrolled=u)) for u in (False, True))
    layers = counts.stage_counts(model, plan).in_layers
    assert unrolled.kept == looped.kept + 2 * layers
    copies = 4 * 512 * 512 * 2 * (4 + 2) + 4 * 8 * 512**2 * (4 + 1)  # attention's five arrays, an input of each norm
    assert looped.working - unrolled.working == copies
    assert (looped.finishing, unrolled.finishing) == (0, 4 * 4 * 4 * 512**2)  # the MLP's first matrix
    one = memory.stage_memory(model, dataclasses.replace(plan, unrolled=True, microbatch_size=8))
    assert one.later == 4 * layers and unrolled.later == looped.later == 0
    assert dataclasses.replace(one, later=0.0).total - one.total == 4 * layers  # the loss is the fullest moment
    without_loss = dataclasses.replace(one, logits=0.0)
    assert dataclasses.replace(without_loss, reused=0.0).total - without_loss.total == 4 * layers
    # Of four layers two keep their input only; gradients of the other two come as their activations go.
    blocks = dataclasses.replace(plan, unrolled=True, microbatch_size=8, recompute="full", recompute_first=2)
    half = memory.stage_memory(model, blocks)
    inputs = half.activations[memory.LAYER_INPUTS]
    assert inputs == 2 * 2 * 8 * 512 * 512 and half.reused == half.kept - inputs - half.activations[memory.COPIES]
    assert memory.stage_memory(model, dataclasses.replace(blocks, recompute_first=None)).reused == 0


def test_what_waits_for_gradients_of_weights_where_something_is_sent():
    """The MLP's activation and its gradient while attention is at work; of split sequences also what was gathered."""
    shape, elements = gpt(12, 768, 12, 1024, 51_200), 8 * 1024 * 768 * 2
    whole = Plan(MeshShape(), 8, 8, recompute="full", flash_attention=True)
    alone = memory.stage_memory(shape, whole).working
    one_of_two = memory.stage_memory(shape, dataclasses.replace(whole, mesh=parse_mesh("2x1"), global_batch_size=16))
    attention, mlp, waiting = 3 * elements, (2 * 4 + 1) * elements, 2 * 4 * elements
    assert one_of_two.working - alone == attention + waiting - max(attention, mlp)
    split = dataclasses.replace(whole, mesh=parse_mesh("1x2"), sequence_parallel=True)
    part = memory.stage_memory(shape, dataclasses.replace(split, sequence_parallel=False)).working
    stream = ((4 + 2 + 3) + 1 / 2) * elements / 2
    assert memory.stage_memory(shape, split).working == part - stream + 3 * elements


def test_loss_chunk_bounds_the_logits():
    shape = gpt(24, 1024, 16, 1024, 51_200)
    whole = memory.stage_memory(shape, Plan(MeshShape(), 8, 8, residuals="megatron")).logits
    chunk = memory.stage_memory(shape, Plan(MeshShape(), 8, 8, residuals="megatron", loss_chunk=1024)).logits
    assert whole == 2 * 4 * 8 * 1024 * 51_200
    assert chunk == whole / 8
    in_place = memory.stage_memory(shape, Plan(MeshShape(), 8, 8, loss_chunk=1024)).logits
    assert in_place == (4 + 2) * 1024 * 51_200 + 2 * 51_200 * 1024


def test_logits_are_gone_before_the_layers_backward_pass():
    found = memory.stage_memory(GPT_8B, Plan(parse_mesh("64x1x8"), 512, 8, recompute="full"))
    assert found.last == 4 * 1024 * 3072  # the gradient of positions comes after the layers'
    assert found.total == found.states - found.last + found.kept + max(found.working, found.logits)


def test_the_gradient_of_an_untied_embedding_comes_last():
    """After the layers' backward pass, whatever the microbatches; a tied table has a gradient from the loss."""
    untied, tied = (gpt(4, 512, 8, 512, 51_200, tied_embeddings=is_tied) for is_tied in (False, True))
    one, several = Plan(MeshShape(), 8, 8), Plan(MeshShape(), 8, 4)
    positions, table = 4 * 512 * 512, 4 * 51_200 * 512
    assert memory.stage_memory(untied, one).last == positions + table
    assert memory.stage_memory(tied, one).last == positions
    assert memory.stage_memory(untied, several).last == positions + table
    assert memory.stage_memory(tied, several).last == positions


def test_a_single_layer_is_read_in_place():
    one, two = (memory.stage_memory(gpt(n, 512, 8, 512, 51_200), Plan(MeshShape(), 8, 4)) for n in (1, 2))
    (stack,) = gpt(1, 512, 8, 512, 51_200).stacks
    saved = memory.layer_activations(stack, Plan(MeshShape(), 8, 4))
    copied = ("query, key, value", "attention output", "attention probabilities", "norm inputs")
    assert two.working - one.working == sum(saved[name] for name in copied)


def test_zero_3_transposes_tables_that_it_splits_along_an_inner_dimension_and_scatters_the_output_table_last():
    """Of Llama 3 8B both tables, in float32, over 4 of 8 ranks; of layers, whose output and second matrix are split so
    too, one is transposed at a time. Without tensor parallelism it splits all along the outermost dimension."""
    run = config.replace(config.load("llama3-8b"), vocab_size=128_256, mesh="4x2", zero=3, recompute="full")
    run = config.replace(run, global_batch_size=8, microbatch_size=1, sequence_parallel=False)
    plan = Plan.of(run, parse_mesh("4x2"))
    kept = memory.stage_memory(anatomy_of(run.model), plan).activations
    table = 128_256 * 4096
    assert kept[memory.TRANSPOSED] == 4 * 2 * table / 8
    plan = dataclasses.replace(plan, mesh=parse_mesh("8x1"))
    kept = memory.stage_memory(anatomy_of(run.model), plan).activations
    assert memory.TRANSPOSED not in kept
    assert kept[memory.GRADIENTS_OUTSIDE] == 4 * (table + 4096)  # and the last norm's
    without = memory.stage_memory(anatomy_of(run.model), dataclasses.replace(plan, zero=1)).activations
    assert memory.TRANSPOSED not in without


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
@pytest.mark.parametrize("pattern", ["", "(*-)x3"])
def test_zero_3_without_ranks_to_shard_over_is_no_zero(mesh, pattern):
    """Both lower to the same program."""
    family: dict[str, Any] = {"family": "hybrid", "layer_pattern": pattern} if pattern else {}
    family |= {"vocab_size": 1024, "global_batch_size": 1, "microbatch_size": 1}
    run = config.replace(config.Config(), num_layers=6, mesh=mesh, **family)
    plan = Plan.of(run, parse_mesh(mesh), unrolled=False)
    sharded = dataclasses.replace(plan, zero=3)
    assert memory.stage_memory(anatomy_of(run.model), sharded) == memory.stage_memory(anatomy_of(run.model), plan)
