"""What is read off PTX and machine code, on code small enough to work out by hand, and on a train step."""

import importlib.util
import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from mtjax.analysis.hardware import H100
from mtjax.config import load
from mtjax.errors import UserError
from mtjax.inspect import text
from mtjax.inspect.command import InspectJob
from mtjax.inspect.compiled import DUMP_TO, WITH_KERNELS
from mtjax.inspect.html import page
from mtjax.inspect.kernels import audit, ptx, sass
from mtjax.inspect.kernels.audit import SWAPS, check_kernels
from mtjax.inspect.kernels.block import follow
from mtjax.inspect.kernels.dump import read
from mtjax.inspect.kernels.kernel import KernelLaunch, atomics_of, machine_of
from mtjax.inspect.kernels.occupancy import occupancy
from mtjax.inspect.kernels.rates import ALU, ISSUE, SPECIAL, rates_of
from mtjax.inspect.kernels.source import SourceLines
from mtjax.inspect.kernels.tools import assemble
from mtjax.inspect.options import Options
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.schema import to_json
from mtjax.inspect.targets import find_target
from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import parse_mesh
from mtjax.models.ops import dropout
from mtjax.sharding.axes import use_rules
from tests.inspect.steps import has_cudnn, needs_aot, tiny

NAMES = ("batch", "act_seq", "embed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
THREADS, TURNS = 128, 96
HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"
KERNEL = """
.visible .entry example(
	.param .u64 .ptr .align 16 example_param_0,
	.param .u64 .ptr .align 16 example_param_1
)
.reqntid 128, 1, 1
{{
	.reg .pred 	%p<5>;
	.reg .b32 	%r<30>;
	.reg .f32 	%f<30>;
	.reg .b64 	%rd<20>;
	ld.param.u64 	%rd1, [example_param_0];
	ld.param.u64 	%rd2, [example_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mad.lo.s32 	%r4, %r2, 12288, %r1;  // 96 rows of 128 for each block
	mul.wide.u32 	%rd5, %r4, 4;
	add.s64 	%rd6, %rd1, %rd5;
	mov.u32 	%r5, 0;
	mov.f32 	%f1, 0f00000000;
$L__BB0_1:
	ld.global.nc.f32 	%f2, [%rd6];
	ex2.approx.ftz.f32 	%f3, %f2;
	add.f32 	%f1, %f1, %f3;
	add.s64 	%rd6, %rd6, 512;
	add.s32 	%r5, %r5, 1;
	setp.lt.u32 	%p1, %r5, 96;
	@%p1 bra 	$L__BB0_1;
	{end}
	ret;
}}
"""
"""Each thread adds 96 numbers, those of a warp next to each other; then `end` stores the sum."""
STORES = {
    "next to each other": ("mul.wide.u32 %rd7, %r1, 4;\n add.s64 %rd8, %rd2, %rd7;\n st.global.f32 [%rd8], %f1;", 4, 1),
    "a row apart": ("mul.wide.u32 %rd7, %r1, 256;\n add.s64 %rd8, %rd2, %rd7;\n st.global.f32 [%rd8+4], %f1;", 256, 1),
    "by half of the threads": (
        "setp.ge.u32 %p2, %r1, 64;\n @%p2 bra $L_end;\n mul.wide.u32 %rd7, %r1, 4;\n add.s64 %rd8, %rd2, %rd7;\n"
        " st.global.f32 [%rd8], %f1;\n$L_end:",
        4,
        2,
    ),
}
"""Name -> code, bytes between the threads' elements, threads for each thread that stores."""


def kernel_of(end: str) -> ptx.PtxEntry:
    return ptx.parse(HEAD + KERNEL.format(end=end))["example"]


@pytest.mark.parametrize("name", STORES)
def test_a_block_touches_the_sectors_that_its_addresses_lie_in(name):
    code, apart, of = STORES[name]
    kernel = kernel_of(code)
    followed = follow(kernel, (THREADS, 1, 1), (6, 1, 1))
    loads, stores = (followed.accesses[i] for i, op in enumerate(kernel.ops) if op.space == "global")
    assert (loads.threads, loads.requests) == (TURNS * THREADS, TURNS * THREADS // 32)
    assert loads.sectors == TURNS * THREADS * 4 // 32
    storing = THREADS // of
    expected = len({thread * apart // 32 for thread in range(storing)})
    assert (stores.threads, stores.sectors) == (storing, expected)
    used = followed.touched / (32 * followed.sectors)
    assert used == pytest.approx((TURNS * THREADS + storing) * 4 / 32 / (loads.sectors + expected))
    assert followed.is_complete


def test_an_index_that_was_loaded_is_a_gather_and_an_offset_is_not():
    """Threads load other indices: their addresses are not known. All load one offset: only that is not known."""
    gather = "ld.global.u32 %r6, [%rd6];\n mul.wide.u32 %rd7, %r6, 4;\n add.s64 %rd8, %rd2, %rd7;"
    offset = (
        "ld.global.u32 %r6, [%rd2];\n add.s32 %r7, %r6, %r1;\n mul.wide.u32 %rd7, %r7, 4;\n add.s64 %rd8, %rd2, %rd7;"
    )
    for code, is_indexed, sectors in ((gather, True, 0), (offset, False, THREADS * 4 // 32)):
        kernel = kernel_of(f"{code}\n st.global.f32 [%rd8], %f1;")
        accesses = follow(kernel, (THREADS, 1, 1), (6, 1, 1)).accesses
        store = accesses[max(accesses)]
        assert (store.is_indexed, store.sectors) == (is_indexed, sectors)


def test_an_index_is_taken_to_lie_within_the_array():
    """All threads of a block add to the row whose index they load, if it is in the array; XLA's order, and another."""
    row = "ld.global.u32 %r6, [%rd2];\n mad.lo.s32 %r7, %r6, 128, %r1;\n mul.wide.u32 %rd7, %r7, 4;\n"
    adds = "add.s64 %rd8, %rd2, %rd7;\n red.global.add.f32 [%rd8], %f1;\n"
    swaps = "add.s64 %rd8, %rd2, %rd7;\n$L_a: atom.global.cas.b32 %r9, [%rd8], %r1, %r5;\n setp.ne.s32 %p3, %r9, %r1;\n"
    for code in (
        f"{row} {swaps} @%p3 bra $L_a;",  # a swap is successful at once
        f"{row} setp.lt.u32 %p2, %r6, 4096;\n @!%p2 bra $L_end;\n {adds}$L_end:",
        f"{row} setp.ge.s32 %p2, %r6, 1;\n @%p2 bra $L_add;\n bra $L_end;\n$L_add: {adds}$L_end:",
    ):
        kernel = kernel_of(code)
        followed = follow(kernel, (THREADS, 1, 1), (6, 1, 1))
        added = followed.accesses[next(i for i, op in enumerate(kernel.ops) if op.kind in ("red", "atom"))]
        assert (added.threads, added.sectors, added.is_indexed) == (THREADS, THREADS * 4 // 32, False)


def test_atomics_have_kinds():
    ends = {
        "red.global.add.f32 [%rd2], %f1;": ("reduction",),
        "atom.global.add.u32 %r9, [%rd2], %r1;": ("atomic with result",),
        "$L_a: atom.global.cas.b32 %r9, [%rd2], %r1, %r5;\n setp.ne.s32 %p3, %r9, %r1;\n @%p3 bra $L_a;": (SWAPS,),
        "atom.shared.add.u32 %r9, [%rd2], %r1;": (),
    }
    assert {end: atomics_of(kernel_of(end)) for end in ends} == ends


LISTING = """
	.section	.text.example,"ax",@progbits
.text.example:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0020*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.64 R6, desc[UR4][R2.64+0x200] ;
        /*0040*/                   MUFU.EX2 R5, R5 ;
        /*0050*/              @!P0 BRA `(.L_x_0) ;
        /*0060*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0070*/                   EXIT ;
.L_x_1:
        /*0080*/                   BRA `(.L_x_1);
"""


def test_loops_of_machine_code_are_counted_by_their_bytes():
    """A thread loads 16 bytes, 12 in each of 5 turns, and stores 2."""
    code = sass.parse(LISTING)["example"]
    assert code.loops == [(2, 5)]  # not the branch to itself at the end
    assert code.times(16 + 5 * 12 + 2) == 5
    counts = code.counts(5)
    assert (counts["LDG"], counts["MUFU"], counts["STG"]) == (1 + 5 * 2, 5, 1)


BRANCHES = """
.text.example:
        /*0000*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_0) ;
        /*0020*/                   LDG.E.64 R6, desc[UR4][R2.64] ;
        /*0030*/                   MUFU.EX2 R5, R6 ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0050*/                   LDG.E.64 R6, desc[UR4][R2.64+0x200] ;
        /*0060*/                   FADD R5, R6, R7 ;
.L_x_1:
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/              @P2  LDG.E.64 R6, desc[UR4][R2.64+0x400] ;
        /*0090*/                   FMUL R5, R6, R7 ;
.L_x_2:
        /*00a0*/                   STG.E desc[UR4][R2.64], R5 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
"""


def test_of_a_branch_the_side_is_counted_that_threads_take():
    """A quarter takes the first side. Of what is behind a predicate, or of merged accesses, nothing is known."""
    code = sass.parse(BRANCHES)["example"]
    assert code.branches == [(2, 4), (5, 6), (8, 9)] and not code.loops
    accesses = [(4, 1.0), (8, 0.25), (8, 0.75), (8, 0.1), (4, 1.0)]
    shares = code.shares(accesses)
    counts = code.counts(1, shares)
    assert (counts["MUFU"], counts["FADD"], counts["FMUL"], counts["STG"]) == (0.25, 0.75, 1, 1)
    assert code.shares(accesses[1:]) is None and code.counts(1)["MUFU"] == code.counts(1)["FADD"] == 1


def test_occupancy_is_that_of_nvidias_calculator():
    """Threads, registers and bytes of shared memory of a block on H100, as the CUDA occupancy calculator says."""
    published = {
        (128, 32, 0): 1.0,
        (256, 64, 0): 0.5,
        (128, 255, 0): 0.125,
        (1024, 64, 0): 0.5,
        (128, 32, 100_000): 0.125,
    }
    assert {case: occupancy(H100, *case) for case in published} == published


def test_the_innermost_line_of_mtjax_is_named():
    text = (
        'HloModule m\n\nFileNames\n1 "/x/mtjax/models/ops.py"\n2 "/x/mtjax/sharding/axes.py"\n'
        '3 "/x/jax/numpy.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n1 {file_name_id=1 function_name_id=1 line=7}\n'
        "2 {file_name_id=2 function_name_id=1 line=8}\n3 {file_name_id=3 function_name_id=1 line=9}\n\nStackFrames\n"
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=3 parent_frame_id=3}\n\nENTRY main {\n}\n"
    )
    assert SourceLines.of(text).line_of("metadata={stack_frame_id=3}") == "models/ops.py:7"
    assert SourceLines.of("HloModule m\n\nENTRY main {\n}\n").line_of("metadata={stack_frame_id=3}") == ""


def test_what_cannot_be_read_is_refused():
    with pytest.raises(UserError, match="--kernels needs a GPU program, and --target is cpu"):
        check_kernels(find_target("cpu"))
    with pytest.raises(UserError, match=r"knows the instruction rates of compute capability 8\.0, 9\.0, 10\.0"):
        rates_of((7, 0))


def test_kernels_are_read_unless_they_are_many_or_programs_are_compared(tmp_path, monkeypatch, cpu_report):
    monkeypatch.setattr(audit, "find_tool", lambda name: name)
    target = find_target("h100x8")
    for i in range(audit.MOST_READ):
        (tmp_path / f"{i}.ptx").touch()
    assert audit.why_unread(target) is None and audit.why_unread(target, tmp_path) is None
    (tmp_path / "more.ptx").touch()
    reason = audit.why_unread(target, tmp_path)
    assert reason and "of 251 kernels" in reason and "--kernels reads it" in reason
    assert reason in text_of(replace(cpu_report, unread=reason)) and reason in page(replace(cpu_report, unread=reason))

    def reads(**values) -> bool | None:
        return InspectJob.of(Options(target="h100x8", **values), Console(), lambda run: (run, None)).kernels

    assert [reads(), reads(kernels=True), reads(kernels=False)] == [None, True, False]
    assert [reads(vs=("1x8",)), reads(sweep=8), reads(time_on="v100x16")] == [False] * 3
    monkeypatch.setattr(audit, "find_tool", missing)
    assert audit.why_unread(target) == "--kernels needs CUDA's ptxas"


def missing(name: str) -> NoReturn:
    raise UserError(f"--kernels needs CUDA's {name}")


def text_of(report: Report) -> str:
    console = Console(file=StringIO(), width=180)
    text.show(report, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@needs_aot
def test_instructions_are_those_of_the_source_however_ptxas_unrolls(tmp_path):
    """One load, one exponential and one addition for each number; seconds by the published rates."""
    path = tmp_path / "a.ptx"
    path.write_text(HEAD + KERNEL.format(end=STORES["next to each other"][0]))
    assembled = assemble([path], "sm_90a", tmp_path)["example"]
    found = machine_of(
        ptx.parse(path.read_text())["example"], assembled, KernelLaunch((264, 1, 1), (THREADS, 1, 1), 0), H100
    )
    assert (found.counts[SPECIAL], found.counts["memory"], found.counts["FMA"]) == (TURNS, TURNS + 1, TURNS)
    # 2 blocks for each of 132 multiprocessors, in which 16 threads compute an exponential per clock of 1.98 GHz.
    assert found.seconds[SPECIAL] == pytest.approx(2 * THREADS * TURNS / 16 / 1.98e9)
    assert found.coalesced == 1 and found.spilled == 0 and found.registers == assembled.registers > 0


SIDES = """
	mov.u32 	%r6, %ctaid.x;
	setp.lt.u32 	%p2, %r6, 88;
	@%p2 bra 	$L_first;
	ld.global.nc.f32 	%f4, [%rd2+4096];
	{more}
	add.f32 	%f1, %f1, %f4;
	bra.uni 	$L_end;
$L_first:
	ld.global.nc.f32 	%f5, [%rd2+8192];
	{other}
	add.f32 	%f1, %f1, %f5;
$L_end:
	mul.wide.u32 %rd7, %r1, 4;
	add.s64 %rd8, %rd2, %rd7;
	st.global.f32 [%rd8], %f1;
"""
"""The first 88 blocks take one side, others the other."""


@needs_aot
def test_blocks_that_take_different_sides_of_a_branch_are_averaged(tmp_path):
    """As of arrays that are written side by side: of 264 blocks a third computes 80 exponentials, the others 40."""
    kernel = KERNEL.replace("ex2.approx.ftz.f32 	%f3, %f2;", "mov.f32 	%f3, %f2;")
    kernel = kernel.replace("@%p1 bra 	$L__BB0_1;", "")
    # So many that ptxas makes a branch, not predicated instructions, which all threads would issue.
    forty, eighty = (f"ex2.approx.ftz.f32 %f{i}, %f{i};\n" * n for i, n in ((4, 40), (5, 80)))
    path = tmp_path / "a.ptx"
    path.write_text(HEAD + kernel.format(end=SIDES.format(more=forty, other=eighty)))
    code = ptx.parse(path.read_text())["example"]
    assembled = assemble([path], "sm_90a", tmp_path)["example"]
    found = machine_of(code, assembled, KernelLaunch((264, 1, 1), (THREADS, 1, 1), 0), H100)
    # Of the eight blocks that are followed, three are among the first 88.
    assert found.counts[SPECIAL] == pytest.approx((5 * 40 + 3 * 80) / 8)
    alone = machine_of(code, assembled, KernelLaunch((88, 1, 1), (THREADS, 1, 1), 0), H100)
    assert alone.counts[SPECIAL] == 80


def u32_arrays(report: Report, least: int) -> list[str]:
    """Operations that write integers of so many elements."""
    computations = report.step.module.computations.values()
    fused = {name for c in computations for i in c.instructions if i.opcode == "fusion" for name in i.called}
    written = (i for c in computations if c.name not in fused for i in c.instructions if i.opcode == "fusion")
    return [i.name for i in written for a in i.arrays if a.dtype == "u32" and a.elements >= least]


@needs_aot
def test_kernels_of_a_step_are_matched():
    """Without being asked for. Each has its phase and registers; dropout's bits are in none of the arrays that they
    write."""
    run = tiny(mesh="1x1", num_layers=3, hidden_size=256, hidden_dropout=0.1, recompute="none", attention="xla")
    report = inspect(run, find_target("h100x8"), kernels=None)
    assert report.time and report.time.kernels and report.unread is None
    kernels = report.time.kernels
    assert report.time.seconds == kernels.step >= kernels.without
    assert len(kernels.rows) > 50 and all(row.phase and row.machine.registers for row in kernels.rows)
    assert u32_arrays(report, 2 * 64 * 256) == []
    document = json.loads(json.dumps(to_json(report)))["time"]["kernels"]
    assert {row["name"] for row in document["kernels"]} == {row.machine.name for row in kernels.rows}
    assert document["jax"] == jax.__version__


@needs_aot
def test_four_neighbours_draw_their_dropout_from_twenty_rounds(tmp_path):
    """136 instructions for four elements that are dropped and added, where a counter for each takes 344."""

    def drop(x, residual, keys):
        return residual + dropout(x, 0.1, keys, 3, NAMES)

    mesh = find_target("h100x8").mesh(parse_mesh("1x1"))
    with jax.set_mesh(mesh), use_rules(TENSOR.rules):
        x = jax.ShapeDtypeStruct((8, 1024, 1536), jnp.bfloat16)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
        jax.jit(drop).lower(x, x, keys).compile(compiler_options={DUMP_TO: str(tmp_path), **WITH_KERNELS})
    dumped = read(tmp_path, "jit_drop")
    assembled = assemble(dumped.files, "sm_90a", tmp_path)
    large = [name for name, launch in dumped.launches.items() if launch.blocks * launch.block_threads > 2**16]
    assert len(large) == 1  # no kernel writes indices, masks or bits
    found = machine_of(dumped.ptx[large[0]], assembled[large[0]], dumped.launches[large[0]], H100)
    assert found.launch.blocks * found.launch.block_threads * 4 == 8 * 1024 * 1536
    assert found.counts[ISSUE] < 172 and found.counts[ALU] < 100


@needs_aot
@pytest.mark.skipif(not has_cudnn, reason="needs the extra aot-cudnn, as the presets do")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "target"), [("gpt2-355m", "h100x8"), ("bert-base", "a100x8")])
def test_presets_have_no_faults_without_a_reason(preset, target):
    """Those with dropout and written-out scores; benchmarks/kernels.py compiles all."""
    benchmark, found = audits(), inspect(load(preset), find_target(target), kernels=True).time
    assert found and found.kernels and benchmark.unexpected(benchmark.row_of(found.kernels)) == []


def test_audits_on_record_have_no_faults_without_a_reason():
    rows = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())["rows"]
    assert {name: found for name, row in rows.items() if (found := audits().unexpected(row))} == {}
    (row,) = (row for name, row in rows.items() if name == "gpt2-8.3b on h100x8")
    spilled = [
        kernel | {"source": "models/language_model.py:1"} for kernel in row["faults"] if "spills" in kernel["faults"]
    ]
    assert len(audits().unexpected({"faults": spilled})) == len(spilled) > 0


def test_every_preset_is_on_record_for_every_target():
    rows = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())["rows"]
    benchmark = audits()
    wanted = {f"{preset} on {target}" for preset in benchmark.PRESETS for target in benchmark.TARGETS}
    assert sorted(wanted - set(rows)) == []
    assert {name.split(" on ")[0].split(",")[0] for name in rows} <= set(benchmark.PRESETS)


def audits() -> ModuleType:
    """The benchmark, which is a script."""
    spec = importlib.util.spec_from_file_location("kernels_of_presets", BENCHMARKS / "kernels.py")
    assert spec and spec.loader
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    return benchmark
