"""The scaling model: limits that must hold whatever its constants."""

import dataclasses
from typing import Any

import pytest

from mtjax import config
from mtjax.analysis.anatomy import Anatomy, anatomy_of, gpt
from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_PHASES
from mtjax.analysis.copies import copies_in_step
from mtjax.analysis.counts import parameters, stage_counts
from mtjax.analysis.hardware import DGX_2H, DGX_H100
from mtjax.analysis.layer_time import head_seconds, layer_seconds
from mtjax.analysis.link_time import members_inside
from mtjax.analysis.machine import Constants, Machine
from mtjax.analysis.software import MEGATRON_CORE, MTJAX
from mtjax.analysis.timing import StepTime, step_time, table_copies
from mtjax.analysis.traffic import Transfer, transfers
from mtjax.config import Config
from mtjax.config.vocabulary import with_vocabulary
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.rules import DATA, MODEL, STAGE
from mtjax.layout.timetable import timetable

GPT_8B = gpt(72, 3072, 32, 1024, 51_200)
PLAN = Plan(parse_mesh("64x1x8"), 512, 8, recompute="full")
IDEAL = Constants(1, flash_attention=1, link=1, network=1, launch=0, small_product=0, contention=0, training=1)


def test_no_product_beats_the_peak_or_the_memory():
    machine = Machine(DGX_H100)
    for m, k, n in [(8192, 8192, 8192), (128, 4096, 128), (1, 4096, 4096), (4096, 64, 4096)]:
        seconds = machine.product(m, k, n)
        assert 2 * m * k * n / seconds <= machine.peak
        assert 2 * (m * k + k * n + m * n) / seconds <= machine.gpu.bandwidth


def test_a_partial_last_wave_costs_a_whole_one():
    machine, tile = Machine(DGX_H100), 128
    full = machine.product(11 * tile, 8192, 12 * tile)
    assert machine.product(12 * tile, 8192, 12 * tile) == pytest.approx(2 * full)


def test_ring_all_reduce_on_ideal_links():
    machine = Machine(DGX_H100, constants=IDEAL)
    entry = Transfer(MODEL, 8, "all-reduce", "test", 3, 1e9, 2)
    steps = 3 * (8.4e-6 + 14 * DGX_H100.link_latency)
    assert machine.transfer(entry, inside=8) == pytest.approx(3 * 2 * 7 / 8 * 2e9 / 450e9 + steps)
    between = machine.transfer(entry, inside=2)
    steps = 3 * (8.4e-6 + 8 * DGX_H100.link_latency + 6 * DGX_H100.network_latency)
    assert between == pytest.approx(3 * 2 * 7 / 8 * 2e9 / 100e9 + steps)


def test_small_collectives_take_the_protocol_that_starts_soonest():
    """NCCL's own table, 8 ranks on NVLink: a ring in LL128 takes 10 us and steps of 1.9, a tree 4.4 and of 1.2."""
    machine = Machine(DGX_H100, constants=IDEAL)
    tiny = Transfer(MODEL, 8, "all-reduce", "test", 1, 8, 2)
    assert machine.transfer(tiny, inside=8) == pytest.approx(4.4e-6 + 14 * 1.2e-6, rel=1e-3)
    gathered = dataclasses.replace(tiny, operation="all-gather")
    assert machine.transfer(gathered, inside=8) == pytest.approx(10e-6 + 7 * 1.9e-6, rel=1e-3)
    far = machine.transfer(tiny, inside=1)
    assert far == pytest.approx(4.4e-6 + 2 * 3 * 8.5e-6, rel=1e-3)  # a tree over 8 servers: three steps up and down
    assert machine.transfer(dataclasses.replace(tiny, group_size=1), inside=1) == 0


@pytest.mark.parametrize(
    ("mesh", "server", "model", "data"),
    [
        (parse_mesh("64x1x8"), DGX_H100, 8, 1),
        (parse_mesh("64x1x8"), DGX_2H, 8, 2),
        (parse_mesh("64x1x2"), DGX_H100, 2, 4),
        (parse_mesh("8x1"), DGX_H100, 1, 8),
    ],
)
def test_model_groups_fill_servers_first(mesh, server, model, data):
    plan = dataclasses.replace(PLAN, mesh=mesh)
    assert members_inside(plan, MODEL, server) == model
    assert members_inside(plan, DATA, server) == data


def test_parts_sum_to_the_step_and_a_stage_adds_its_bubble():
    plan, machine = dataclasses.replace(PLAN, microbatch_size=4), Machine(DGX_H100)
    time = step_time(GPT_8B, plan, DGX_H100)
    parts = [
        time.products,
        time.attention,
        time.element_wise,
        time.logits,
        time.copies,
        time.model_axis,
        time.data_axis,
        time.optimizer,
    ]
    # One reduction after all microbatches; the input gradient of each layer's attention is summed beside products.
    backward = [t for t in transfers(GPT_8B, plan) if (t.axis, t.phase) == (MODEL, LAYER_BACKWARD)]
    assert 2 * time.hidden[MODEL] == pytest.approx(sum(machine.transfer(t, 8) for t in backward))
    assert time.contention == pytest.approx(machine.contention(time.hidden[MODEL]))
    assert time.hidden[DATA] == 0 and time.total == pytest.approx(sum(parts) + time.contention)
    assert time.bubble == time.stage_axis == 0
    staged = step_time(GPT_8B, Plan(parse_mesh("8x4x8"), 512, 8, recompute="full", residuals="megatron"), DGX_H100)
    busy = staged.compute + staged.model_axis + staged.stage_axis
    assert staged.bubble == pytest.approx(busy * 3 / 8)


def test_overlap_only_hides():
    plan = dataclasses.replace(PLAN, microbatch_size=4, sequence_parallel=True, zero=1)
    plain, hidden = step_time(GPT_8B, plan, DGX_H100, MTJAX), step_time(GPT_8B, plan, DGX_H100, MEGATRON_CORE)
    assert hidden.model_axis < plain.model_axis
    assert hidden.data_axis < plain.data_axis
    for axis, exposed in ((MODEL, hidden.model_axis), (DATA, hidden.data_axis)):
        assert hidden.hidden[axis] >= 0
        assert exposed >= 0


def test_what_is_hidden_costs_a_share_of_its_time():
    plan = dataclasses.replace(PLAN, sequence_parallel=True, zero=1)
    time = step_time(GPT_8B, plan, DGX_H100, MEGATRON_CORE)
    assert time.contention == pytest.approx(sum(time.hidden.values()) * (1 - 1 / 1.189))
    free = step_time(GPT_8B, plan, DGX_H100, MEGATRON_CORE, Constants(contention=0))
    assert time.total == pytest.approx(free.total + time.contention)


def test_a_product_of_less_than_a_wave_has_a_start():
    """DeepBench on V100, 16 bits: 1024 x 512 x 700 in 18 us, 3072 x 1024 x 128 in 24, 2048 x 2048 x 128 in 31."""
    machine = Machine(DGX_2H, constants=Constants(training=1))
    for m, k, n, measured in ((1024, 512, 700, 18e-6), (3072, 1024, 128, 24e-6), (2048, 2048, 128, 31e-6)):
        assert machine.product(m, k, n) == pytest.approx(measured, rel=0.3)


def test_recompute_costs_about_a_forward_pass():
    none = step_time(GPT_8B, dataclasses.replace(PLAN, recompute="none"), DGX_H100)
    full = step_time(GPT_8B, PLAN, DGX_H100)
    assert 1.2 < full.products / none.products < 4 / 3


def test_faster_hardware_is_faster():
    slow = dataclasses.replace(DGX_H100, link=DGX_H100.link / 4, network=DGX_H100.network / 4)
    assert step_time(GPT_8B, PLAN, slow).model_axis > 2 * step_time(GPT_8B, PLAN, DGX_H100).model_axis
    assert step_time(GPT_8B, PLAN, slow).data_axis > 3.5 * step_time(GPT_8B, PLAN, DGX_H100).data_axis
    assert step_time(GPT_8B, PLAN, slow).compute == step_time(GPT_8B, PLAN, DGX_H100).compute


def in_ticks(time: StepTime, anatomy: Anatomy, plan: Plan) -> float:
    """Seconds of the copies that layers make in every tick."""
    machine, others = Machine(DGX_H100), [*copies_in_step(anatomy, plan), *table_copies(anatomy, plan)]
    return time.copies - sum(copy.times * machine.kernel(copy.size) for copy in others)


def test_stages_copy_the_sums_of_tables_in_every_tick():
    """Each of two once where a branch leaves it alone, and once around the branch; of a single one none is left there.
    As XLA compiles it for H100: `data=8,stage=2,model=1` of Llama 3 8B has four copies of 1.75 ms a tick."""
    llama = anatomy_of(config.load("llama3-8b").model)
    for anatomy, each in ((llama, 2), (GPT_8B, 1)):
        plan = Plan(parse_mesh("8x2x1"), 1024, 1, pipeline_schedule="interleaved", chunks=4)
        found = table_copies(anatomy, plan)
        rows, width = anatomy.embed[0].weights[0].shape
        assert {(copy.size, copy.times) for copy in found} == {(8 * rows * width, each * (128 * 4 + 1))}
        assert len(found) == each


def test_a_step_on_stages_takes_the_ticks_of_its_timetable():
    plan = Plan(parse_mesh("1x4x1"), 12, 1, recompute="none")
    time, one = (step_time(GPT_8B, dataclasses.replace(plan, global_batch_size=n), DGX_H100) for n in (12, 1))
    assert time.compute == pytest.approx(12 * one.compute)
    table = timetable("1f1b", 4, 12)
    copied = in_ticks(one, GPT_8B, dataclasses.replace(plan, global_batch_size=1))
    tick = one.products + one.attention + one.element_wise + copied
    spent = time.compute - time.logits + in_ticks(time, GPT_8B, plan) + time.bubble
    assert spent == pytest.approx(table.forward_ticks * tick)
    assert time.logits > 0 and time.model_axis == 0


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("gpipe", 1)])
def test_idle_halves_send_too(schedule, chunks):
    plan = Plan(parse_mesh("2x4x8"), 64, 1, recompute="full", pipeline_schedule=schedule, chunks=chunks)
    time, table = step_time(GPT_8B, plan, DGX_H100), timetable(schedule, 4, 32, chunks)
    on_layers = [t for t in transfers(GPT_8B, plan) if t.axis == MODEL and t.phase.startswith(("layer", "stages"))]
    seconds = sum(Machine(DGX_H100).transfer(t, 8) for t in on_layers)
    work = time.products + time.attention + time.element_wise + in_ticks(time, GPT_8B, plan)
    assert time.bubble == pytest.approx(table.bubble * work + (1 - 1 / (1 + table.bubble)) * seconds)
    assert time.model_axis > seconds / (1 + table.bubble)


def test_sends_between_stages_are_exposed_where_a_tick_has_one_half_only():
    """Of 1F1B those of the warm-up and the cool-down, of GPipe all."""
    plan = Plan(parse_mesh("2x4x8"), 64, 1, recompute="full", sequence_parallel=True)
    (permute,) = (t for t in transfers(GPT_8B, plan) if t.operation == "collective-permute")
    (shared,) = (t for t in transfers(GPT_8B, plan) if t.axis == STAGE and t.operation == "all-reduce")
    machine, table = Machine(DGX_H100), timetable("1f1b", 4, 32)
    inside = members_inside(plan, STAGE, DGX_H100)
    each, once = (machine.transfer(t, inside) for t in (permute, shared))
    lonely = 2 * (4 - 1)
    assert permute.count == table.forward_ticks + table.backward_ticks
    assert step_time(GPT_8B, plan, DGX_H100).stage_axis == pytest.approx(each * lonely / permute.count + once)
    gpipe = dataclasses.replace(plan, pipeline_schedule="gpipe")
    assert step_time(GPT_8B, gpipe, DGX_H100).stage_axis == pytest.approx(each + once)


def test_zero_3_waits_for_what_other_layers_do_not_hide():
    """Forward a quarter of the computing hides half the layers' gathers, backward the rest hides the others and the
    sums; nothing hides those of the tables. Layers in groups gather for themselves, and wait for all."""
    plan = Plan(parse_mesh("64x8"), 512, 8, recompute="full", zero=3)
    grouped = dataclasses.replace(plan, recompute_group=2)
    ahead, alone = (step_time(GPT_8B, p, DGX_H100) for p in (plan, grouped))
    assert 0 < ahead.data_axis < ahead.hidden[DATA] and alone.hidden[DATA] == 0 < alone.data_axis
    of_device = stage_counts(GPT_8B, plan)
    layers, tables, sent = (
        of_device.in_layers,
        of_device.all - of_device.in_layers,
        ahead.data_axis + ahead.hidden[DATA],
    )
    # Gradients take 4 bytes, twice the parameters' 2, which the layers gather twice.
    assert ahead.data_axis == pytest.approx(sent * 3 * tables / (3 * tables + 4 * layers), rel=0.02)
    slow = Constants(network=Constants().network / 100)
    late = step_time(GPT_8B, plan, DGX_H100, constants=slow)
    assert late.data_axis > 0
    beside = late.products + late.attention + late.element_wise + late.model_axis
    assert late.hidden[DATA] == pytest.approx(beside)


def test_what_sharding_groups_send_each_other_is_exposed():
    plan = Plan(parse_mesh("data=8,shard=8"), 512, 8, recompute="full", zero=3)
    shard = 4 * parameters(GPT_8B) / 8
    assert step_time(GPT_8B, plan, DGX_H100).data_axis >= 2 * 7 / 8 * shard / DGX_H100.network
    assert members_inside(plan, "shard", DGX_H100) == 8 and members_inside(plan, DATA, DGX_H100) == 1


def test_full_recompute_on_stages_pays_for_losses_with_a_forward_half():
    plan = Plan(parse_mesh("2x4x8"), 64, 1, recompute="full")
    full, none = (step_time(GPT_8B, dataclasses.replace(plan, recompute=r), DGX_H100) for r in ("full", "none"))
    assert full.logits < none.logits
    gpipe = step_time(GPT_8B, dataclasses.replace(plan, pipeline_schedule="gpipe"), DGX_H100)
    assert gpipe.logits == none.logits


def test_a_tick_of_t5_waits_for_the_slower_stack():
    anatomy = anatomy_of(config.load("t5-11b").model)
    plan = Plan(parse_mesh("1x4x1"), 32, 1)
    time = step_time(anatomy, plan, DGX_H100)
    work = time.products + time.attention + time.element_wise + in_ticks(time, anatomy, plan)
    assert time.bubble > timetable("1f1b", 4, 32, 2).bubble * work


def test_matmuls_in_8_bits_are_faster_and_the_kernels_around_them_are_not_free() -> None:
    """Beside XLA's program for llama3-8b on 8 H100s (docs/float8.md), whose matmuls take 5.06 instead of 7.45 s."""
    run = config.replace(with_vocabulary(config.load("llama3-8b"), lambda _: None), mesh="8x1", zero=3)
    run = config.replace(run, global_batch_size=64, microbatch_size=1, recompute="full")
    wide, eight = (
        step_time(anatomy_of(run.model), Plan.of(r, parse_mesh("8x1"), flash_attention=True), DGX_H100)
        for r in (run, config.replace(run, fp8="delayed"))
    )
    assert wide.compute - eight.compute == pytest.approx(7.45 - 5.06 - (1.71 - 1.28), rel=0.1)
    assert wide.logits == eight.logits and wide.attention == eight.attention


def test_gates_and_biases_of_scores_are_read_and_written():
    """Beside the same sizes without: a gated MLP of 11,008 moves 5 arrays more in three passes, T5's positions 16 bytes
    a score."""

    def seconds(preset: str, part: str, **settings) -> float:
        run = config.replace(config.load(preset), mesh="1x1", global_batch_size=2, microbatch_size=2, **settings)
        plan = Plan.of(run, parse_mesh("1x1"), recompute="full", unrolled=False)
        return getattr(step_time(anatomy_of(run.model), plan, DGX_H100), part)

    passes = Machine(DGX_H100).passes
    gated, plain = (seconds("llama2-7b", "element_wise", activation=name) for name in ("swiglu", "gelu"))
    assert gated - plain == pytest.approx(passes(32 * 2 * 4096 * 11008 * 2 * 5))
    relative, learned = (seconds("t5-220m", "attention", position=name) for name in ("relative", "learned"))
    assert relative - learned == pytest.approx(passes(12 * 2 * 12 * (512 * 512 + 128 * 128) * 16))


def test_loops_that_keep_products_compute_gates_again_and_norms_of_queries_and_keys_are_eight_passes():
    """As the kernels of `olmo2-7b` on H100 do, by their bytes."""

    def seconds(recompute="none", *, unrolled=False, **settings) -> float:
        run = config.replace(config.load("olmo2-7b"), mesh="1x1", global_batch_size=2, microbatch_size=2, **settings)
        plan = Plan.of(run, parse_mesh("1x1"), recompute=recompute, unrolled=unrolled)
        return step_time(anatomy_of(run.model), plan, DGX_H100).element_wise

    passes, tokens = Machine(DGX_H100).passes, 32 * 2 * 4096
    in_loop, unrolled = (seconds(unrolled=unrolled) for unrolled in (False, True))
    assert in_loop - unrolled == pytest.approx(passes(tokens * 11008 * 2 * 2))
    assert in_loop - seconds(qk_norm=False) == pytest.approx(passes(tokens * 2 * 4096 * 2 * 8))


def test_masks_of_scores_take_the_time_of_their_instructions():
    """By the machine code of `t5-220m` on H100: 64.4 us for the mask of 16 x 12 x 512 x 512 scores, 21 by its bytes."""
    machine, pairs = Machine(DGX_H100), 16 * 12 * 512 * 512
    assert machine.drawn(pairs) == pytest.approx(64.4e-6, rel=0.01)
    model = gpt(1, 768, 12, 512, 51_200)
    with_dropout, without = (
        layer_seconds(model.stacks[0], Plan(parse_mesh("1x1"), 16, 16, attention_dropout=dropout), machine, MTJAX)[1]
        for dropout in (True, False)
    )
    by_bytes = machine.passes(pairs * (2 + 1 + 1))  # a mask written and read twice, probabilities written once more
    assert with_dropout - without == pytest.approx(by_bytes + machine.drawn(pairs) - machine.passes(pairs))


def test_fused_attention_computes_values_that_are_narrower_than_keys_with_their_width():
    """Of DeepSeek-V3's heads keys have 192 channels and values 128; of a step's seven products three are with values:
    the output, and the gradients of probabilities and of values."""

    def attention(value: int) -> float:
        run = config.replace(config.load("deepseek-v3"), mesh="1x1", microbatch_size=1, v_head_dim=value)
        plan = Plan.of(run, parse_mesh("1x1"), recompute="none", flash_attention=True)
        return layer_seconds(anatomy_of(run.model).stacks[0], plan, Machine(DGX_H100), MTJAX)[1]

    assert attention(128) / attention(192) == pytest.approx((4 * 192 + 3 * 128) / (7 * 192))


def test_fused_attention_computes_the_scores_within_windows():
    """Of gpt-oss's layers every other has a window of 128 of 8,192 tokens: 128 - 1 of 8,192 / 2 scores a token."""

    def attention(layers: str) -> float:
        run = config.replace(config.load("gpt-oss-20b"), mesh="1x1", microbatch_size=1, window_layers=layers)
        plan = Plan.of(run, parse_mesh("1x1"), recompute="none", flash_attention=True)
        return layer_seconds(anatomy_of(run.model).stacks[0], plan, Machine(DGX_H100), MTJAX)[1]

    assert attention("SF") / attention("F") == pytest.approx((1 + 127 / 4096) / 2)


def test_attention_in_pallas_computes_nine_matmuls_and_draws_three_masks():
    """Heads of 96 as 128, half of the scores, matmuls at 35% of the peak and then random numbers."""
    machine = Machine(DGX_H100, constants=IDEAL)
    plan = Plan(parse_mesh("1x1"), 8, 8, flash_attention=True, pallas_attention=True)
    found = layer_seconds(gpt(1, 1536, 16, 1024, 51_200).stacks[0], plan, machine, MTJAX)[1]
    pairs, h100 = 8 * 16 * 1024 * 1024 / 2, DGX_H100.gpu
    drawn = 3 * pairs * 17 / (h100.multiprocessors * h100.clock * 1e9 * 64)
    assert found == pytest.approx(2 * 9 * pairs * 128 / (0.35 * machine.peak) + drawn)


def test_attention_that_writes_scores_out_copies_what_it_reads():
    """Query, key, value and the output: forward, again and backward."""
    model, plan = gpt(1, 1024, 8, 512, 51_200), Plan(parse_mesh("1x1"), 8, 8, recompute="full", dropout=False)
    stack, machine = model.stacks[0], Machine(DGX_H100)
    ours, theirs = (
        layer_seconds(stack, dataclasses.replace(plan, residuals=residuals), machine, MTJAX)[1]
        for residuals in ("jax", "megatron")
    )
    assert ours - theirs == pytest.approx(3 * machine.passes(2 * 2 * 4 * 8 * 512 * 1024))


def test_half_of_what_chunks_of_one_layer_send_passes_beside_the_other_half_of_a_tick():
    model = gpt(8, 8192, 64, 2048, 51_200)
    plan = Plan(parse_mesh("2x4x8"), 64, 1, recompute="full", sequence_parallel=True)
    single = dataclasses.replace(plan, pipeline_schedule="interleaved", chunks=2)
    found, several = (step_time(model, p, DGX_H100) for p in (single, plan))
    assert several.hidden[MODEL] == 0 < found.hidden[MODEL]
    sums = [t for t in transfers(model, single) if t.axis == MODEL and t.phase in LAYER_PHASES]
    machine = Machine(DGX_H100)
    assert 2 * found.hidden[MODEL] == pytest.approx(sum(machine.transfer(t, 8) for t in sums))
    assert found.contention > several.contention


def test_products_hide_no_more_than_half_as_long_as_they_take_in_all_ticks():
    """Tensor parallel ranks on four servers: hidden in front of a slow network is what products are there for."""
    model, slow = gpt(8, 8192, 64, 2048, 51_200), Constants(network=Constants().network / 100)
    plan = Plan(parse_mesh("1x4x32"), 64, 1, recompute="full", pipeline_schedule="interleaved", chunks=2)
    found, slower = (step_time(model, plan, DGX_H100, constants=c) for c in (None, slow))
    busy = found.products * timetable("interleaved", 4, 64, 2).forward_ticks / (64 * 2)
    assert found.hidden[MODEL] == slower.hidden[MODEL] == pytest.approx(busy / 2)
    assert slower.model_axis > 50 * found.products


def test_frozen_matrices_have_no_gradients_that_take_time_or_hide_sums():
    """Full recompute has four products for each matrix, LoRA three; adapters are small where no ranks share a layer."""
    llama, machine = config.load("llama3-8b"), Machine(DGX_H100)

    def found(rank: int, mesh: str) -> StepTime:
        run = config.replace(llama, mesh=mesh, lora_rank=rank, zero=0)
        return step_time(anatomy_of(run.model), Plan.of(run, parse_mesh(mesh), recompute="full"), DGX_H100)

    (full, adapted), (split, adapted_split) = ([found(rank, mesh) for rank in (0, 16)] for mesh in ("8x1", "1x8"))
    assert 3 / 4 < adapted.products / full.products < 0.85
    assert split.hidden[MODEL] > 0 == adapted_split.hidden[MODEL]
    # Of logits the gradient that is left out is the table's.
    run = config.replace(llama, lora_rank=16)
    anatomy, plan = anatomy_of(run.model), Plan(parse_mesh("8x1"), 8, 1, recompute="full")
    whole, frozen = (head_seconds(a, plan, machine, MTJAX) for a in (anatomy_of(llama.model), anatomy))
    assert whole - frozen == pytest.approx(machine.product(4096, 8192, 128_256), rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "samples", "mesh", "whole", "blocks"),
    [
        (2048, 4, "8x1", 163.3, 195.3),
        (4096, 1, "8x1", 114.5, 136.8),
        (4096, 1, "1x8", 20.9, 26.9),
        (8192, 1, "1x8", 45.0, 57.4),
    ],
)
def test_attention_in_blocks_takes_longer_than_all_scores_at_once(tokens, samples, mesh, whole, blocks):
    """Milliseconds of programs compiled for H100s (27 November 2026, docs/notes/speed.md), by formula within 14%."""
    model: dict[str, Any] = {
        "family": "gpt",
        "num_layers": 4,
        "hidden_size": 4096,
        "num_heads": 32,
        "position": "alibi",
    }
    model |= {"vocab_size": 8192, "vocab_multiple": 256, "sequence_length": tokens, "mesh": mesh, "recompute": "full"}
    model |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "compute_dtype": "bfloat16", "microbatch_size": samples}
    batch = samples * parse_mesh(mesh).data
    for kernel, compiled in (("xla", whole), ("blocks", blocks)):
        run = config.replace(Config(), **model, global_batch_size=batch, attention=kernel)
        seconds = step_time(anatomy_of(run.model), Plan.of(run, parse_mesh(mesh)), DGX_H100).total
        assert 1e3 * seconds == pytest.approx(compiled, rel=0.14)
