"""Conversations: rows, what of them is learnt, packing; and `mtjax finetune --task chat` as it is typed."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.commands.finetune import main
from mtjax.commands.generate import main as generate
from mtjax.convert.saved_model import SavedModel
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.errors import UserError
from mtjax.finetune.chat_encoding import ChatEncoder, EncodedSample
from mtjax.finetune.chat_objective import ChatFinetuning
from mtjax.finetune.chat_rows import Chat
from mtjax.finetune.chat_samples import PackedChats, pack
from mtjax.generate.chat import ChatTemplate
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.train.observability.metrics import read_metrics
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, small_tokenizer, write_folder

pytestmark = pytest.mark.usefixtures("bare_end")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
)
TOKENIZER = FastTokenizer(small_tokenizer(), "a test")


def messages(*texts: str) -> tuple[dict[str, str], ...]:
    """The user's and the assistant's in turn."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))


def written_by(template: str, *texts: str) -> tuple[str, str]:
    """A conversation as the model reads it, and what of it is learnt."""
    encoder = ChatEncoder(TOKENIZER, ChatTemplate(template, {}, "a test"))
    (written,), _ = encoder.samples(Chat(messages(*texts)))
    return TOKENIZER.decode(written.ids), TOKENIZER.decode(written.ids[written.trained])


def test_answers_and_what_ends_them_are_learnt_and_nothing_else():
    whole, learnt = written_by(TEMPLATE, "the road", "the cat", "the end", "the dog", "and?")
    assert whole == "uthe road<|endoftext|>\nathe cat<|endoftext|>\nuthe end<|endoftext|>\nathe dog<|endoftext|>\n"
    assert learnt == "the cat<|endoftext|>the dog<|endoftext|>"
    endless = TEMPLATE.replace("<|endoftext|>", ".")
    assert written_by(endless, "the", "cat") == ("uthe.\nacat.\n<|endoftext|>", "cat.\n<|endoftext|>")


def test_a_prompt_and_its_completion_need_no_template():
    encoder = ChatEncoder(TOKENIZER, None)
    (written,), _ = encoder.samples(Chat(prompt="the road", completion=" and the end"))
    assert written.ids.tolist() == [*TOKENIZER.encode("the road and the end"), TOKENIZER.eod]
    assert TOKENIZER.decode(written.ids[written.trained]) == " and the end<|endoftext|>"
    assert encoder.ends == [TOKENIZER.eod]
    with pytest.raises(UserError, match="has no chat_template to render messages: add --chat-template"):
        encoder.samples(Chat(messages("a", "b")))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 16), max_size=40))
def test_packs_hold_every_item_once_and_none_is_too_long(lengths):
    packs = pack(lengths, 16)
    assert sorted(i for items in packs for i in items) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in items) for items in packs]
    assert max(sums, default=0) <= 16
    assert sum(2 * total <= 16 for total in sums) <= 1  # two that are half empty would have been one


def test_a_packed_sequence_keeps_conversations_apart():
    def chat(*ids: int, asked: int) -> EncodedSample:
        return EncodedSample(np.array(ids, np.int32), np.arange(len(ids)) >= asked)

    chats = [chat(1, 2, 3, 4, asked=2), chat(5, 6, 7, asked=1), chat(*range(10, 30), asked=1)]
    chats.append(chat(*range(40, 60), asked=15))  # nothing of its answer is within 8 tokens
    packed = PackedChats.of(chats, 8, 0)
    assert packed.packs == [[2], [0, 1]]
    assert packed[0]["tokens"].tolist() == list(range(10, 18))
    found = {name: array.tolist() for name, array in packed[1].items()}
    assert found == {
        "tokens": [1, 2, 3, 5, 6, 0, 0, 0],
        "labels": [2, 3, 4, 6, 7, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 0, 0],
        "segment_ids": [0, 0, 0, 1, 1, 2, 2, 2],
        "padding_mask": [1, 1, 1, 1, 1, 0, 0, 0],
        "loss_mask": [0, 1, 1, 1, 1, 0, 0, 0],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`hf`, weights whose tokenizer has a template, and `chats.jsonl`, of two words with one answer each."""
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("chats")
    write_folder(folder / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
    settings = {"tokenizer_class": "GPT2TokenizerFast", "chat_template": TEMPLATE}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"messages": messages(*(("the", " cat") if i % 2 else ("road", " dog")))} for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def chat(folder: Path, out: Path, *words: str) -> int:
    begin = ["--task", "chat", "--data", str(folder / "chats.jsonl"), "--init-from", f"hf:{folder / 'hf'}"]
    shape = ["--global-batch-size", "4", "--compute-dtype", "float32", "--mesh", "2x1", "--hidden-dropout", "0"]
    return main([*begin, *shape, "--attention-dropout", "0", "--out", str(out), *words])


@pytest.mark.long
def test_conversations_are_learnt_and_generate_speaks(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert chat(folder, out, "--epochs", "30", "--learning-rate", "3e-2") == 0
    said = capsys.readouterr()
    assert "36 conversations with" in said.out + said.err
    entries = [e["valid_loss"] for e in read_metrics(out / "metrics.jsonl") if "valid_loss" in e]
    assert min(entries) < 0.2
    lines = iter(["the\n", ""])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines))
    assert generate(["--from", str(out), "--interactive", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == "cat"


def resumed_to_the_bit(run: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Resumes a copy of a run from its first checkpoint; the fingerprints of that and of the last, which are equal."""
    again = run.with_name("again")
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    shutil.copytree(run, again)
    for step in steps[1:]:
        shutil.rmtree(again / "checkpoints" / str(step))
    assert main(["--config", str(run / "config.toml"), "--resume", "--out", str(again)]) == 0
    whole, resumed = (
        find_weights(place / "checkpoints" / str(steps[-1])).metadata["fingerprints"] for place in (run, again)
    )
    assert whole == resumed
    return find_weights(run / "checkpoints" / str(steps[0])).metadata["fingerprints"], whole


@pytest.mark.long
def test_a_run_of_adapters_is_resumed_to_the_bit_and_leaves_the_weights_alone(folder, tmp_path):
    run = tmp_path / "run"
    every = ["--checkpoint-every", "4", "--valid-every", "4", "--keep-last", "9", "--learning-rate", "1e-2"]
    assert chat(folder, run, "--lora-rank", "2", "--epochs", "3", *every) == 0
    first, last = resumed_to_the_bit(run)
    changed = {name for name in first if name.startswith("parameters.") and first[name] != last[name]}
    assert changed == {name for name in first if name.startswith("parameters.") and ".lora." in name}
    assert not [name for name in first if name.startswith("optimizer") and "embedding" in name]
    merged = SavedModel.open(str(run))
    assert merged.config.model.lora_rank == 0
    assert not [name for name in merged.source.parameters if "lora" in name]


@pytest.mark.exhaustive
def test_conversations_that_ranks_share_are_learnt_as_by_one(folder, tmp_path):
    """Packed, kept apart, with adapters; the losses of each step, and of the validations."""
    losses = []
    for mesh in ("2x1", "data=1,context=2,model=1"):
        out = tmp_path / mesh
        assert chat(folder, out, "--mesh", mesh, "--log-every", "1", "--epochs", "4", "--lora-rank", "2") == 0
        entries = list(read_metrics(out / "metrics.jsonl"))
        losses.append([entry[name] for name in ("loss", "valid_loss") for entry in entries if name in entry])
    assert len(losses[0]) > 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.long
def test_the_validation_loss_is_a_mean_over_tokens_of_answers_whatever_the_batch(folder, tmp_path):
    """Of one conversation twice, and of a last batch that is not full."""
    from tests.tiny import initial_state, program_of

    losses = []
    chats = [EncodedSample(np.arange(1, 8, dtype=np.int32), np.arange(7) >= 3)] * 3
    chats.append(EncodedSample(np.arange(60, 75, dtype=np.int32), np.arange(15) >= 9))
    for size in (2, 8):
        fields = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "global_batch_size": size}
        program = program_of("2x1", reset_position_ids=True, reset_attention_mask=True, **fields)
        packed = PackedChats.of(chats, 16, 0)
        assert len(packed) == 3
        losses.append(ChatFinetuning(None).validate(program, initial_state(program).parameters, packed)["valid_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 5 < losses[0] < 6  # about log 250


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--labels", "a", "b"], "--labels has no effect on --task chat"),
        (["--chat-template", "nowhere"], "the chat template nowhere can't be read"),
        (
            ["--sequence-length", "1"],
            "no training row has an answer within the first 1 tokens: raise --sequence-length",
        ),
        (["--data", "nowhere"], "nowhere can't be read"),
    ],
)
def test_wrong_input_ends_with_one_sentence(words, message, folder, tmp_path, capsys):
    assert chat(folder, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoints").exists()
