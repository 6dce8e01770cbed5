"""The time walk on programs small enough to work out by hand, and the products and bytes that it is fed."""

import dataclasses

import pytest

from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.machine import Constants
from mtjax.inspect import hlo
from mtjax.inspect.collectives import find_collectives
from mtjax.inspect.products import count_flops, product_of, products_of
from mtjax.inspect.roofline import Roofline, Walked
from mtjax.inspect.traffic import bytes_moved
from mtjax.layout.attention_kernel import EITHER, WINDOWED
from tests.inspect import snippets

CONSTANTS = Constants(memory=1.0, link=1.0, network=1.0, launch=2.0, small_product=0.0, contention=0.0)
"""A kernel takes two seconds and memory its datasheet speed, so that sums can be done in the head."""

SERVER = dataclasses.replace(DGX_H100, link=96.0, link_latency=0.0, network_latency=0.0)
"""Links of 96 bytes a second: an all-reduce of 64 bytes over 4 sends 96 bytes, in one second."""


def walk(text: str, server=SERVER, constants=CONSTANTS) -> Walked:
    module = hlo.parse(text)
    found = find_collectives(module, {"data": 2, "model": 4}, server.gpus)
    return Roofline(module, found, server, constants).run()


def test_a_collective_behind_computation_costs_nothing():
    """Six turns of two kernels of two seconds; the all-reduce of one second runs beside the first of them."""
    walked = walk(snippets.LOOP)
    assert walked.seconds == pytest.approx(6 * 4)
    assert walked.phases["layer forward"].hidden == pytest.approx(6 * 1)
    assert walked.phases["layer forward"].exposed == 0


def test_computing_beside_a_collective_takes_longer():
    """Where it is twice as slow, by half the second in which the all-reduce runs; less what it waits."""
    slower = dataclasses.replace(CONSTANTS, contention=1.0)
    walked = walk(snippets.LOOP, constants=slower)
    assert walked.seconds == pytest.approx(6 * (4 + 0.5))
    assert sum(spent.contention for spent in walked.phases.values()) == pytest.approx(6 * 0.5)
    waits = walk(snippets.LOOP, dataclasses.replace(SERVER, link=96.0 / 5), slower)
    assert waits.seconds == pytest.approx(6 * (5 + 2))


def test_what_computation_does_not_cover_is_waited_for():
    walked = walk(snippets.LOOP, dataclasses.replace(SERVER, link=96.0 / 5))
    assert walked.seconds == pytest.approx(6 * (5 + 2))
    assert walked.phases["layer forward"].exposed == pytest.approx(6 * 3)
    assert walked.by_axes["model"].exposed == pytest.approx(6 * 3)
    assert walked.by_axes["model"].hidden == pytest.approx(6 * 2)


def test_a_synchronous_collective_is_all_waiting():
    walked = walk(snippets.LOOP.replace('"is_sync":false', '"is_sync":true'))
    assert walked.phases["layer forward"].exposed == pytest.approx(6 * 1)


def test_between_servers_the_network_is_the_limit():
    """Two servers of two members each share 2 x 12 bytes a second: 96 bytes take four, two of them hidden."""
    server = dataclasses.replace(SERVER, gpus=2, network=12.0)
    assert walk(snippets.LOOP, server).seconds == pytest.approx(6 * (4 + 2))


TWO_LINKS = """HloModule m, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %between = f32[16]{0} all-reduce-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
  %inside = f32[16]{0} all-reduce-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %inside-done = f32[16]{0} all-reduce-done(%inside)
  ROOT %between-done = f32[16]{0} all-reduce-done(%between)
}
"""


@pytest.mark.parametrize(("side_by_side", "seconds"), [(False, 2 + 1), (True, 2)])
def test_where_streams_allow_it_a_collective_passes_one_between_servers(side_by_side, seconds):
    """64 bytes over two servers of 32 bytes a second take two seconds, over four members of a server one."""
    server = dataclasses.replace(SERVER, gpus=4, network=32.0)
    module = hlo.parse(TWO_LINKS)
    found = find_collectives(module, {"data": 2, "model": 4}, server.gpus)
    assert Roofline(module, found, server, CONSTANTS, side_by_side=side_by_side).run().seconds == pytest.approx(seconds)


def test_of_a_branch_the_longer_counts():
    walked = walk(snippets.BRANCHES)  # all-gather of 64 bytes over 4: 48 bytes, half a second; or a kernel of two
    assert walked.seconds == pytest.approx(2.0)


FUSED = """HloModule m, is_scheduled=true

%slice_and_update (stack: f32[8,100], i: s32[], new: f32[100]) -> (f32[1,100], f32[8,100]) {
  %stack = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %new = f32[100]{0} parameter(2)
  %zero = s32[] constant(0)
  %cut = f32[1,100]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,100}
  %row = f32[1,100]{1,0} bitcast(%new)
  %put = f32[8,100]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
  ROOT %both = (f32[1,100]{1,0}, f32[8,100]{1,0}) tuple(%cut, %put)
}

%gemm (a: bf16[4,6,5], b: bf16[4,5,7]) -> f32[4,6,7] {
  %a = bf16[4,6,5]{2,1,0} parameter(0)
  %b = bf16[4,5,7]{2,1,0} parameter(1)
  ROOT %dot = f32[4,6,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

ENTRY %main (s: f32[8,100], i: s32[], n: f32[100], x: bf16[4,6,5], y: bf16[4,5,7], q: bf16[2,64,3,16]) -> f32[4,6,7] {
  %s = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %n = f32[100]{0} parameter(2)
  %x = bf16[4,6,5]{2,1,0} parameter(3)
  %y = bf16[4,5,7]{2,1,0} parameter(4)
  %q = bf16[2,64,3,16]{3,2,1,0} parameter(5)
  %f = (f32[1,100]{1,0}, f32[8,100]{1,0}) fusion(%s, %i, %n), kind=kLoop, calls=%slice_and_update
  %flash = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %back = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %lib = (f32[4,6,7]{2,1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  %masked = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "PADDING_CAUSAL", "dropout_rate": 0}}
  %ring = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "NO_MASK", "dropout_rate": 0}}
  %near = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "CAUSAL", "sliding_window_length": 16}}
  %written = (bf16[2,64,3,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL","sliding_window_length":"0"}}
  ROOT %g = f32[4,6,7]{2,1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
}
"""  # noqa: E501


def test_of_slices_only_the_slice_moves():
    module = hlo.parse(FUSED)
    moved = bytes_moved(module, module.entry, module.entry.by_name["f"])
    # Read: a row of the stack, the number, the new row; written: the row that was cut, and the row in place.
    assert moved == 400 + 4 + 400 + 400 + 400


UPDATED = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%in_place (x: f32[8,100], new: f32[8,10]) -> f32[800] {
  %x = f32[8,100]{1,0} parameter(0)
  %new = f32[8,10]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %put = f32[8,100]{1,0} dynamic-update-slice(%x, %new, %zero, %zero)
  ROOT %flat = f32[800]{0} bitcast(%put)
}

%summed (x: f32[8,100], new: f32[8,10]) -> f32[8] {
  %x = f32[8,100]{1,0} parameter(0)
  %new = f32[8,10]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %put = f32[8,100]{1,0} dynamic-update-slice(%x, %new, %zero, %zero)
  %start = f32[] constant(0)
  ROOT %rows = f32[8]{0} reduce(%put, %start), dimensions={1}, to_apply=%add
}

%cut (x: f32[8,100], new: f32[8,10]) -> f32[2,100] {
  %x = f32[8,100]{1,0} parameter(0)
  %new = f32[8,10]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %put = f32[8,100]{1,0} dynamic-update-slice(%x, %new, %zero, %zero)
  ROOT %rows = f32[2,100]{1,0} slice(%put), slice={[0:2], [0:100]}
}

ENTRY %main (x: f32[8,100], n: f32[8,10]) -> f32[8] {
  %x = f32[8,100]{1,0} parameter(0)
  %n = f32[8,10]{1,0} parameter(1)
  %p = f32[800]{0} fusion(%x, %n), kind=kLoop, calls=%in_place
  %c = f32[2,100]{1,0} fusion(%x, %n), kind=kLoop, calls=%cut
  ROOT %s = f32[8]{0} fusion(%x, %n), kind=kInput, calls=%summed
}
"""


def test_an_updated_array_is_read_unless_it_is_updated_in_place():
    """The loss overwrites the logits of padding in the kernels that reduce them: these read all logits."""
    module = hlo.parse(UPDATED)
    moved = {name: bytes_moved(module, module.entry, module.entry.by_name[name]) for name in ("p", "s", "c")}
    assert moved == {"p": 320 + 320, "s": 3200 + 320 + 32, "c": 800 + 320 + 800}


CONVERTED = """HloModule m, is_scheduled=true

%alone (x: f32[8,100]) -> bf16[8,100] {
  %x = f32[8,100]{1,0} parameter(0)
  ROOT %cast = bf16[8,100]{1,0} convert(%x)
}

%viewed (x: f32[8,100]) -> bf16[800] {
  %x = f32[8,100]{1,0} parameter(0)
  %cast = bf16[8,100]{1,0} convert(%x)
  ROOT %flat = bf16[800]{0} bitcast(%cast)
}

%used (x: f32[8,100], unread: f32[8]) -> bf16[8,100] {
  %x = f32[8,100]{1,0} parameter(0)
  %unread = f32[8]{0} parameter(1)
  %cast = bf16[8,100]{1,0} convert(%x)
  ROOT %negative = bf16[8,100]{1,0} negate(%cast)
}

%cut (x: f32[8,100]) -> bf16[2,100] {
  %x = f32[8,100]{1,0} parameter(0)
  %cast = bf16[8,100]{1,0} convert(%x)
  ROOT %rows = bf16[2,100]{1,0} slice(%cast), slice={[0:2], [0:100]}
}

ENTRY %main (x: f32[8,100], y: f32[8]) -> bf16[8,100] {
  %x = f32[8,100]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %a = bf16[8,100]{1,0} fusion(%x), kind=kLoop, calls=%alone
  %v = bf16[800]{0} fusion(%x), kind=kLoop, calls=%viewed
  %c = bf16[2,100]{1,0} fusion(%x), kind=kLoop, calls=%cut
  ROOT %u = bf16[8,100]{1,0} fusion(%x, %y), kind=kLoop, calls=%used
}
"""


def test_what_is_converted_is_read_in_its_own_type():
    module = hlo.parse(CONVERTED)
    moved = {name: bytes_moved(module, module.entry, module.entry.by_name[name]) for name in ("a", "v", "u", "c")}
    assert moved == {"a": 3200 + 1600, "v": 3200 + 1600, "u": 3200 + 1600, "c": 800 + 400}


def test_products_in_fusions_and_libraries():
    module = hlo.parse(FUSED)
    (fused,) = products_of(module, module.entry, module.entry.by_name["g"])
    library = product_of(module.entry, module.entry.by_name["lib"])
    assert fused == library
    assert (fused.m, fused.k, fused.n, fused.batch, fused.flops) == (6, 5, 7, 4, 2 * 4 * 6 * 5 * 7)


def test_flash_attention_counts_its_products_in_full():
    module = hlo.parse(FUSED)
    once = 2 * 2 * 3 * 64 * 64 * 16
    assert product_of(module.entry, module.entry.by_name["flash"]).flops == 2 * once
    assert product_of(module.entry, module.entry.by_name["back"]).flops == 5 * once
    assert count_flops(module) == 15 * once + 2 * 2 * 4 * 6 * 5 * 7


def test_of_causal_flash_attention_half_takes_time():
    module = hlo.parse(FUSED)
    roofline = Roofline(module, [], SERVER, dataclasses.replace(CONSTANTS, launch=0.0))
    times = {
        name: roofline.product_seconds(product_of(module.entry, module.entry.by_name[name]))
        for name in ("flash", "masked", "ring", "near", "written")
    }
    assert times["ring"] == pytest.approx(2 * times["flash"]) and times["masked"] == times["flash"] == times["written"]
    # Of 64 tokens, 16 see fewer than 16, and 48 see 16: 128 + 768 of 64 x 64 scores.
    assert times["near"] == pytest.approx(times["ring"] * 896 / 4096)


def test_attention_with_and_without_a_window_takes_the_mean_of_the_layers():
    """Of five in six layers the first kernel runs, of one the second; operations without work take a launch."""
    branch = "false_computation=%no"
    text = snippets.BRANCHES.replace(branch, f'{branch}, metadata={{op_name="jit(step)/layers/{WINDOWED}/cond"}}')
    module = hlo.parse(text)
    times = [Roofline(module, [], SERVER, CONSTANTS, windowed=windowed).run().seconds for windowed in (1.0, 0.0, 5 / 6)]
    assert times[0] != times[1] and times[2] == pytest.approx((5 * times[0] + times[1]) / 6)
    usual = Roofline(hlo.parse(text.replace(WINDOWED, EITHER)), [], SERVER, CONSTANTS, windowed=0.0)
    assert usual.run().seconds == times[0]
