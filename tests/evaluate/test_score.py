"""Log-probabilities and first choices on meshes, beside a softmax in float64 of the model's own logits."""

import jax
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.evaluate.rows import ScoredRow
from mtjax.evaluate.score import Scorer
from mtjax.sharding.axes import use_rules
from tests.tiny import VOCAB, final_hidden, initial_state, model_logits, program_of

RANDOM = np.random.default_rng(0)
ROWS = [
    ScoredRow(RANDOM.integers(0, VOCAB, n).astype(np.int32), first) for n, first in ((17, 1), (9, 3), (2, 1), (17, 12))
]
FIELDS = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def log_softmax(rows: list[ScoredRow]) -> np.ndarray:
    """[rows, 16, vocabulary], float64, of one device's logits."""
    program = program_of("1x1", **FIELDS)
    tokens = np.zeros((8, 16), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens) - 1] = row.tokens[:-1]

    def logits(parameters, tokens):
        with use_rules(program.layout.rules):
            model = program.model(parameters)
            return model_logits(model, final_hidden(model, tokens))

    placed = jax.device_put(tokens, program.batch_sharding)
    parameters = initial_state(program).parameters
    found = np.asarray(program.on_mesh(jax.jit(logits), parameters, placed), np.float64)[..., :VOCAB]
    highest = found.max(-1, keepdims=True)
    return found - highest - np.log(np.exp(found - highest).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("2x4", {"sequence_parallel": True, "zero": 3}),
        pytest.param("1x2x2", {"microbatch_size": 2}, marks=pytest.mark.long),
        ("data=1,context=2,model=2", {"sequence_parallel": True}),
        pytest.param("data=1,stage=2,context=2,model=1", {"microbatch_size": 2}, marks=pytest.mark.long),
    ],
)
def test_scores_are_those_of_a_softmax(mesh: str, fields) -> None:
    """Half of the rows ask for what the model likes best."""
    expected = log_softmax(ROWS)
    rows = list(ROWS)
    for i in (0, 2):  # the last token becomes the model's own choice
        tokens = rows[i].tokens.copy()
        tokens[-1] = expected[i, len(tokens) - 2].argmax()
        rows[i] = ScoredRow(tokens, len(tokens) - 1)
    program = program_of(mesh, **FIELDS, **fields)
    scores = Scorer(program).score(initial_state(program).parameters, rows)
    for i, row in enumerate(rows):
        place = np.arange(row.first - 1, len(row.tokens) - 1)
        wanted = expected[i, place, row.tokens[row.first :]]
        assert abs(scores.log_probability[i] - wanted.sum()) < 2e-6 * len(place)
        assert scores.all_best[i] == (expected[i, place].argmax(-1) == row.tokens[row.first :]).all()
    assert scores.all_best.tolist() == [True, False, True, False]


def test_rows_go_in_few_shapes() -> None:
    scorer = Scorer(program_of("1x1", sequence_length=200, **FIELDS))
    assert scorer.lengths == [64, 128, 200]
    sizes = [201, 65, 66, 2, 129, 130] + [50] * 9
    rows = [ScoredRow(np.zeros(n, np.int32), 1) for n in sizes]
    batches = scorer.batches(rows)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert [max(sizes[i] for i in batch) for batch in batches] == [65, 50, 129, 201]
    assert max(map(len, batches)) == 8


def test_rows_that_ranks_can_not_share_are_refused() -> None:
    with pytest.raises(
        UserError, match="--sequence-length 12 must be a multiple of 8 on the mesh data=2,context=4,model=1"
    ):
        Scorer(program_of("data=2,context=4,model=1", **FIELDS), 12)


def test_another_family_is_refused() -> None:
    with pytest.raises(UserError, match="bert does not predict the next token"):
        Scorer(program_of("1x1", family="bert", **FIELDS))
