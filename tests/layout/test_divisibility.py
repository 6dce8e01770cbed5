import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config, check_ramp, num_microbatches
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.stages import balanced_layers
from tests.tiny import tiny_config

ONE, TWO, FOUR = (parse_mesh(text) for text in ("2x4", "1x2x1", "1x4x1"))
CHUNKS = {"pipeline_schedule": "interleaved", "chunks": 2}
STAGED = [
    (
        {"microbatch_size": None},
        TWO,
        "mesh data=1,stage=2,.* 2 stages, .* the 8 samples .* microbatch_size, for example 4, for 2 microbatches$",
    ),
    ({}, FOUR, "num_layers 2 leaves some of the 4 stages .*: use 2 stages or 4 layers"),
    (
        {"num_layers": 22},
        FOUR,
        "num_layers 22 .* 4 stages; .*: 20 and 24 layers, or 2 and 11 stages, or layers_per_stage 5,6,6,5",
    ),
    ({"num_layers": 7, **CHUNKS}, TWO, "num_layers 7 is not divisible by 2 stages x 2 chunks; .*: 4 and 8 layers$"),
    ({"num_layers": 22, **CHUNKS}, FOUR, "num_layers 22 .* 4 stages x 2 chunks; .* or layers_per_stage 6,6,6,4"),
    (
        {"num_layers": 22, "layers_per_stage": (5, 6, 5)},
        FOUR,
        "layers_per_stage 5,6,5 has 3 numbers, and mesh .* has 4 stages: use 5,6,6,5",
    ),
    (
        {"num_layers": 22, "layers_per_stage": (5, 6, 6, 6)},
        FOUR,
        "layers_per_stage 5,6,6,6 adds up to 23, and num_layers is 22: use 5,6,6,5",
    ),
    (
        {"num_layers": 4, "layers_per_stage": (4, 0)},
        TWO,
        "layers_per_stage 4,0 contains 0, and each .* at least 1: use 2,2",
    ),
    (
        {"num_layers": 22, "layers_per_stage": (5, 6, 6, 5), **CHUNKS},
        FOUR,
        "5,6,6,5 contains 5, and each number must be a multiple of chunks 2: use 6,6,6,4",
    ),
    (
        {"family": "t5", "num_layers": 4, "num_decoder_layers": 6, "layers_per_stage": (2, 2)},
        TWO,
        "layers_per_stage 2,2 applies to both .*, and num_layers 4 and num_decoder_layers 6 differ: make",
    ),
    (
        {"family": "t5", "num_layers": 4, "num_decoder_layers": 5},
        TWO,
        "num_decoder_layers 5 is not divisible by 2 stages; .* 4 and 6 layers",
    ),
    (
        {"num_layers": 12, "pipeline_schedule": "interleaved"},
        TWO,
        "pipeline_schedule interleaved needs several chunks .* chunks is 1: use 1f1b, or chunks 2",
    ),
    (
        {"chunks": 2},
        TWO,
        "chunks 2 needs pipeline_schedule interleaved, and pipeline_schedule is 1f1b: set chunks to 1",
    ),
    (
        {"chunks": 2},
        ONE,
        "chunks 2 needs pipeline parallelism, and mesh 2x4 has 1 stage: remove chunks, .* data=2,stage=2,model=4",
    ),
    ({"pipeline_schedule": "gpipe"}, ONE, "pipeline_schedule gpipe needs pipeline .* mesh 2x4 has 1"),
    ({"layers_per_stage": (1, 1, 1)}, ONE, "layers_per_stage 1,1,1 needs pipeline .* data=2,stage=3,model=4"),
    *(
        (
            {"recompute": "full", **fields},
            TWO,
            f"{name} does not support pipeline .* each of the 2 stages .*; remove it",
        )
        for name, fields in {
            "recompute_num_layers 2": {"recompute_num_layers": 2},
            "recompute_method block": {"recompute_method": "block"},
            "recompute_offload": {"recompute_offload": True},
        }.items()
    ),
]
"""Fields, mesh and message, of plans with pipeline parallelism."""

CONTEXT = [
    (
        {"sequence_length": 20},
        "data=1,context=4,model=1",
        "sequence_length 20 .* 2 chunks .* context parallel degree 4 .* 16 and 24$",
    ),
    (
        {"sequence_length": 24, "sequence_parallel": True},
        "data=1,context=4,model=4",
        "sequence_length 24 .* context x tensor parallel degree 16 .* 16 and 32$",
    ),
    (
        {"family": "hybrid", "layer_pattern": "G*", "num_layers": 2, "sequence_length": 8, "ssm_conv": 4},
        "data=1,context=2,model=1",
        "sequence_length 8 in 4 pieces, 2 for each of 2 context parallel ranks, is shorter than the 3 tokens before",
    ),
    (
        {"family": "t5"},
        "data=1,context=2,model=1",
        "context=2 .* gpt, llama, hybrid and bert, and family is t5: remove",
    ),
    ({"tensor_layout": "2d", "zero": 3}, "8x1", "2d needs tensor parallelism, and mesh 8x1 has model=1"),
    ({"tensor_layout": "2d", "zero": 1}, "2x4", "shards matrices in blocks, by --zero 3, and zero is 1: use --zero 3"),
    (
        {"tensor_layout": "2d", "zero": 3, "sequence_parallel": True},
        "2x4",
        "2d and sequence_parallel both shard the residual stream over model: remove one",
    ),
    (
        {"tensor_layout": "2d", "zero": 3, "norm_placement": "sandwich"},
        "2x4",
        r"2d does not support other places of norms \(norm_placement sandwich\): use 1d, with sequence_parallel",
    ),
    ({}, "data=2,shard=4,model=1", "shard=4 in mesh .* zero is 0: use --zero 1, 2 or 3, or data in place of shard"),
    (
        {"zero": 3, "global_batch_size": 12},
        "data=2,shard=4,model=1",
        "global_batch_size 12 .* data parallel degree 8",
    ),
    (
        {"head": "classification"},
        "data=1,context=2,model=1",
        "context=2 .* a loss per token, and head is classification: remove context",
    ),
    (
        {"context_method": "all-gather"},
        "2x4",
        "context_method all-gather needs .* mesh 2x4 has none: .* data=2,context=2,model=4",
    ),
    (
        {"num_layers": 5, "layers_per_stage": (2, 3), "microbatch_size": 1},
        "data=1,stage=2,context=2,model=1",
        "context_method is ring, in whose permutes all stages of mesh .* take part, .* use context_method all-gather",
    ),
    (
        {"family": "hybrid", "layer_pattern": "M*-M", "num_layers": 4, "microbatch_size": 1},
        "data=1,stage=2,context=2,model=1",
        "context_method is ring, .* some stages have fewer or other layers than others",
    ),
    (
        {"num_experts": 4, "first_dense_layers": 1, "num_layers": 5, "microbatch_size": 1},
        "data=1,stage=2,expert=2,model=1",
        "num_layers 5 is not divisible by 2 stages; .* layers_per_stage",
    ),
]
"""The same with context parallelism, sharding groups and experts."""


@pytest.mark.parametrize(
    ("fields", "mesh", "numbers"),
    [
        (
            {"num_heads": 8},
            parse_mesh("1x3"),
            "num_heads 8 .* tensor parallel degree 3 .* use a tensor parallel degree that divides 8: 2 and 4",
        ),
        (
            {"num_heads": 8, "hidden_size": 48},
            parse_mesh("1x3"),
            "num_heads 8 .* 3 .* 6 or 12 heads, .*: 2 and 4",
        ),
        ({"mlp_size": 100}, parse_mesh("1x8"), "mlp_size 100 .* tensor parallel degree 8 .* 96 and 104"),
        ({"num_heads": 6, "hidden_size": 36, "mlp_size": 36}, parse_mesh("1x3"), "vocabulary 256 .* 255 and 258"),
        ({"global_batch_size": 6}, parse_mesh("4x1"), "global_batch_size 6 .* data parallel degree 4; .* 4 and 8"),
        (
            {"num_heads": 12, "hidden_size": 48, "num_kv_heads": 6},
            parse_mesh("1x4"),
            "num_kv_heads 6 .* tensor parallel degree 4",
        ),
        ({"microbatch_size": 3}, parse_mesh("2x1"), "global_batch_size 8 .* microbatch_size 3 x .* 2 = 6; .* 6 and 12"),
        *(({"microbatch_size": 1} | fields, mesh, message) for fields, mesh, message in STAGED),
        *((fields, parse_mesh(mesh), message) for fields, mesh, message in CONTEXT),
    ],
)
def test_what_does_not_divide_is_named_with_the_nearest_that_fit(fields, mesh, numbers):
    with pytest.raises(UserError, match=numbers):
        check_config(tiny_config(**fields), mesh)


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        ({"num_layers": 22, "layers_per_stage": (5, 6, 6, 5)}, FOUR),
        ({"num_layers": 22, "layers_per_stage": (4, 6, 6, 6), **CHUNKS}, FOUR),
        ({"num_layers": 12, "pipeline_schedule": "interleaved", "chunks": 3, "microbatch_size": 8}, TWO),
        ({"global_batch_size": 5, **CHUNKS, "num_layers": 8}, FOUR),
        ({"pipeline_schedule": "gpipe", "microbatch_size": 8}, TWO),
        ({"family": "t5", "num_layers": 4, "num_decoder_layers": 6}, TWO),
        ({"recompute_num_layers": 2}, TWO),
    ],
)
def test_what_fits_on_stages(fields, mesh):
    check_config(tiny_config(**({"microbatch_size": 1} | fields)), mesh)


@given(layers=st.integers(1, 200), stages=st.integers(2, 16), chunks=st.integers(1, 4))
def test_layers_and_shares_that_are_offered_fit(layers, stages, chunks):
    def run(**fields):
        schedule = "interleaved" if chunks > 1 else "1f1b"
        return tiny_config(pipeline_schedule=schedule, chunks=chunks, microbatch_size=1, **fields)

    mesh = MeshShape(stage=stages)
    try:
        check_config(run(num_layers=layers), mesh)
    except UserError as e:
        more = re.search(r"(?:(\d+) and )?(\d+) layers", str(e))
        assert more and str(layers) in str(e) and str(stages) in str(e)
        for count in filter(None, more.groups()):
            if layers >= stages:
                check_config(run(num_layers=int(count)), mesh)
        for shares in re.findall(r"layers_per_stage ([\d,]+)", str(e)):
            check_config(run(num_layers=layers, layers_per_stage=tuple(map(int, shares.split(",")))), mesh)
    else:
        assert layers % (stages * chunks) == 0


@given(groups=st.integers(1, 64), stages=st.integers(1, 16), chunks=st.integers(1, 4))
def test_balanced_layers_add_up_and_leave_the_ends_the_smaller_shares(groups, stages, chunks):
    shares = balanced_layers(groups * chunks, stages, chunks)
    if groups < stages:
        assert shares is None
        return
    assert shares and sum(shares) == groups * chunks and all(n % chunks == 0 for n in shares)
    assert max(shares) - min(shares) in (0, chunks)
    larger = [stage for stage, n in enumerate(shares) if n > min(shares)]
    smaller = [stage for stage, n in enumerate(shares) if n == min(shares)]
    apart = [max((abs(2 * i - stages + 1) for i in of), default=0) for of in (larger, smaller)]
    assert not larger or apart[0] <= apart[1]


@given(st.integers(1, 512), st.integers(1, 16), st.none() | st.integers(1, 16))
def test_nearest_batch_that_is_offered_fits(batch, data, micro):
    mesh = MeshShape(data=data)
    config = tiny_config(global_batch_size=batch, microbatch_size=micro)
    try:
        check_config(config, mesh)
    except UserError as e:
        offered = [int(n) for n in re.findall(r"\d+", str(e).rpartition("nearest")[2])]
        assert offered
        for size in offered:
            check_config(tiny_config(global_batch_size=size, microbatch_size=micro), mesh)
    else:
        assume(batch % data == 0)
        count = num_microbatches(config, mesh)
        assert count * (micro or batch // data) * data == batch


def test_unknown_vocabulary_is_left_to_the_tokenizer():
    check_config(tiny_config(vocab_size=None), parse_mesh("2x4"))


@pytest.mark.parametrize(("heads", "ways", "axes"), [(2, 4, ()), (1, 8, ()), (4, 4, ("model",)), (8, 2, ("model",))])
def test_key_and_value_heads_are_replicated_where_there_are_fewer_than_ways(heads, ways, axes):
    config, mesh = tiny_config(num_kv_heads=heads), MeshShape(model=ways)
    check_config(config, mesh)
    assert Plan.of(config, mesh).layout(config.model).rules.kv_heads == axes


@given(batch=st.integers(1, 64), micro=st.one_of(st.none(), st.integers(1, 8)), ways=st.integers(1, 8))
def test_exactly_the_consistent_triples_are_accepted(batch, micro, ways):
    config, mesh = tiny_config(global_batch_size=batch, microbatch_size=micro), MeshShape(data=ways)
    if batch % ((micro or 1) * ways):
        with pytest.raises(UserError) as refused:
            check_config(config, mesh)
        text = str(refused.value)
        assert f"global_batch_size {batch}" in text and f"data parallel degree {ways}" in text
        nearest = [int(n) for n in re.findall(r"\d+", text.partition("nearest that")[2])]
        assert nearest and all(n % ((micro or 1) * ways) == 0 for n in nearest)
    else:
        check_config(config, mesh)
        assert num_microbatches(config, mesh) * (micro or batch // ways) * ways == batch


@given(start=st.integers(1, 8), increment=st.integers(1, 8), micro=st.integers(1, 3), ways=st.integers(1, 4))
def test_every_batch_of_a_ramp_is_whole_microbatches(start, increment, micro, ways):
    sizes = tuple(start + k * increment for k in range(4))
    ramp = {"rampup_batch_size": (start, increment, 100), "global_batch_size": sizes[-1], "microbatch_size": micro}
    fits = all(size % (micro * ways) == 0 for size in sizes)
    if fits:
        check_ramp(tiny_config(**ramp), sizes, MeshShape(data=ways))
        return
    with pytest.raises(UserError, match=f"rampup_batch_size {start} {increment} 100 passes .* = {micro * ways}; use"):
        check_ramp(tiny_config(**ramp), sizes, MeshShape(data=ways))
