"""Rows that go to some ranks, beside numpy; the ragged all-to-all by what jax's documentation says of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.sharding.experts import ragged_all_to_all as exchange
from mtjax.sharding.experts.ragged_all_to_all import RaggedRouting
from tests.tiny import mesh_of

RANKS, ROWS, WIDTH, MOST = 4, 6, 3, 2
AXIS = ("data",)


def as_documented(x: Any, output: Any, starts: Any, sizes: Any, there: Any, received: Any, axis_name: Any) -> Any:
    """`lax.ragged_all_to_all`, of whose work XLA for CPUs can do nothing: from every rank, rows `starts` to `starts` +
    `sizes` of its x for this one, to `there` in this one's output, as many as this one says it receives."""
    x, starts, sizes, there = (lax.all_gather(a, axis_name) for a in (x, starts, sizes, there))
    me = lax.axis_index(axis_name)
    number, ranks = jnp.arange(x.shape[1]), jnp.arange(RANKS)[:, None]
    is_sent = (number < sizes[:, me, None]) & (number < received[:, None])
    places = jnp.where(is_sent, there[:, me, None] + number, len(output))
    return output.at[places].set(x[ranks, starts[:, me, None] + number], mode="drop")


@pytest.mark.parametrize("is_ragged", [False, True], ids=["padded", "ragged"])
def test_rows_arrive_by_ranks_and_come_home_added_up(is_ragged, monkeypatch):
    """Each row goes to at most two ranks, some to none; one rank gets none, one more than it has sent."""
    if is_ragged:
        monkeypatch.setattr(exchange, "_has_ragged", lambda: True)
        monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)
    random = np.random.default_rng(0)
    to = random.choice([0, 1, 3], (RANKS, ROWS, MOST))
    goes = (to[..., None] == np.arange(RANKS)).any(2)
    goes[1, 2:4] = False
    x = random.normal(size=(RANKS, ROWS, WIDTH)).astype(np.float32)
    scale = random.normal(size=(RANKS, RANKS * ROWS, 1)).astype(np.float32)

    @partial(jax.shard_map, in_specs=(P("data"), P("data")), out_specs=(P("data"), P("data")), axis_names={"data"})
    def run(x: Any, scale: Any) -> Any:
        trip = RaggedRouting.of(jnp.asarray(goes), MOST, AXIS)
        arrived = trip.dispatch(x[0])
        return arrived[None], trip.combine(arrived * scale[0])[None]

    mesh = mesh_of("data=4,model=1")
    with jax.set_mesh(mesh):
        own, by = jax.device_put((x, scale), NamedSharding(mesh, P("data")))
        arrived, home = jax.jit(run)(own, by)
        gradient = jax.jit(jax.grad(lambda x: (run(x, by)[1] ** 2).sum()))(own)
    known = np.zeros((RANKS, RANKS * ROWS, WIDTH), np.float32)
    factor = np.zeros((RANKS, ROWS, 1), np.float32)
    for rank in range(RANKS):
        places = np.argwhere(goes[:, :, rank])
        for number, (source, row) in enumerate(places):
            known[rank, number] = x[source, row]
            factor[source, row] += scale[rank, number]
    assert not known[2].any() and len(np.argwhere(goes[:, :, 1])) > ROWS
    np.testing.assert_array_equal(arrived, known)
    np.testing.assert_allclose(home, factor * x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, 2 * factor**2 * x, rtol=1e-5, atol=1e-6)
