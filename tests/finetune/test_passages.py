"""Rows of a Retro with passages: laid out as `mtjax generate` does, packed so that no row reads another's, trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.commands.finetune import main as finetune
from mtjax.commands.generate import main as generate
from mtjax.config import replace, to_dict, validate
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.chat_encoding import ChatEncoder, EncodedSample
from mtjax.finetune.chat_rows import Chat, chat_of, passages_of, read_chats
from mtjax.finetune.passages import PackedPassages, PassageEncoder, have_passages, pack_rows, reading
from mtjax.generate.neighbours import NeighbourWriter
from mtjax.generate.weights import LoadedModel
from mtjax.models.language_model import run_sections
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.past import Past
from mtjax.sharding.axes import use_rules
from mtjax.sharding.param_specs import dotted
from mtjax.train.changes import check_trained
from mtjax.train.observability.metrics import read_metrics
from mtjax.train.step import make_train_step
from tests.data.corpora import write_bert_vocab
from tests.finetune.test_chats import resumed_to_the_bit
from tests.retrieval.test_generated import CHUNK, SETTINGS
from tests.tiny import drawn_parameters, mesh_of, model_logits, tiny_config

pytestmark = pytest.mark.usefixtures("bare_end")
LENGTH = 48
MODEL: dict[str, Any] = {**SETTINGS, "sequence_length": LENGTH}
PASSAGES = ("two light walks never over a river", "stone stone under under the house " * 9)
CHAT = {"task": "chat", "reset_position_ids": True, "reset_attention_mask": True}
ROWS = [
    Chat(prompt="the river and one stone under", completion=" a green house never walks", passages=PASSAGES),
    Chat(prompt="never over light", completion=" two stone the river"),
    Chat(prompt="a house", completion=" walks over one light", passages=PASSAGES[:1]),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(f"bert:{write_bert_vocab(tmp_path_factory.mktemp('vocab') / 'vocab.txt')}")


@pytest.fixture(scope="module")
def placed() -> ShardedModel:
    return ShardedModel(tiny_config(**MODEL), mesh_of("1x1"))


def encoded(tokenizer, chats: list[Chat]) -> list[EncodedSample]:
    encoder = ChatEncoder(tokenizer, None, PassageEncoder(tokenizer, tiny_config(**MODEL).model))
    return [sample for chat in chats for sample in encoder.samples(chat)[0]]


def read_by_generation(placed, tokenizer, chat: Chat) -> tuple[list[int], np.ndarray | None]:
    """The prompt's tokens, and the neighbours of all chunks."""
    writer = NeighbourWriter(LoadedModel(placed, None, tokenizer, frozenset(), Path(), "bert", "", []))
    line = {} if chat.passages is None else {"passages": list(chat.passages)}
    reading = writer.read(tokenizer.encode_prompt(chat.prompt), line)
    return reading.ids, reading.neighbours


def test_rows_are_laid_out_as_generation_reads_them(tokenizer, placed) -> None:
    for chat, sample in zip(ROWS, encoded(tokenizer, ROWS), strict=True):
        ids, neighbours = read_by_generation(placed, tokenizer, chat)
        assert sample.ids[: len(ids)].tolist() == ids and not sample.trained[: len(ids)].any()
        assert sample.trained[len(ids) :].all()
        rows = pack_rows([sample], placed.config.model, LENGTH, tokenizer.eod, with_passages=True)
        if neighbours is None:
            assert not rows[0]["reads_neighbours"].any()
            continue
        # Behind the row there is nothing that reads.
        chunks = -(-(len(sample.ids) - 1) // CHUNK)
        np.testing.assert_array_equal(rows[0]["neighbours"][:chunks], neighbours[:chunks])
        places = np.arange(LENGTH)
        wanted = (places >= CHUNK - 1) & (places < len(sample.ids) - 1)
        np.testing.assert_array_equal(rows[0]["reads_neighbours"], wanted)


@pytest.mark.long
def test_packed_rows_are_read_as_each_alone(tokenizer, placed) -> None:
    """A row's logits are those of its tokens and neighbours as `mtjax generate` gives them to the model."""
    drawn, draw = drawn_parameters(placed), np.random.default_rng(0)
    moved = jax.tree.map(lambda a: np.asarray(a) + 0.1 * draw.standard_normal(a.shape).astype(np.float32), drawn)
    parameters = jax.tree.map(jax.device_put, moved, placed.parameter_sharding)
    samples = encoded(tokenizer, ROWS)
    rows = pack_rows(samples, placed.config.model, LENGTH, tokenizer.eod, with_passages=True)
    assert isinstance(rows, PackedPassages) and len(rows) == 1
    reader = ShardedModel(replace(placed.config, **CHAT), placed.mesh)

    @jax.jit
    def logits(parameters, batch):
        with use_rules(placed.layout.rules.with_replicated_activations):
            model = reader.inference_model(parameters)
            return model_logits(model, model.final_hidden(run_sections(model, batch, None)[0].x))

    sample, at = rows[0], 0
    names = reader.model_class.batch_arrays(reader.config)
    assert {*names} == {*sample}
    together = placed.on_mesh(logits, parameters, {name: sample[name][None] for name in names})[0]
    for number in rows.packs[0]:
        own = samples[number]
        _, neighbours = read_by_generation(placed, tokenizer, ROWS[number])
        size = len(own.ids) - 1
        batch = {"tokens": np.pad(own.ids[:-1], (0, LENGTH - size))[None]}
        batch |= {} if neighbours is None else {"neighbours": neighbours[None]}
        alone = placed.on_mesh(logits, parameters, batch)[0]
        np.testing.assert_allclose(together[at : at + size], alone[:size], atol=2e-5)
        at += rows.tokens_taken(own)


def test_without_passages_rows_are_packed_as_a_gpts(tokenizer) -> None:
    samples = encoded(tokenizer, ROWS[1:2] * 2)
    assert not have_passages(samples)
    rows = pack_rows(samples, tiny_config(**MODEL).model, LENGTH, tokenizer.eod, with_passages=False)
    assert "neighbours" not in rows[0] and rows[0]["padding_mask"].sum() == 2 * (len(samples[0].ids) - 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"passages": "one"}, r'has passages one, which must be a list of texts: \["one", "two"\]'),
        ({"passages": ["one", 2]}, "has passages .*, which must be a list of texts"),
        ({"neighbours": [["one"]]}, "has neighbours, which mtjax finetune does not read: give passages"),
        ({"passages": ["a", "b", "c"]}, "there are 3 texts for a chunk, and the model reads 2 .retro_num_neighbours."),
        ({"passages": ["a"], "prompt": ""}, "the prompt has no tokens, and reads passages"),
        (
            {
                "passages": ["a"],
                "prompt": [{"role": "user", "content": "x"}],
                "completion": [{"role": "assistant", "content": "y"}],
            },
            "has passages beside messages, and mtjax generate reads passages beside a prompt that is text",
        ),
    ],
)
def test_bad_passages_are_one_sentence(tokenizer, row: dict, message: str) -> None:
    whole = {"prompt": "the river", "completion": " over"} | row
    with pytest.raises(UserError, match=message):
        encoded(tokenizer, [dataclasses.replace(chat_of(whole), passages=passages_of(whole))])


def test_lines_of_bad_rows_are_named(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"prompt": "the", "completion": " river", "passages": ["a"]}
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, good | {"passages": "b"}, good)))
    found = read_chats(file, with_passages=True)
    assert found.notes == [f'1 of 3 rows of {file} are skipped: line 2 has passages b, which must be a list of texts: '
                           '["one", "two"]']  # fmt: skip
    assert [chat.passages for chat in found.rows] == [("a",), ("a",)]
    # Another model does not read them, and is told so.
    assert "unused fields in" in read_chats(file).notes[0]


ENCODER = {"encoder_first"}  # with one layer it has no other stack
CHUNKED = {"first_norm", "first_rest.layers.chunked", "retro.layers.chunked", "retro.layers.chunked_norm"}


@pytest.mark.parametrize(
    ("frozen", "wanted"), [("none", set()), ("encoder", ENCODER), ("retrieval", ENCODER | CHUNKED), ("decoder", None)]
)
def test_what_is_frozen_has_no_optimizer_state(frozen: str, wanted: set[str] | None) -> None:
    program = make_train_step(tiny_config(**MODEL, retro_frozen=frozen), mesh_of("1x1"))
    names, trained = (names_of(tree) for tree in (program.records, program.trainable_records))
    added = {name for name in names if name.startswith(tuple(f"{each}." for each in ENCODER | CHUNKED))}
    known = names - added if wanted is None else {n for n in names if n.startswith(tuple(f"{w}." for w in wanted))}
    assert names - trained == known and (len(names), len(added)) == (76, 20 + 16)
    moments = {name.partition(".mu.")[2] for name in names_of(program.abstract_state.optimizer) if ".mu." in name}
    assert moments == trained


def names_of(tree: Any) -> set[str]:
    return {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_what_no_row_trains_must_be_frozen(tokenizer) -> None:
    model, samples = tiny_config(**MODEL).model, encoded(tokenizer, ROWS)
    assert reading(model, samples, reads=True) == {"retro_reads": True}
    frozen = dataclasses.replace(model, retro_frozen="retrieval")
    assert reading(frozen, samples[1:2], reads=False) == {"retro_reads": False}
    with pytest.raises(UserError, match="no training row has passages, and retro_frozen is none: .* add --retro-froz"):
        reading(model, samples[1:2], reads=True)
    with pytest.raises(UserError, match="retro_reads is false, and retro_frozen is encoder"):
        validate(tiny_config(**MODEL, retro_frozen="encoder", retro_reads=False))


def test_a_run_is_resumed_with_what_it_trained() -> None:
    config = tiny_config(**MODEL, retro_frozen="encoder")
    past = Past.from_metadata(4, {"config": to_dict(config), "consumed_samples": 8})
    check_trained(past, config)
    with pytest.raises(UserError, match="the run trained with retro_frozen encoder, and retro_frozen is none: resume"):
        check_trained(past, tiny_config(**MODEL))


RUN = [
    *("--task", "chat", "--global-batch-size", "2", "--compute-dtype", "float32", "--zero", "1"),
    *("--learning-rate", "1e-2", "--epochs", "4", "--checkpoint-every", "4", "--valid-every", "4", "--keep-last", "9"),
]


def write_rows(file: Path, *, with_passages: bool = True) -> Path:
    """What stands in the passage is the answer; every third row has none."""
    rows = []
    for i, word in enumerate(("river", "stone", "house", "light") * 6):
        row = {"prompt": "the green one " + "over " * (i % 5), "completion": f" {word} walks"}
        rows.append(row | ({"passages": [f"two {word}", "under"]} if with_passages and i % 3 else {}))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_config(folder: Path, vocab: Path, hidden_dropout: float = 0.1) -> Path:
    settings = {name: value for name, value in MODEL.items() if name not in ("vocab_size", "init_std")}
    settings |= {"hidden_size": 32, "num_heads": 4, "sequence_length": 64, "hidden_dropout": hidden_dropout}
    file = folder / "retro.toml"
    data = f'[data]\ntokenizer = "bert:{vocab}"\n'
    file.write_text("[model]\n" + "".join(f"{n} = {json.dumps(v)}\n" for n, v in settings.items()) + data)
    return file


@pytest.mark.long
def test_a_run_with_passages_is_resumed_to_the_bit_and_asked_as_it_was_trained(tmp_path, capsys) -> None:
    jax.devices()
    # Masks, which double the time to compile, are in the test of frozen parameters.
    config = write_config(tmp_path, write_bert_vocab(tmp_path / "vocab.txt"), hidden_dropout=0.0)
    rows, run = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    begin = [*RUN, "--config", str(config), "--data", str(rows), "--mesh", "2x2", "--out", str(run)]
    assert finetune([*begin, "--sequence-parallel", "--microbatch-size", "1"]) == 0
    resumed_to_the_bit(run)
    losses = [e["valid_loss"] for e in read_metrics(run / "metrics.jsonl") if "valid_loss" in e]
    assert losses[-1] < losses[0]
    # The same data on another mesh gives the same losses.
    other = tmp_path / "other"
    assert finetune([*begin[:-3], "1x1", "--out", str(other)]) == 0
    found = [e["valid_loss"] for e in read_metrics(other / "metrics.jsonl") if "valid_loss" in e]
    assert found == pytest.approx(losses, rel=1e-4)
    lines, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines.write_text(json.dumps({"prompt": "the green one", "passages": ["two stone"], "max_tokens": 2}) + "\n")
    assert generate(["--from", str(run), "--input", str(lines), "--output", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "frozen", ["encoder", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("retrieval", "decoder"))]
)
def test_what_is_frozen_does_not_move_and_the_run_is_resumed_to_the_bit(tmp_path, frozen: str) -> None:
    """From weights of the same model; without passages for a frozen retrieval, as InstructRetro's decoder."""
    jax.devices()
    config = write_config(tmp_path, write_bert_vocab(tmp_path / "vocab.txt"))
    rows = write_rows(tmp_path / "rows.jsonl", with_passages=frozen != "retrieval")
    begin = [*RUN, "--data", str(rows), "--mesh", "1x2"]
    first_run = [*begin, "--config", str(config), "--epochs", "1", "--out", str(tmp_path / "weights")]
    assert finetune([*first_run, "--retro-frozen", "retrieval"]) == 0
    run = tmp_path / "run"
    begin += ["--init-from", str(tmp_path / "weights"), "--out", str(run)]
    assert finetune([*begin, "--retro-frozen", frozen]) == 0
    first, last = resumed_to_the_bit(run)
    wanted = {
        "encoder": lambda name: not name.startswith("parameters.encoder"),
        "retrieval": lambda name: not is_added(name),
        "decoder": is_added,
    }[frozen]
    assert changed(first, last) == {name for name in parameters(first) if wanted(name)}


def parameters(prints: dict[str, int]) -> set[str]:
    return {name for name in prints if name.startswith("parameters.")}


def changed(first: dict[str, int], last: dict[str, int]) -> set[str]:
    return {name for name in parameters(first) if first[name] != last[name]}


def is_added(name: str) -> bool:
    """Whether a GPT does not have the parameter."""
    return "chunked" in name or name.startswith(("parameters.encoder", "parameters.first_norm"))
