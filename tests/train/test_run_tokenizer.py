"""Which tokenizer a run takes: its own on --resume, its weights' with --init-from; and what it keeps with it."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from mtjax.config import Config, replace
from mtjax.convert.stream import Origin, carry_tokenizer
from mtjax.data import DataPosition, SampleOrder
from mtjax.data.tokens.tokenizer import byte_level
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.weights import SPECIAL_IDS, Weights
from mtjax.train.folder import tokenizer as run_tokenizer
from mtjax.train.folder.tokenizer import find_tokenizer
from mtjax.train.objective import RunData
from tests.data.corpora import texts, write_jsonl
from tests.data.tokens.pretrained_folders import write_vocabulary

NO_POSITION = DataPosition(SampleOrder(0, (1,)))


def trained(path: Path, seed: int, more: tuple[str, ...] = ()) -> Path:
    """A tokenizer.json with Llama's special tokens, of which <s> begins a prompt; other seeds have other tokens."""
    tokenizer = byte_level(Tokenizer(models.BPE()))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300 + seed, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(50, seed=seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(list(more))
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_jsonl(tmp_path / "text.jsonl", texts(60))
    return replace(Config(), data=str(tmp_path / "text.jsonl"), cache_dir=tmp_path / "cache")


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Converted weights as far as their tokenizer goes."""
    folder = tmp_path / "converted"
    trained(folder / "tokenizer.json", 1)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    theirs = {"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "num_labels": 3}
    return Weights(folder / "weights", {"config": {}, "origin": {"hugging_face": theirs}})


def kept(config: Config, out: Path) -> bytes:
    """Starts a run as far as its tokenizer goes; returns the tokenizer.json that it leaves."""
    found = find_tokenizer(config, None, None)
    out.mkdir()
    RunData(found.tokenizer, [], None, NO_POSITION, found.files).save(out)
    (out / "metrics.jsonl").touch()
    return (out / "tokenizer.json").read_bytes()


def test_a_resumed_run_keeps_its_tokenizer_when_the_text_has_grown(config: Config, tmp_path: Path) -> None:
    before = kept(config, tmp_path / "run")
    with (tmp_path / "text.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": "wholly unlike words: zyx wvu " * 40}) + "\n" for _ in range(60))
    found = find_tokenizer(config, tmp_path / "run", None)
    expected = Tokenizer.from_str(before.decode())
    assert found.tokenizer.encode("wholly unlike zyx") == expected.encode("wholly unlike zyx").ids
    assert found.is_saved and found.notes == ()
    RunData(found.tokenizer, [], None, NO_POSITION, {"tokenizer.json": b"another"}, found.is_saved).save(
        tmp_path / "run"
    )
    assert (tmp_path / "run/tokenizer.json").read_bytes() == before
    new = find_tokenizer(config, None, None)  # a new run on this text has another one
    assert new.tokenizer.encode("wholly unlike zyx") != expected.encode("wholly unlike zyx").ids


def test_a_resumed_run_refuses_another_tokenizer_and_needs_none(config: Config, tmp_path: Path) -> None:
    named = trained(tmp_path / "a.json", 1)
    kept(replace(config, tokenizer=str(named)), tmp_path / "run")
    again = replace(config, tokenizer=f"hf:{shutil.copy(named, tmp_path / 'copied.json')}")
    assert find_tokenizer(again, tmp_path / "run", None).notes == ()
    other = trained(tmp_path / "b.json", 2)
    with pytest.raises(UserError, match=r"run/tokenizer\.json, and --tokenizer .*b\.json is another one \(token 2"):
        find_tokenizer(replace(config, tokenizer=str(other)), tmp_path / "run", None)
    named.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=r"--tokenizer .*a\.json is another one"):
        find_tokenizer(replace(config, tokenizer=str(named)), tmp_path / "run", None)
    named.unlink()
    (note,) = find_tokenizer(replace(config, tokenizer=str(named)), tmp_path / "run", None).notes
    assert "a.json does not exist; the run's own is used" in note


def test_a_run_keeps_the_end_of_documents_that_was_chosen(config: Config, weights: Weights, tmp_path: Path) -> None:
    named = replace(config, tokenizer=str(trained(tmp_path / "a.json", 1)))
    chosen = replace(named, eod_token="<s>")
    assert find_tokenizer(named, None, None).tokenizer.eod == 1
    kept(chosen, tmp_path / "run")
    for again in (config, named, chosen):
        found = find_tokenizer(again, tmp_path / "run", None)
        assert found.is_saved and found.tokenizer.eod == 0
    with pytest.raises(UserError, match=r"the documents of the run end with <s> \(.*run/tokenizer\.json\), and --eod-"):
        find_tokenizer(replace(config, eod_token="</s>"), tmp_path / "run", None)
    found = find_tokenizer(replace(config, eod_token="<s>"), None, weights)
    (tmp_path / "new").mkdir()
    RunData(found.tokenizer, [], None, NO_POSITION, found.files).save(tmp_path / "new")
    assert (found.tokenizer.eod, find_tokenizer(config, tmp_path / "new", None).tokenizer.eod) == (0, 0)


def test_a_run_whose_tokenizer_is_gone_does_not_train_another(config: Config, tmp_path: Path) -> None:
    kept(config, tmp_path / "run")
    (tmp_path / "run/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds a run without its tokenizer\.json"):
        find_tokenizer(config, tmp_path / "run", None)
    assert not find_tokenizer(config, tmp_path / "not-begun", None).is_saved


def test_a_run_that_trains_a_tokenizer_says_how_much_of_a_larger_vocabulary_is_unused(config: Config) -> None:
    found = find_tokenizer(config, None, None)
    size = found.tokenizer.vocab_size
    assert found.notes == () and find_tokenizer(replace(config, vocab_size=size), None, None).notes == ()
    (note,) = find_tokenizer(replace(config, vocab_size=50257), None, None).notes
    assert note == (
        f"no --tokenizer is given: one of {size} tokens was trained on the text, and {50257 - size:,} of the "
        "vocabulary's 50,257 tokens are never used. Name the tokenizer for this vocab_size: --tokenizer gpt2:FOLDER, "
        "which is GPT-2's"
    )
    (note,) = find_tokenizer(replace(config, vocab_size=32000), None, None).notes
    assert note.endswith(
        "the vocabulary's 32,000 tokens are never used. Name the tokenizer for this vocab_size: "
        "--tokenizer hf:FOLDER, or remove vocab_size"
    )


def test_a_run_in_a_store_keeps_its_tokenizer(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(config, tmp_path / "run")
    write_jsonl(tmp_path / "text.jsonl", texts(60, seed=4))
    monkeypatch.setattr(run_tokenizer, "names_in", lambda url: [path.name for path in (tmp_path / "run").iterdir()])
    monkeypatch.setattr(run_tokenizer, "read_bytes", lambda url: (tmp_path / "run" / Path(url).name).read_bytes())
    found = find_tokenizer(config, Path("s3:/bucket/run"), None)
    assert found.is_saved
    with pytest.raises(UserError, match=r"s3://bucket/run/tokenizer\.json, and --tokenizer .*b\.json is another one"):
        named = replace(config, tokenizer=str(trained(tmp_path / "b.json", 2)))
        find_tokenizer(named, Path("s3:/bucket/run"), None)


def test_weights_bring_their_tokenizer_and_what_goes_with_it(config: Config, weights: Weights, tmp_path: Path) -> None:
    found = find_tokenizer(config, None, weights)
    expected = Tokenizer.from_file(str(weights.root / "tokenizer.json"))
    assert found.tokenizer.encode_prompt("the river") == expected.encode("the river").ids
    run = tmp_path / "run"
    run.mkdir()
    RunData(found.tokenizer, [], None, NO_POSITION, found.files).save(run)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (run / name).read_bytes() == (weights.root / name).read_bytes()
    ids = {"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    assert json.loads((run / SPECIAL_IDS).read_text()) == ids
    later = Weights(run / "checkpoints" / "7", {"config": {}})  # and so do the weights of this run
    assert later.hugging_face == ids
    assert find_tokenizer(config, None, later).files == found.files


def test_weights_refuse_a_tokenizer_that_gives_their_rows_other_meanings(
    config: Config, weights: Weights, tmp_path: Path
) -> None:
    other = replace(config, tokenizer=str(trained(tmp_path / "b.json", 2)))
    with pytest.raises(UserError, match=r"converted/tokenizer\.json, and --tokenizer .*b\.json is another one"):
        find_tokenizer(other, None, weights)
    longer = replace(config, tokenizer=str(trained(tmp_path / "c.json", 1, more=("<|im_start|>",))))
    found = find_tokenizer(longer, None, weights)  # the rows of all other tokens mean the same
    assert found.tokenizer.special("<|im_start|>") == found.tokenizer.vocab_size - 1
    assert "tokenizer.json" not in found.files and "tokenizer_config.json" in found.files
    for path in weights.root.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="came without a tokenizer.*name theirs with --tokenizer"):
        find_tokenizer(config, None, weights)


def test_a_new_run_takes_what_lies_beside_the_tokenizer_of_a_hugging_face_folder(
    config: Config, weights: Weights, tmp_path: Path
) -> None:
    """But for what belongs to the weights there."""
    found = find_tokenizer(replace(config, tokenizer=str(weights.root / "tokenizer.json")), None, None)
    assert sorted(found.files) == ["tokenizer_config.json"]
    own_name = shutil.copy(weights.root / "tokenizer.json", weights.root / "llama.json")
    assert find_tokenizer(replace(config, tokenizer=str(own_name)), None, None).files == {}


def test_processes_with_different_tokenizers_do_not_train_together(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tokenizer, "num_processes", lambda: 2)
    monkeypatch.setattr(run_tokenizer, "all_gather_text", lambda name, word: [word, word])
    find_tokenizer(config, None, None)
    monkeypatch.setattr(run_tokenizer, "all_gather_text", lambda name, word: ["another", word])
    with pytest.raises(UserError, match="process 1 has another tokenizer than process 0"):
        find_tokenizer(config, None, None)


def test_a_run_trained_with_a_sentencepiece_model_alone_keeps_it(config: Config, tmp_path: Path) -> None:
    """The settings beside the model, which the run keeps for its chat template, make another tokenizer of it."""
    library = pytest.importorskip("sentencepiece", reason="needs the extra data: pip install '.[data]'")
    llama = tmp_path / "llama"
    llama.mkdir()
    write_vocabulary(llama, "bpe")
    (llama / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    named = replace(config, tokenizer=f"sentencepiece:{llama}/tokenizer.model")
    theirs = library.SentencePieceProcessor(model_file=str(llama / "tokenizer.model"))
    run, out = find_tokenizer(named, None, None), tmp_path / "run"
    assert run.tokenizer.encode_prompt("ba </s>") == theirs.encode("ba </s>")
    out.mkdir()
    RunData(run.tokenizer, [], None, NO_POSITION, run.files).save(out)
    (out / "metrics.jsonl").touch()
    assert (out / "tokenizer_config.json").exists()
    resumed = [find_tokenizer(each, out, None).tokenizer for each in (named, config)]
    weights = Weights(out / "checkpoints" / "7", {"config": {}})
    later = find_tokenizer(config, None, weights)
    for tokenizer in (*resumed, later.tokenizer):
        assert tokenizer.encode_prompt("ba </s>") == theirs.encode("ba </s>")
    chained = tmp_path / "chained"  # began with the weights of the run, and nobody named its tokenizer
    chained.mkdir()
    RunData(later.tokenizer, [], None, NO_POSITION, later.files).save(chained)
    assert find_tokenizer(config, chained, None).tokenizer.encode_prompt("ba </s>") == theirs.encode("ba </s>")
    (tmp_path / "copy").mkdir()
    carry_tokenizer(Origin(config, "float32", out, is_run=True), tmp_path / "copy")
    assert not (tmp_path / "copy/tokenizer.json").exists()
