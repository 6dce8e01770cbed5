"""The loop over blocks of experts' products: as many blocks as are compiled, and what they cost a step."""

import pytest

from mtjax import config
from mtjax.analysis import expert_blocks as analysis
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.copies import Copy
from mtjax.analysis.expert_blocks import block_copies, blocks_of, expert_blocks
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.timing import step_time
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.models.kernels import grouped


def test_blocks_have_the_rows_of_the_kernel():
    for count in (8, 128):
        rows = grouped.Blocks("swiglu", count).rows
        places = [count * n + more for n in (0, 1, 63, 64, 100, 1024, 8191, 8192, 70_000) for more in (0, 1, count - 1)]
        assert [blocks_of(n, count, 1).rows for n in places] == [rows(n) for n in places]


def test_a_rank_has_the_blocks_of_its_experts():
    """Of samples of 4,096 tokens. Each of Mixtral's 8 experts has 1,024 of a sample's pairs, each of Qwen3's 128 has
    4,096 of two samples of 8 ranks; with a capacity of 1,280 there are 8 x 1,280 slots, of which a block has an eighth
    of an expert's: 160, so 128, and the expert has 8 x 1,024 pairs of 8 ranks."""
    for name, mesh, changes, blocks in [
        ("mixtral-8x7b", "32x1", {"microbatch_size": 16}, (1024, 8 * 16)),
        ("mixtral-8x7b", "data=4,expert=8,model=1", {"microbatch_size": 4}, (1024, 8 * 4)),
        (
            "mixtral-8x7b",
            "data=4,expert=8,model=1",
            {"microbatch_size": 1, "capacity_factor": 1.25},
            (128, 8192 // 128),
        ),
        ("qwen3-30b-a3b", "data=4,expert=8,model=1", {"microbatch_size": 2}, (512, 16 * 4096 // 512)),
    ]:
        run = config.replace(config.load(name), mesh=mesh, **changes)
        assert expert_blocks(run.model, Plan.of(run, parse_mesh(mesh))) == blocks


def copies_of_mixtral(mesh: str) -> list[Copy]:
    run = config.replace(config.load("mixtral-8x7b"), mesh=mesh, microbatch_size=4)
    return block_copies(anatomy_of(run.model).stacks[0], run.model, Plan.of(run, parse_mesh(mesh)))


def test_a_rank_with_one_expert_slices_no_matrices():
    """Where it has several they are sliced twice a block, forward and backward."""
    matrices = 4096 * 2 * 14336 + 14336 * 4096
    one, several = copies_of_mixtral("data=1,expert=8,model=1"), copies_of_mixtral("8x1")
    sliced = sum(copy.total for copy in several if copy.size in (4 * 4096 * 2 * 14336, 4 * 14336 * 4096))
    blocks = expert_blocks(config.load("mixtral-8x7b").model, Plan(parse_mesh("8x1"), 32, 4, flash_attention=True))
    assert blocks == (512, 64)
    assert sliced == pytest.approx(2 * 4 * matrices * blocks.number)
    assert sum(copy.times for copy in one if not copy.size) == 7 * 32  # of 1,024 tokens each


def test_blocks_are_a_third_of_a_mixtral_step():
    """42.8 s and 35.3 s by the roofline of the compiled programs, 23.5 s and 24.0 s by products alone."""
    run = config.replace(config.load("mixtral-8x7b"), recompute="none", attention="cudnn")
    for mesh, changes, compiled in [
        ("32x1", {"microbatch_size": 16, "recompute": "full", "zero": 3}, 42.83),
        ("data=4,expert=8,model=1", {"microbatch_size": 4, "zero": 2, "expert_dispatch": "all-to-all"}, 35.34),
    ]:
        one = config.replace(run, mesh=mesh, **changes)
        plan = Plan.of(one, parse_mesh(mesh), flash_attention=True)
        time = step_time(anatomy_of(one.model), plan, DGX_H100)
        assert time.total == pytest.approx(compiled, rel=0.15)
        assert time.total - time.copies < 0.75 * compiled


def test_blocks_are_those_of_the_kernel() -> None:
    """The analysis imports no jax, and so has the kernel's constants a second time."""
    ours = (analysis.LONGEST, analysis.SHORTEST, analysis.BLOCKS_OF_AN_EXPERT)
    assert ours == (grouped.LONGEST, grouped.SHORTEST, grouped.BLOCKS_OF_AN_EXPERT)
