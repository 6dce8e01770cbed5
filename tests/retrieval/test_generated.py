"""Texts of a Retro with neighbours that are given: token by token what one pass over the whole text predicts."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.families.retro.config import num_chunks
from mtjax.generate.completion import Completion
from mtjax.generate.neighbours import NeighbourWriter, Reading
from mtjax.generate.request import Sampling
from mtjax.generate.weights import LoadedModel
from mtjax.models.language_model import run_sections
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import use_rules
from tests.data.corpora import write_bert_vocab
from tests.tiny import drawn_parameters, mesh_of, model_logits, tiny_config

CHUNK, LENGTH = 8, 32
SETTINGS = {
    "family": "retro",
    "num_layers": 3,
    "retro_chunk": CHUNK,
    "retro_first": 2,
    "retro_every": 1,
    "retro_encoder_layers": 1,
    "sequence_length": LENGTH,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "retro_encoder_dropout": 0.0,
    "vocab_size": 71,
    "vocab_multiple": 128,
    "init_std": 0.3,
}
PROMPT = "the river and one stone under a green house never walks over"
TEXTS = ["two light walks never over a river", "stone stone under under the house " * 9]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(f"bert:{write_bert_vocab(tmp_path_factory.mktemp('vocab') / 'vocab.txt')}")


@pytest.fixture(scope="module")
def parameters():
    """Of one device; the norms' scales and biases are not those of the beginning."""
    drawn = drawn_parameters(ShardedModel(tiny_config(**SETTINGS), mesh_of("1x1")))
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda a: np.asarray(a) + 0.1 * draw.standard_normal(a.shape).astype(np.float32), drawn)


def writer_of(tokenizer, parameters, mesh: str) -> NeighbourWriter:
    placed = ShardedModel(tiny_config(**SETTINGS), mesh_of(mesh))
    own = jax.tree.map(jax.device_put, parameters, placed.parameter_sharding)
    return NeighbourWriter(LoadedModel(placed, own, tokenizer, frozenset(), Path(), "bert", "", []))


@pytest.fixture(scope="module")
def writer(tokenizer, parameters) -> NeighbourWriter:
    return writer_of(tokenizer, parameters, "1x1")


def written(
    writer: NeighbourWriter, tokenizer, line: dict, **sampling
) -> tuple[list[int], list[int], np.ndarray | None]:
    """The prompt's tokens, those of the text, and the neighbours."""
    reading = writer.read(tokenizer.encode(PROMPT), line)
    completion = Completion(tokenizer, tuple(reading.ids), Sampling(**sampling), logprobs=True)
    writer.complete(completion, reading)
    assert completion.ended == "length"
    return reading.ids, ids_of(completion), reading.neighbours


def ids_of(completion: Completion) -> list[int]:
    return [piece.token.id for piece in completion.pieces if piece.token is not None]


@pytest.mark.parametrize(
    ("line", "mesh"),
    [
        pytest.param({"neighbours": [TEXTS, [], TEXTS[:1]]}, "1x1", marks=pytest.mark.long),
        ({"passages": TEXTS}, "1x1"),
        pytest.param({"passages": TEXTS}, "2x4", marks=pytest.mark.long),
        ({}, "1x1"),
    ],
)
def test_a_text_is_what_one_pass_over_it_predicts(writer, tokenizer, parameters, line: dict, mesh: str) -> None:
    writes = writer if mesh == "1x1" else writer_of(tokenizer, parameters, mesh)
    ids, found, neighbours = written(writes, tokenizer, line, max_tokens=40)
    assert len(ids) + len(found) == LENGTH  # up to the end of the context
    placed, batch = writer._sharded_model, {"tokens": np.array([[*ids, *found]], np.int32)}
    batch |= {} if neighbours is None else {"neighbours": neighbours[None]}

    def logits(parameters, batch):
        with use_rules(placed.layout.rules.with_replicated_activations):
            model = placed.inference_model(parameters)
            return model_logits(model, model.final_hidden(run_sections(model, batch, None)[0].x))

    wanted = np.asarray(placed.on_mesh(jax.jit(logits), writer._model.parameters, batch))[0, :, :71]
    assert found == wanted[len(ids) - 1 : -1].argmax(-1).tolist()
    assert len({*found}) > 2


def test_neighbours_are_in_the_chunks_for_which_they_are_given(writer, tokenizer) -> None:
    eod = tokenizer.eod
    rows = [tokenizer.encode(text)[: 2 * CHUNK] for text in TEXTS]
    rows = [row + [eod] * (2 * CHUNK - len(row)) for row in rows]
    none = [eod] * (2 * CHUNK)
    prompt = tokenizer.encode(PROMPT)
    assert len(prompt) == 12
    read = writer.read(prompt, {"neighbours": [[], TEXTS]})
    assert read.neighbours is not None and read.ids == prompt
    assert read.neighbours.tolist() == [[none, none], rows, [none, none], [none, none]]
    # The answer begins with a chunk, and all of it reads the passages.
    read = writer.read(prompt, {"passages": TEXTS[:1]})
    assert read.neighbours is not None and read.ids == [eod] * 4 + prompt
    assert read.neighbours.tolist() == [[none, none], *[[rows[0], none]] * 3]
    texts = [written(writer, tokenizer, {"passages": texts}, max_tokens=9)[1] for texts in (TEXTS, TEXTS[1:], [])]
    assert len({tuple(text) for text in texts}) == 3
    sampled = [written(writer, tokenizer, {"passages": TEXTS}, temperature=2.0, seed=seed)[1] for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]
    penalised = written(writer, tokenizer, {"passages": TEXTS}, presence_penalty=100.0)[1]
    assert len(set(penalised)) == len(penalised)


class Found:
    """A retriever whose neighbours follow from the tokens of a chunk."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def find(self, chunks: list[np.ndarray], without: list[frozenset[int]]) -> tuple[np.ndarray, np.ndarray]:
        self.asked += [chunk.tolist() for chunk in chunks]
        numbers = np.array([[int(chunk.sum()) % 71, -1] for chunk in chunks])
        return numbers, np.where(numbers < 0, np.inf, 0.5)

    def tokens(self, numbers: np.ndarray) -> np.ndarray:
        return np.where(numbers[..., None] < 0, 3, (numbers[..., None] + np.arange(2 * CHUNK)) % 71).astype(np.int32)

    def sources(self, numbers: np.ndarray, distances: np.ndarray) -> list[int]:
        return numbers[np.isfinite(distances)].tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_each_chunk_is_searched_when_it_is_complete(writer, tokenizer, parameters, rows: int) -> None:
    """What is found for a chunk is read from its last token on, as where it is given before; texts leave and join."""
    found: Any = Found()
    searching = NeighbourWriter(writer._model, rows, found)
    prompts = [tokenizer.encode(PROMPT)[begin:] for begin in (0, 3, 9)]  # of 12, 9 and 3 tokens
    texts = []
    for number, prompt in enumerate(prompts):
        reading = searching.read(prompt, {})
        texts.append((Completion(tokenizer, tuple(prompt), Sampling(max_tokens=[8, 40, 21][number])), reading))
    searching.run(texts)
    asked = []
    for completion, reading in texts:
        tokens = [*reading.ids, *ids_of(completion)]
        # The last token of a context and of a text is read by none.
        complete = [tokens[at : at + CHUNK] for at in range(0, len(tokens) - CHUNK, CHUNK)]
        assert reading.sources == [[sum(chunk) % 71] for chunk in complete]
        asked += complete
        rest = num_chunks(writer._config) - len(complete)
        read = [found.tokens(np.array([sum(chunk) % 71, -1])) for chunk in complete]
        read += [found.tokens(np.array([-1, -1]))] * rest
        given = Completion(tokenizer, completion.prompt, completion.sampling)
        writer.complete(given, Reading(reading.ids, np.stack(read)))
        assert ids_of(given) == ids_of(completion) and given.ended == "length"
        none = Completion(tokenizer, completion.prompt, completion.sampling)
        writer.complete(none, Reading(reading.ids, None))
        assert ids_of(none) != ids_of(completion)
    assert sorted(found.asked) == sorted(asked)


@pytest.mark.long
def test_texts_with_and_without_neighbours_are_written_together(writer, tokenizer) -> None:
    lines = [{"passages": TEXTS}, {}, {"neighbours": [TEXTS]}, {"passages": []}]
    sampling = [Sampling(max_tokens=5), Sampling(), Sampling(temperature=2.0, seed=3), Sampling(presence_penalty=2.0)]

    def started() -> list[tuple[Completion, Reading]]:
        pairs = zip([writer.read(tokenizer.encode(PROMPT), line) for line in lines], sampling, strict=True)
        return [(Completion(tokenizer, tuple(reading.ids), each, logprobs=True), reading) for reading, each in pairs]

    together, alone = started(), started()
    NeighbourWriter(writer._model, 3).run(together)
    writer.run(alone)
    for (ours, _), (theirs, _) in zip(together, alone, strict=True):
        assert ids_of(ours) == ids_of(theirs)
        first, second = ([p.token.logprob or 0.0 for p in each.pieces if p.token] for each in (ours, theirs))
        np.testing.assert_allclose(first, second, atol=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"passages": ["a"]}, "the line has passages, and --retrieve searches for neighbours: remove one of the two"),
        ({"without_documents": 3}, '"without_documents" is 3, and must be a list of documents:'),
        ({"without_documents": [True]}, 'and must be a list of documents: .3, "books:12".'),
    ],
)
def test_a_line_does_not_give_what_is_searched(writer, tokenizer, line: dict, message: str) -> None:
    found: Any = Found()
    with pytest.raises(UserError, match=message):
        NeighbourWriter(writer._model, 1, found).read(tokenizer.encode(PROMPT), line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"neighbours": ["one", "two"]},
            r'"neighbours" is .*, and must be a list of texts for each chunk of the prompt',
        ),
        ({"neighbours": [[]] * 5}, '"neighbours" has 5 chunks, and the model has 4: give at most as many'),
        ({"neighbours": [["a", "b", "c"]]}, "there are 3 texts for a chunk, and the model reads 2"),
        ({"passages": "one"}, '"passages" is one, and must be a list of texts'),
        ({"passages": [], "neighbours": []}, "the line has neighbours and passages: give one of them"),
        ({"passages": [], "prompt": " ".join(["river"] * 25)}, "the prompt has 32 tokens with those in front of it"),
        ({"without_documents": [1]}, "the line has without_documents, which are those of --retrieve: add that, or"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": "", "passages": ["a"]}, "the prompt has no tokens"),
    ],
)
def test_wrong_lines_are_one_sentence(writer, tokenizer, line: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        writer.read(tokenizer.encode(line.get("prompt", PROMPT)), line)
