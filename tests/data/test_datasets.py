import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtjax.config import Config, Data, Model, Training, replace
from mtjax.data import load_tokenizer, open_dataset, vocabulary_size
from mtjax.data.commands import preprocess
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.source import parse_sources
from mtjax.data.corpus.words import Word
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.run_text import RunText
from mtjax.data.samples.family import DOCUMENTS
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.families.registry import FAMILIES
from tests.data.corpora import default_documents, texts, write_bert_vocab, write_jsonl
from tests.families.dummy import ROW


@pytest.fixture
def config(tmp_path):
    def make(data=None, **more):
        options = Data(data=None if data is None else str(data), cache_dir=tmp_path / "cache", **more)
        return Config(model=Model(sequence_length=32), data=options, training=Training(seed=5))

    return make


@pytest.fixture
def small_corpus(monkeypatch):
    """The first documents of the default corpus, to be quick."""
    few = [text[:3000] for text in default_documents()[:400]]
    monkeypatch.setattr("mtjax.data.corpus.default_corpus.documents", lambda: few)
    return few


def test_the_default_corpus_is_text_that_python_ships():
    first = default_documents()
    assert 2_000_000 < sum(map(len, first)) < 20_000_000
    together = "\n".join(first)
    assert "The following sections describe the standard types" in together or "compound statement" in together
    assert "namedtuple(typename, field_names, *, rename" in together
    assert "def namedtuple(" not in together
    assert "Return the absolute value of the argument." in together


@pytest.mark.long
def test_the_default_corpus_is_the_same_in_every_process():
    """Whatever the order of its sets: what is made from it is kept under its name."""
    listing = "from mtjax.data.corpus.default_corpus import documents; print(*map(ascii, documents()), sep='\\n')"
    command = [sys.executable, "-c", listing]
    first, other = (
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    )
    assert first == other and first.count(b"\n") > 500


def test_the_default_run(config, small_corpus):
    tokenizer = load_tokenizer(config())
    train, valid = (open_dataset(config(), split, 50) for split in ("train", "valid"))
    assert tokenizer.vocab_size <= 8192
    for text in small_corpus[:20]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {k: (v.dtype.str, v.shape) for k, v in train[0].items()} == {
        "tokens": ("<i4", (32,)),
        "labels": ("<i4", (32,)),
        "loss_mask": ("<f4", (32,)),
        "position_ids": ("<i4", (32,)),
    }
    assert len(train) >= 50 and len(valid) >= 50
    seen = tokenizer.decode(train[3]["tokens"].tolist())
    assert any(seen[:20] in text for text in small_corpus) or "<|endoftext|>" in seen


def test_prepared_once(config, small_corpus, monkeypatch):
    first = open_dataset(config(), "train", 50)[7]["tokens"]

    def never(*_):
        raise AssertionError("prepared again")

    monkeypatch.setattr("mtjax.data.run_text.preprocess", never)
    monkeypatch.setattr("mtjax.data.run_text.train_byte_level_bpe", never)
    assert np.array_equal(open_dataset(config(), "train", 50)[7]["tokens"], first)


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_text_of_ones_own(config, tmp_path, name):
    path = tmp_path / name
    if name == "x.txt":
        path.write_text("\n\n".join(texts(400)))
    else:
        write_jsonl(path, texts(400))
    run = config(path)
    words = load_tokenizer(run)
    for split in ("train", "valid"):
        text = words.decode(open_dataset(run, split, 10)[0]["tokens"].tolist())
        assert "stone" in text or "river" in text or "walks" in text


def test_changed_text_is_prepared_again(config, tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", texts(100))
    before = open_dataset(config(path), "train", 10)[0]["tokens"]
    write_jsonl(path, texts(100, seed=9))
    assert not np.array_equal(open_dataset(config(path), "train", 10)[0]["tokens"], before)


@pytest.fixture
def indexed(config, tmp_path):
    """Two indexed datasets and the tokenizer that made them."""
    write_jsonl(tmp_path / "all.jsonl", texts(100))
    load_tokenizer(config(tmp_path / "all.jsonl")).save(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", texts(200, seed=seed))
        arguments = f"--input {tmp_path}/{name}.jsonl --output {tmp_path}/{name} --workers 0 --append-eod"
        assert preprocess.main([*arguments.split(), "--tokenizer", f"hf:{tmp_path}/tokenizer.json"]) == 0
    return tmp_path / "a_text_document", tmp_path / "b_text_document"


def test_indexed_data_know_their_tokenizer(config, indexed, tmp_path):
    run = config(indexed[0])
    assert load_tokenizer(run).vocab_size == open_tokenizer(f"{tmp_path}/tokenizer.json").vocab_size
    assert np.array_equal(
        open_dataset(run, "train", 10)[0]["tokens"], open_dataset(config(f"{indexed[0]}.bin"), "train", 10)[0]["tokens"]
    )
    indexed[0].with_name(indexed[0].name + ".meta.json").unlink()
    with pytest.raises(UserError, match="a_text_document doesn't say with which tokenizer: name it with --tokenizer"):
        load_tokenizer(run)


@pytest.fixture
def other_tokenizer(config, tmp_path):
    """One that was trained on other text, with a digit among its tokens."""
    write_jsonl(tmp_path / "other.jsonl", ["1234 5678 90 12 34 56 78 " * 3] * 50)
    (tmp_path / "other").mkdir()
    load_tokenizer(config(tmp_path / "other.jsonl")).save(tmp_path / "other")
    return tmp_path / "other" / "tokenizer.json"


def test_token_ids_are_not_read_with_another_tokenizer(config, indexed, other_tokenizer, tmp_path):
    for run in (
        config(indexed[0], tokenizer=f"{other_tokenizer}"),
        config(train_data=f"{indexed[0]}", tokenizer=f"{other_tokenizer}"),
    ):
        with pytest.raises(
            UserError, match=r"a_text_document was made with .*/tokenizer\.json \(.*other/tokenizer\.json"
        ):
            load_tokenizer(run)
    own = tmp_path / "tokenizer.json"
    copied = tmp_path / "copied.json"
    copied.write_text(json.dumps(json.loads(own.read_text()), indent=1))  # other bytes, the same tokenizer
    assert load_tokenizer(config(indexed[0], tokenizer=f"{copied}")).vocab_size == open_tokenizer(f"{own}").vocab_size
    own.write_bytes(other_tokenizer.read_bytes())
    for named in ({}, {"tokenizer": f"{own}"}):
        with pytest.raises(UserError, match=r"tokenizer\.json has changed since .*a_text_document was made with it"):
            load_tokenizer(config(indexed[0], **named))
    own.unlink()
    with pytest.raises(UserError, match=r"with which .*a_text_document was made, does not exist: name where it is"):
        load_tokenizer(config(indexed[0]))
    load_tokenizer(config(indexed[0], tokenizer=f"{copied}"))


def test_token_ids_with_a_record_of_an_earlier_version(config, indexed, other_tokenizer, tmp_path):
    """It has the tokenizer's path, its size and its end of document."""
    record = indexed[0].with_name(f"{indexed[0].name}.meta.json")
    fields = json.loads(record.read_text())
    del fields["tokenizer_digest"]
    own, copied = tmp_path / "tokenizer.json", tmp_path / "copied.json"
    copied.write_bytes(own.read_bytes())
    record.write_text(json.dumps(fields))
    load_tokenizer(config(indexed[0]))
    with pytest.raises(UserError, match="is another tokenizer"):
        load_tokenizer(config(indexed[0], tokenizer=f"{other_tokenizer}"))
    size = open_tokenizer(f"{other_tokenizer}").vocab_size
    record.write_text(json.dumps(fields | {"vocab_size": size}))  # of a tokenizer that is gone
    own.unlink()
    run = config(indexed[0], tokenizer=f"{other_tokenizer}")
    (note,) = RunText(run.data).check_corpora("other", load_tokenizer(run))
    assert "is not there any more: other is taken for the same" in note
    with pytest.raises(UserError, match=rf"\({size:,} tokens\), and .*copied.json"):
        load_tokenizer(config(indexed[0], tokenizer=f"{copied}"))


def test_the_recorded_end_of_documents_is_taken(config, indexed, tmp_path):
    """Corpora that an earlier version made with Gemma's tokenizer end with `</s>`."""
    tokenizer = f"{tmp_path}/tokenizer.json"
    usual = open_tokenizer(tokenizer)
    end = usual.vocab_size - 1
    token = usual.token(end)
    arguments = f"--input {tmp_path}/b.jsonl --output {tmp_path}/c --workers 0 --append-eod --eod-token {token}"
    assert preprocess.main([*arguments.split(), "--tokenizer", tokenizer]) == 0
    corpus = IndexedDataset(tmp_path / "c_text_document")
    assert corpus[0][-1] == end != usual.eod
    assert load_tokenizer(config(corpus.prefix)).eod == end
    assert load_tokenizer(config(corpus.prefix, eod_token=token, tokenizer=tokenizer)).eod == end
    run = RunText(config(corpus.prefix, tokenizer=tokenizer).data)
    assert run.tokenizer.eod == usual.eod
    assert run.notes == [
        f"{corpus.prefix} was made with {token} at the end of documents, and {tokenizer} ends them with <|endoftext|>: "
        f"--eod-token '{token}' reads it as it was made"
    ]


def test_special_tokens_in_text_are_read_on_request(config, indexed, tmp_path):
    write_jsonl(tmp_path / "chat.jsonl", ["one<|endoftext|>two"] * 3)
    tokenizer = open_tokenizer(f"{tmp_path}/tokenizer.json")
    plain, marked = tokenizer.encode("one<|endoftext|>two"), [*tokenizer.encode("one"), 0, *tokenizer.encode("two")]
    assert len(plain) > len(marked) and tokenizer.eod == 0
    for more, expected in (([], plain), (["--parse-special"], marked)):
        arguments = f"--input {tmp_path}/chat.jsonl --output {tmp_path}/chat --workers 0 --overwrite"
        assert preprocess.main([*arguments.split(), "--tokenizer", f"{tmp_path}/tokenizer.json", *more]) == 0
        assert IndexedDataset(tmp_path / "chat_text_document")[0].tolist() == expected
        run = config(tmp_path / "chat.jsonl", tokenizer=f"{tmp_path}/tokenizer.json", parse_special=bool(more))
        text = RunText(run.data)
        assert text.indexed(text._sources()[0], DOCUMENTS)[0].tolist() == [*expected, 0]


def test_names_with_commas_and_spaces(config, tmp_path):
    names = ["a,b.jsonl", "c d.jsonl", "e.jsonl", "it's.jsonl", 'f".jsonl']
    for name in names:
        write_jsonl(tmp_path / name, texts(3))
    folder = str(tmp_path)
    for text, expected in {
        f"{folder}/a,b.jsonl": [["a,b.jsonl"]],
        f"{folder}/c d.jsonl": [["c d.jsonl"]],
        f"{folder}/a,b.jsonl {folder}/e.jsonl": [["a,b.jsonl"], ["e.jsonl"]],
        f"'{folder}/a,b.jsonl',{folder}/e.jsonl": [["a,b.jsonl", "e.jsonl"]],
        f"0.3 '{folder}/c d.jsonl' 0.7 {folder}/\"a,b.jsonl\"": [["c d.jsonl"], ["a,b.jsonl"]],
        f"{folder}/c\\ d.jsonl,{folder}/e.jsonl": [["c d.jsonl", "e.jsonl"]],
        f'"{folder}/it\'s.jsonl" "{folder}/f\\".jsonl"': [["it's.jsonl"], ['f".jsonl']],
    }.items():
        found = parse_sources(text)
        assert [[path.removeprefix(f"{folder}/") for path in source.paths] for source in found] == expected
        rejoined = " ".join(Word(source.paths).quoted() for source in found)
        assert [source.paths for source in parse_sources(rejoined)] == [source.paths for source in found]
    with pytest.raises(UserError, match="has a quote without its end"):
        parse_sources("'a b")
    with pytest.raises(UserError, match="no file matches 'a'"):
        parse_sources("a,b.jsonl")


def test_corpora_of_different_tokenizers_are_not_blended(config, indexed, other_tokenizer, tmp_path):
    arguments = (
        f"--input {tmp_path}/b.jsonl --output {tmp_path}/c --workers 0 --append-eod --tokenizer {other_tokenizer}"
    )
    assert preprocess.main(arguments.split()) == 0
    with pytest.raises(UserError, match=r"different tokenizers, .*a_text_document with .* and .*c_text_document with"):
        load_tokenizer(config(f"{indexed[0]} {tmp_path}/c_text_document"))


def test_text_and_its_indexed_form_give_the_same_samples(config, indexed, tmp_path):
    tokenizer = f"{tmp_path}/tokenizer.json"
    text, ids = (config(data, tokenizer=tokenizer) for data in (tmp_path / "a.jsonl", indexed[0]))
    a, b = (open_dataset(run, "train", 100) for run in (text, ids))
    assert all(np.array_equal(a[i]["tokens"], b[i]["tokens"]) for i in range(100))


def test_blends(config, indexed, tmp_path):
    a, b = indexed
    run = config(f"0.3 {a} 0.7 {b}")
    blend = open_dataset(run, "train", 12)
    parts = [open_dataset(config(path, tokenizer=f"{tmp_path}/tokenizer.json"), "train", 12) for path in indexed]
    order = zip([1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 3, 7], strict=True)
    for i, (dataset, sample) in enumerate(order):
        assert np.array_equal(blend[i]["tokens"], parts[dataset][sample]["tokens"])
    assert len(open_dataset(config(f"{a} {b}"), "train", 40)) == 40
    for wrong in (f"0.3 {a} {b}", f"{a} 0.3", f"0.3 {a} 0.7"):
        with pytest.raises(UserError, match="should be datasets only, or a weight before each"):
            open_dataset(config(wrong), "train", 5)


def test_a_blend_without_weights_goes_through_its_text_once(config, indexed):
    a, b = indexed
    parts = [open_dataset(config(path), "train", 1) for path in indexed]
    whole = sum(map(len, parts))
    blend = open_dataset(config(f"{a} {b}"), "train", whole - 1)
    seen = [blend[i]["tokens"].tolist() for i in range(len(blend))]
    first = [part[i]["tokens"].tolist() for part in parts for i in range(len(part))]
    assert len(seen) == whole - 1 and all(tokens in first for tokens in seen)
    with pytest.raises(UserError, match=rf"gives {whole:,} train samples, and the run asks for {whole + 1:,}: put a w"):
        open_dataset(config(f"{a} {b}"), "train", whole + 1)


def test_only_the_validation_split_keeps_a_partial_sample(config, indexed):
    kept, dropped = (config(indexed[0], drop_last_partial_validation_sequence=drop) for drop in (False, True))
    lengths = [len(open_dataset(run, split, 1)) for run in (kept, dropped) for split in ("train", "valid")]
    assert lengths[0] == lengths[2] and lengths[1] == lengths[3] + 1
    run = config(indexed[0], add_extra_token_to_sequence=False)
    sample = open_dataset(run, "train", 1)[0]
    assert sample["labels"].tolist() == [*sample["tokens"].tolist()[1:], 0] and sample["loss_mask"][-1] == 0


def test_a_bad_line_is_named_while_a_tokenizer_is_trained(config, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n\n{"text": "\\ud800"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 3: the text under the key 'text' has the lone surrogate"):
        load_tokenizer(config(tmp_path / "x.jsonl"))


def test_a_family_adds_its_samples_in_one_place(config, indexed, monkeypatch):
    """A new family's samples are one row of the registry; opening, blending and sizing the vocabulary follow it."""
    monkeypatch.setitem(FAMILIES, "dummy", ROW)
    run = config(f"1 {indexed[0]} 1 {indexed[1]}")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, family="dummy"))
    samples = open_dataset(run, "train", 10)
    corpora = [IndexedDataset(prefix) for prefix in indexed]
    assert [int(samples[i]["tokens"]) for i in range(2)] == [int(corpus.lengths[0]) for corpus in corpora]
    assert vocabulary_size(run, load_tokenizer(run)) == 7


def test_data_of_their_own_for_each_split(config, indexed):
    a, b = (str(path) for path in indexed)
    run = config(train_data=a, valid_data=b)
    assert len(open_dataset(run, "train", 5)) > 5
    with pytest.raises(UserError, match="there is no --test-data"):
        open_dataset(run, "test", 5)
    with pytest.raises(UserError, match="give either --data, which is split, or"):
        open_dataset(config(a, valid_data=b), "train", 5)


def test_a_split_without_documents_is_refused(config, indexed):
    with pytest.raises(UserError, match="leaves nothing for valid"):
        open_dataset(config(indexed[0], split="100,0,0"), "valid", 5)
    with pytest.raises(UserError, match="leaves none of the 200 documents"):
        open_dataset(config(indexed[0], split="9999,1,0"), "valid", 5)


def test_segments_on_request(config, indexed):
    run = config(indexed[0], reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    segments = [open_dataset(run, "train", 20)[i]["segment_ids"].max() for i in range(20)]
    assert max(segments) > 0


def test_settings_that_look_for_ends_of_documents_are_told_that_there_are_none(config, indexed, tmp_path, monkeypatch):
    arguments = f"--input {tmp_path}/b.jsonl --output {tmp_path}/c --workers 0 --tokenizer {tmp_path}/tokenizer.json"
    assert preprocess.main(arguments.split()) == 0
    without, asked = tmp_path / "c_text_document", {"reset_attention_mask": True, "eod_mask_loss": True}
    tokenizer = open_tokenizer(f"{tmp_path}/tokenizer.json")
    packed = tmp_path / "packed"  # as by another program: documents end inside of the one sequence
    ids = IndexedDataset(without)
    with IndexedWriter(packed, ids.dtype) as writer:
        text = np.concatenate([ids[0], [tokenizer.eod], ids[1]])
        writer.add(text, np.array([len(text)]), np.array([1]))
        writer.finish()
    named = {"tokenizer": f"{tmp_path}/tokenizer.json"}

    def notes(*corpora: Path, **settings: Any) -> list[str]:
        run = RunText(config(" ".join(map(str, corpora)), **named, **settings).data)
        return run.check_corpora("own", run.tokenizer)

    assert notes(without) == notes(indexed[0], packed, **asked) == []
    (note,) = notes(indexed[0], without, **asked)
    assert note.startswith(
        f"{without} has no ends of documents (<|endoftext|>, token {tokenizer.eod}) where they were looked for: "
        "--reset-attention-mask and --eod-mask-loss have no effect on it"
    )
    # The corpus ends its documents with another token than the run.
    other = tokenizer.token(tokenizer.vocab_size - 1)
    (note,) = notes(packed, reset_position_ids=True, eod_token=other)
    assert "--reset-position-ids has no effect on it" in note
    monkeypatch.setattr("mtjax.data.corpus.ends.PIECES", 0)
    assert notes(indexed[0], **asked) == []  # the last tokens are enough


def test_bert_and_t5_from_text(config, tmp_path):
    vocab = write_bert_vocab(tmp_path / "vocab.txt")
    run = config(write_jsonl(tmp_path / "x.jsonl", texts(300)), tokenizer=f"bert:{vocab}")
    bert, t5 = (replace(run, family=family, sequence_length=32) for family in ("bert", "t5"))
    sample = open_dataset(bert, "train", 20)[0]
    assert sample["tokens"].shape == (32,)
    assert sample["loss_mask"].sum() > 0
    sample = open_dataset(replace(t5, decoder_sequence_length=16), "valid", 20)[0]
    assert (sample["encoder_tokens"].shape, sample["decoder_tokens"].shape) == ((32,), (16,))


@pytest.mark.parametrize(
    ("data", "message"),
    [("nowhere.txt", "no file matches 'nowhere.txt'"), ("only.bin", r"only\.idx does not exist, and .* needs both")],
)
def test_data_that_are_not_there(config, tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only.bin").write_bytes(b"")
    with pytest.raises(UserError, match=message):
        open_dataset(config(data.removesuffix(".bin")), "train", 5)


def test_importing_starts_no_backend():
    code = (
        "import mtjax.data, sys; assert 'jax' not in sys.modules; from mtjax.data import open_loader;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
