"""`mtjax train --evaluate ... --keep-best ...`: results beside those of `mtjax evaluate` on the same checkpoint."""

import json
import shutil
from pathlib import Path

import jax
import pytest

from mtjax.commands.evaluate import main as evaluate
from mtjax.commands.train import main as train
from mtjax.config import Config, replace
from mtjax.data.corpus.meta import Meta, write_meta
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.evaluate import during_training
from mtjax.evaluate.during_training import evaluations_of, first_tokens_in
from mtjax.runtime.checkpoints.weights import Weights
from mtjax.train.folder.tokenizer import find_tokenizer
from mtjax.train.objective import RunData
from mtjax.train.observability.best import Goal
from mtjax.train.observability.metrics import main_results, read_metrics
from tests.convert.hf_folders import llama_tokenizer
from tests.data.corpora import texts, write_jsonl
from tests.end_to_end.runs import TINY
from tests.tiny import program_of
from tests.train.test_run_tokenizer import NO_POSITION

TEXT = "the cat and the dog went on to the end of the road @-@ and there they rested . \n" * 40


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text(TEXT[:500])
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "the cat and the dog went on to the road"}) + "\n")
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    write_meta(tmp_path / "corpus.meta.json", Meta("hf:elsewhere.json", 9, 0, "another", idx_crc32=0, bin_crc32=0))
    return tmp_path


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def start(*words: str) -> int:
    return train(["--config", "tiny.toml", "--data", "text.txt", "--split", "9,1,0", "--out", "run", *words])


@pytest.mark.long
def test_results_are_those_of_mtjax_evaluate_and_the_best_is_kept(folder, capsys) -> None:
    """On stages, resumed: the losses fall, until a learning rate that is far too high lets them grow."""
    asked = ["--evaluate", "wikitext103=short.txt", "lambada=lambada.jsonl", "--evaluate-every", "2"]
    asked += ["--keep-best", "wikitext103/perplexity", "--mesh", "2x2x2", "--microbatch-size", "2"]
    assert start(*asked, "--steps", "4") == 0
    said = capsys.readouterr().out
    entries = {entry["step"]: entry for entry in read_metrics(folder / "run" / "metrics.jsonl")}
    assert [step for step, entry in entries.items() if "wikitext103/perplexity" in entry] == [2, 4]
    assert main_results(entries[4]) == ["wikitext103/perplexity", "lambada/accuracy"]
    before = entries[4]["wikitext103/perplexity"]
    assert entries[2]["wikitext103/perplexity"] > before
    assert f"wikitext103 perplexity {before:.4f}" in said
    assert f"best wikitext103/perplexity {before:.4f} after step 4" in said

    out = ["--mesh", "1x2", "--out", "ours.json"]
    assert evaluate(["--task", "wikitext103", "--data", "short.txt", "--from", "run", *out]) == 0
    results = json.loads((folder / "ours.json").read_text())["results"]
    for name in ("perplexity", "token_perplexity", "loss"):
        assert entries[4][f"wikitext103/{name}"] == pytest.approx(results[name], rel=1e-5)

    worse = ["--learning-rate", "30", "--steps", "6"]
    resumed = train(["--config", "run/config.toml", "--resume", *worse, "--out", "run"])
    assert resumed == 0
    last = read_metrics(folder / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 6 and last["wikitext103/perplexity"] > before
    assert [path.name for path in (folder / "run" / "best").iterdir() if path.name.isdigit()] == ["4"]
    assert f"best wikitext103/perplexity {before:.4f} after step 4" in capsys.readouterr().out
    picture = (folder / "run" / "loss.png").read_bytes()
    assert int.from_bytes(picture[20:24], "big") > 800  # two panels below the losses


@pytest.mark.parametrize(
    ("metric", "higher_is_better"),
    [("lambada/accuracy", True), ("lambada/perplexity", False), ("wikitext103/loss", False)],
)
def test_what_is_best(folder, metric: str, higher_is_better: bool) -> None:
    asked = ("wikitext103=short.txt", "lambada=lambada.jsonl")
    evaluations = evaluations_of(replace(Config(), evaluate=asked, keep_best=metric))
    assert evaluations is not None and evaluations.goal == Goal(metric, higher_is_better)
    by_loss = evaluations_of(replace(Config(), evaluate=asked, keep_best="valid_loss", valid_every=2))
    assert by_loss is not None and by_loss.goal is None  # the objective's


def test_a_text_begins_as_for_mtjax_evaluate_whatever_became_of_the_tokenizer_that_was_named(tmp_path) -> None:
    llama_tokenizer("", "</s>").save(str(_made(tmp_path / "named") / "tokenizer.json"))
    (tmp_path / "named/tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    write_jsonl(tmp_path / "text.jsonl", texts(60))
    named = f"{tmp_path}/named/tokenizer.json"
    config = replace(Config(), data=str(tmp_path / "text.jsonl"), cache_dir=tmp_path / "cache", tokenizer=named)
    found, run = find_tokenizer(config, None, None), _made(tmp_path / "run")
    assert found.name == named  # for messages
    new = RunData(found.tokenizer, [], None, NO_POSITION, found.files)
    new.save(run)
    assert first_tokens_in(new) == [1]
    shutil.rmtree(tmp_path / "named")
    for resumed in (config, replace(config, tokenizer=None)):
        found = find_tokenizer(resumed, run, None)
        assert first_tokens_in(RunData(found.tokenizer, [], None, NO_POSITION, found.files, found.is_saved)) == [1]
    # Weights whose config.json alone says with what a text begins.
    converted = _made(tmp_path / "converted")
    llama_tokenizer("", "</s>").save(str(converted / "tokenizer.json"))
    weights = Weights(converted / "weights", {"config": {}, "origin": {"hugging_face": {"bos_token_id": 1}}})
    found = find_tokenizer(replace(config, tokenizer=None), None, weights)
    assert first_tokens_in(RunData(found.tokenizer, [], None, NO_POSITION, found.files)) == [1]


def test_processes_compare_the_rows_of_tasks(folder, monkeypatch) -> None:
    """With other rows, a process would run another number of batches than the others wait for."""
    seen = dict[str, str]()
    monkeypatch.setattr(during_training, "check_same", lambda what, digest, path: seen.update({what: digest}))
    shutil.copy(folder / "short.txt", folder / "copy.txt")
    (folder / "other.txt").write_text(TEXT[:490])
    tokenizer = FastTokenizer(llama_tokenizer("", "</s>"), "a test")
    text = RunData(tokenizer, [], None, NO_POSITION)
    digests = list[str]()
    for name in ("short", "copy", "other"):
        evaluations = evaluations_of(replace(Config(), evaluate=(f"wikitext103={name}.txt",)))
        assert evaluations is not None
        evaluations.open(program_of("1x1", vocab_size=tokenizer.vocab_size), text)
        digests.append(seen.pop("rows of --evaluate wikitext103"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--evaluate", "lambada"], "--evaluate lambada is not TASK=FILE"),
        (["--evaluate", "lamda=x"], "unknown task 'lamda' - did you mean 'lambada'?"),
        (["--evaluate", "lambada=none.jsonl"], "--evaluate lambada: none.jsonl does not exist"),
        (["--evaluate", "lambada=a", "lambada=b"], "names a task twice"),
        (["--evaluate", "lambada=text.txt"], "text.txt, line 1 is not JSON"),
        (
            ["--evaluate", "perplexity=corpus"],
            "corpus was made with hf:elsewhere.json (9 tokens), and the tokenizer trained on the text (",
        ),
        (["--evaluate", "lambada=lambada.jsonl", "--family", "bert"], "which a bert does not: remove it"),
        (["--keep-best", "lambada/accuracy"], "--keep-best lambada/accuracy is not one of valid_loss"),
        (["--keep-best", "valid_loss"], "requires validation, but valid_every is 0"),
        (
            ["--evaluate", "lambada=lambada.jsonl", "--keep-best", "lambada/acuracy"],
            "lambada/perplexity - did you mean 'lambada/accuracy'?",
        ),
    ],
)
def test_wrong_input_is_one_sentence(folder, capsys, words: list[str], expected: str) -> None:
    assert start(*words) == 2
    *notes, said = capsys.readouterr().err.strip().splitlines()  # of a tokenizer that is trained for all cases
    assert expected in said and said.startswith("error: ") and all("(once; kept in " in note for note in notes)
    assert not (folder / "run").exists()
