import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mtjax.errors import UserError
from mtjax.theory.divisibility import check_config, check_ramp, num_microbatches
from mtjax.theory.mesh import MeshShape, parse_mesh
from mtjax.theory.plans import Plan
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("fields", "mesh", "numbers"),
    [
        ({"num_heads": 8}, parse_mesh("1x3"), "num_heads 8 .* 3 model ways .* take model ways that divide 8: 2 and 4"),
        (
            {"num_heads": 8, "hidden_size": 48},
            parse_mesh("1x3"),
            "num_heads 8 .* 3 .* 6 or 12 heads, .*: 2 and 4",
        ),
        ({"mlp_size": 100}, parse_mesh("1x8"), "mlp_size 100 .* 8 model ways .* 96 and 104"),
        ({"num_heads": 6, "hidden_size": 36, "mlp_size": 36}, parse_mesh("1x3"), "vocabulary 256 .* 255 and 258"),
        ({"global_batch_size": 6}, parse_mesh("4x1"), "global_batch_size 6 .* 4 data ways .* 4 and 8"),
        ({"num_heads": 12, "hidden_size": 48, "num_kv_heads": 6}, parse_mesh("1x4"), "num_kv_heads 6 .* 4 model ways"),
        ({"microbatch_size": 3}, parse_mesh("2x1"), "global_batch_size 8 .* microbatch_size 3 x 2 .* 6; .* 6 and 12"),
    ],
)
def test_what_does_not_divide_is_named_with_the_nearest_that_fit(fields, mesh, numbers):
    with pytest.raises(UserError, match=numbers):
        check_config(tiny_config(**fields), mesh)


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
        assert f"global_batch_size {batch}" in text and f"{ways} data ways" in text
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
    with pytest.raises(UserError, match=f"rampup_batch_size {start} {increment} 100 passes .* = {micro * ways}; take"):
        check_ramp(tiny_config(**ramp), sizes, MeshShape(data=ways))
