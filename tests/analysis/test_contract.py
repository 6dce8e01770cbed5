"""Formulas of contracts, and contracts as sums of what parts send."""

from dataclasses import dataclass, replace

import pytest

from mtjax.analysis.communication import contract_of, symbols_of
from mtjax.analysis.contract import (
    EMBEDDING_FORWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    Expectation,
    evaluate,
    sum_expectations,
)
from mtjax.analysis.parts.part import Part, ResidualStream
from mtjax.errors import UserError
from mtjax.layout.rules import MODEL
from mtjax.layout.timetable import num_ticks
from tests.inspect.steps import required_of, theory_of, tiny

SYMBOLS = {"layers": 3, "microbatches": 2, "batch": 2, "sequence": 64, "hidden": 64, "ways": 4}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("2*layers*microbatches", 12),
        ("batch*sequence*hidden", 8192),
        ("(4*hidden*hidden + hidden)/ways", 4112),
        ("7-2", 5),
    ],
)
def test_formulas(formula, value):
    assert evaluate(formula, SYMBOLS) == value


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("2*heads", "uses 'heads'"),
        ("2*hiden", "uses 'hiden' - did you mean 'hidden'"),
        ("hidden/layers", "hidden / layers .* is not an integer"),
        ("hidden/(sequence-hidden)", "is not an integer"),
        ("hidden - 2*sequence", "is -64 for"),
        ("2*", "is not a formula"),
        ("__import__('os')", "is not a formula"),
        ("hidden**9", "is not a formula"),
        ("1.5*hidden", "is not a formula"),
    ],
)
def test_formulas_that_are_none(formula, message):
    with pytest.raises(UserError, match=message):
        evaluate(formula, SYMBOLS)


def line(count: str, elements: str, **settings) -> Expectation:
    return Expectation(LAYER_FORWARD, "all-reduce", MODEL, count, elements, **settings)


def test_equal_arrays_add_their_counts_and_pooled_ones_their_elements():
    exact = sum_expectations(
        [line("layers", "hidden", why="a"), line("1", "hidden", why="b"), line("layers", "hidden", why="a")]
    )
    assert exact == (line("2*layers + 1", "hidden", why="a; b"),)
    pooled = sum_expectations([line("1", "hidden", pooled=True), line("1", "2*hidden + 1", pooled=True)] * 2)
    assert pooled == (line("1", "2*hidden + 2*(2*hidden + 1)", pooled=True),)
    assert len(sum_expectations([line("1", "hidden"), line("1", "batch"), line("1", "hidden", pooled=True)])) == 3


@dataclass(frozen=True)
class Router(Part):
    """A part that no model has."""

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        return [line(f"{stream.side}layers", "7*hidden", why="a router")]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_the_contract_is_a_sum(family, split):
    """A part more adds its own lines, and changes no other."""
    anatomy, plan = theory_of(tiny(family=family, sequence_parallel=split))
    stacks = tuple(replace(stack, parts=(Router(), *stack.parts)) for stack in anatomy.stacks)
    before = set(contract_of(anatomy, plan).lines)
    after = set(contract_of(replace(anatomy, stacks=stacks), plan).lines)
    asked = {line(f"{stack.side}layers", "7*hidden", why="a router") for stack in stacks}
    assert after == before | {only_one(asked)}


def only_one(lines: set[Expectation]) -> Expectation:
    """Lines of equal arrays are one, whose counts add up."""
    (whole,) = sum_expectations(sorted(lines, key=lambda one: one.count, reverse=True))
    return whole


STAGED = {"num_layers": 8, "mesh": "data=2,stage=2,model=2", "microbatch_size": 1, "global_batch_size": 16}


@pytest.mark.parametrize(("settings", "idle"), [({}, 1), ({"pipeline_schedule": "interleaved", "chunks": 4}, 1)])
def test_on_stages_embedding_and_losses_send_once_a_microbatch(settings, idle):
    """Layers in every tick; the embedding also in ticks in which the first stage is idle forward."""
    run = tiny(**STAGED, **settings)
    required, chunks = required_of(run), run.parallel.chunks
    counts = {(r.line.phase, r.line.kind): r.count for r in required if r.line.axis == "model" and not r.line.pooled}
    microbatches, ticks = 8, 8 * chunks + idle
    assert counts[(EMBEDDING_FORWARD, "all-reduce")] == microbatches + idle
    assert counts[(LOSS_BACKWARD, "all-reduce")] == microbatches
    assert counts[(LOSS_FORWARD, "all-reduce")] == 3 * microbatches
    assert counts[(LAYER_BACKWARD, "all-reduce")] == 2 * (8 // 2 // chunks) * ticks


def test_a_tick_goes_through_one_section_of_t5():
    run = tiny(family="t5", num_decoder_layers=4, decoder_sequence_length=32, zero=3, **STAGED | {"num_layers": 4})
    anatomy, plan = theory_of(run)
    symbols = symbols_of(anatomy, plan)
    ticks = num_ticks(2, 8, 2)
    assert (symbols["encoder_ticks"], symbols["decoder_ticks"]) == (ticks - 8, 8)
    assert symbols["embedding_ticks"] == ticks - 8
    assert symbols["layer_matrices"] != symbols["decoder_layer_matrices"]
