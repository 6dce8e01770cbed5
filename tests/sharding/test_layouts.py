import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mtjax.errors import UserError
from mtjax.sharding.layouts import check_divisible, layout_of, num_microbatches
from mtjax.sharding.mesh import MeshShape
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("fields", "mesh", "numbers"),
    [
        ({"num_heads": 8}, MeshShape(1, 3), "num_heads 8 .* 3 model ways .* take model ways that divide 8: 2 and 4"),
        ({"num_heads": 8, "hidden_size": 48}, MeshShape(1, 3), "num_heads 8 .* 3 model .* 6 or 12 heads, .*: 2 and 4"),
        ({"mlp_size": 100}, MeshShape(1, 8), "mlp_size 100 .* 8 model ways .* 96 and 104"),
        ({"num_heads": 6, "hidden_size": 36, "mlp_size": 36}, MeshShape(1, 3), "vocabulary 256 .* 255 and 258"),
        ({"global_batch_size": 6}, MeshShape(4, 1), "global_batch_size 6 .* 4 data ways .* 4 and 8"),
        ({"num_heads": 12, "hidden_size": 48, "num_kv_heads": 6}, MeshShape(1, 4), "num_kv_heads 6 .* 4 model ways"),
        ({"microbatch_size": 3}, MeshShape(2, 1), "global_batch_size 8 .* microbatch_size 3 x 2 .* 6; .* 6 and 12"),
    ],
)
def test_what_does_not_divide_is_named_with_the_nearest_that_fit(fields, mesh, numbers):
    with pytest.raises(UserError, match=numbers):
        check_divisible(tiny_config(**fields), mesh)


@given(st.integers(1, 512), st.integers(1, 16), st.none() | st.integers(1, 16))
def test_nearest_batch_that_is_offered_fits(batch, data, micro):
    mesh = MeshShape(data, 1)
    config = tiny_config(global_batch_size=batch, microbatch_size=micro)
    try:
        check_divisible(config, mesh)
    except UserError as e:
        offered = [int(n) for n in re.findall(r"\d+", str(e).rpartition("nearest")[2])]
        assert offered
        for size in offered:
            check_divisible(tiny_config(global_batch_size=size, microbatch_size=micro), mesh)
    else:
        assume(batch % data == 0)
        count = num_microbatches(config, mesh)
        assert count * (micro or batch // data) * data == batch


def test_unknown_vocabulary_is_left_to_the_tokenizer():
    check_divisible(tiny_config(vocab_size=None), MeshShape(2, 4))


@pytest.mark.parametrize(("heads", "ways", "axis"), [(2, 4, None), (1, 8, None), (4, 4, "model"), (8, 2, "model")])
def test_key_and_value_heads_are_whole_where_there_are_fewer_than_ways(heads, ways, axis):
    config, mesh = tiny_config(num_kv_heads=heads), MeshShape(1, ways)
    check_divisible(config, mesh)
    assert layout_of(config, mesh).rules.kv_heads == axis
