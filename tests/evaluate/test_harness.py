"""`mtjax evaluate --harness` beside lm-eval's own `hf` model: the same tasks, texts and weights."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mtjax.commands.evaluate import main
from mtjax.errors import UserError
from mtjax.evaluate.harness_model import HarnessModel, rolling_rows, sampling_of
from mtjax.evaluate.score import Scorer
from mtjax.generate.request import Sampling, Token
from tests.convert.hf_folders import (
    GPT2_CONFIG,
    HIDDEN,
    LLAMA_CONFIG,
    gpt2_shapes,
    llama_shapes,
    llama_tokenizer,
    random_tensors,
    small_tokenizer,
    write_folder,
)
from tests.evaluate.lm_eval_tasks import TASKS, write_tasks
from tests.tiny import VOCAB, initial_state, program_of

EXTRA = "needs the extra evaluate: pip install '.[evaluate]'"
CONTEXT = 48


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def folder_of(family: str, folder: Path) -> Path:
    """A model for whose context some of the texts are too long."""
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    if family == "gpt2":
        shapes = gpt2_shapes() | {"transformer.wpe.weight": (CONTEXT, HIDDEN)}
        config = GPT2_CONFIG | {"n_positions": CONTEXT}
    else:
        config = LLAMA_CONFIG | {"max_position_embeddings": CONTEXT}
        shapes = llama_shapes(config)
    write_folder(folder, random_tensors(shapes), config, tokenizer=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if family == "llama":
        llama_tokenizer().save(str(folder / "tokenizer.json"))
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def harness(tasks: Path, source: str, *words: str) -> int:
    return main(["--harness", ",".join(TASKS), "--harness-include", str(tasks), "--from", source, *words])


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "mesh"), [("gpt2", "2x2"), pytest.param("llama", "1x4", marks=pytest.mark.exhaustive)]
)
def test_results_are_those_of_lm_evals_own_model(tasks, tmp_path, monkeypatch, family: str, mesh: str) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator", reason=EXTRA)
    managing = pytest.importorskip("lm_eval.tasks", reason=EXTRA)
    pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    jax.devices()  # all eight, before the command asks for as many as its mesh needs
    folder, out = folder_of(family, tmp_path / "hf"), tmp_path / "ours.json"
    theirs = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=managing.TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )["results"]
    assert harness(tasks, f"hf:{folder}", "--mesh", mesh, "--rows", "3", "--out", str(out)) == 0
    ours = json.loads(out.read_text())["results"]
    compared = 0
    for task, values in theirs.items():
        for name, value in values.items():
            if isinstance(value, float) and "_stderr" not in name:
                assert ours[task][name.removesuffix(",none")] == pytest.approx(value, rel=1e-5), (task, name)
                compared += 1
    assert compared == 5
    assert list(tmp_path.glob(".*")) == []


@pytest.fixture(scope="module")
def answering(tmp_path_factory) -> HarnessModel:
    from mtjax.data.tokens.tokenizer import open_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    small_tokenizer().save(str(path))
    program = program_of("1x1", hidden_dropout=0.0, attention_dropout=0.0)
    parameters = initial_state(program).parameters
    return HarnessModel(Scorer(program), parameters, open_tokenizer(str(path)), 0, frozenset({0}), 4)


def test_likelihoods_of_windows_add_up(answering, tmp_path) -> None:
    """Without lm-eval: its two questions agree where they ask the same, and long contexts lose their beginnings."""
    long, ids = list(range(3, 40)), list(range(50, 60))
    pairs = [([], ids), ([0], ids), (long, ids), (long[-7:], ids)]
    found = answering.continuations(pairs)
    assert found[0] == found[1]
    assert found[2][0] == pytest.approx(found[3][0], abs=1e-5)
    assert found[0] != found[2]
    text = answering.tokenizer.decode(list(range(2, 14)))
    whole = answering.encode(text)
    assert answering.text_log_probabilities([text, ""]) == [
        pytest.approx(answering.continuations([([], whole)])[0][0]),
        0.0,
    ]
    with pytest.raises(UserError, match="an answer of 17 tokens is longer than the sequence length of 16"):
        answering.continuations([([0], [1] * 17)])


def test_windows_are_lm_evals() -> None:
    rows = rolling_rows(list(range(100, 110)), 7, 4)
    assert [(row.tokens.tolist(), row.first) for row in rows] == [
        ([7, 100, 101, 102, 103], 1),
        ([103, 104, 105, 106, 107], 1),
        ([105, 106, 107, 108, 109], 3),
    ]


def test_generation_kwargs() -> None:
    assert sampling_of({"until": "\n", "max_gen_toks": 5, "num_beams": 1}, 3) == (Sampling(5, seed=3), ("\n",))
    assert sampling_of({"do_sample": False, "temperature": 0.7}, 0)[0].temperature == 0
    assert sampling_of({"max_gen_toks": None, "max_tokens": 7}, 0)[0] == Sampling(7)  # lm-eval skips null
    assert sampling_of({"do_sample": True, "top_p": 0.9, "until": ["a", ""]}, 0) == (
        Sampling(256, 1.0, top_p=0.9),
        ("a",),
    )
    for wrong, words in (({"num_beams": 4}, "have num_beams"), ({"temperature": -1}, "temperature")):
        with pytest.raises(UserError, match=words):
            sampling_of(wrong, 0)


def test_texts_are_decoded_as_by_lm_eval(monkeypatch, tmp_path) -> None:
    """Its hf model decodes the tokens of a text alone, without special ones, and cuts at a stop string then."""
    from mtjax.data.tokens.tokenizer import open_tokenizer

    made = llama_tokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    one, two = (made.encode(text, add_special_tokens=False).ids for text in ("the cat", "and the dog went"))
    answer = [*one, made.token_to_id("<s>"), *two]

    class Answering:
        def __init__(self, *_: Any) -> None:
            self.requests: list[Any] = []

        def submit(self, request: Any) -> None:
            self.requests.append(request)

        def run(self) -> None:
            for request in self.requests:
                all(not request.on_token(Token(token)) for token in answer)
                request.on_end("stop")

    monkeypatch.setattr("mtjax.evaluate.harness_model.Engine", Answering)
    monkeypatch.setattr("mtjax.evaluate.harness_model.GenerationPrograms", lambda *_: None)
    scorer: Any = SimpleNamespace(longest=512, sharded_model=None)
    model = HarnessModel(scorer, None, open_tokenizer(str(tmp_path / "tokenizer.json")), 1, frozenset({2}), 4)
    expected = made.decode(answer, skip_special_tokens=True).split("dog")[0]
    assert expected == "the cat and the "
    assert model.generate([("the end of the road", {"until": ["dog"]})]) == [expected]


def test_texts_leave_room_for_a_prompt(answering) -> None:
    with pytest.raises(UserError, match="texts of 16 tokens leave no space for a prompt in the sequence length of 16"):
        answering.generate([("the cat", {"max_gen_toks": 16})])
    assert answering.tokenizer.vocab_size > VOCAB  # a model that is smaller than its tokenizer: the ids are refused
    with pytest.raises(UserError, match="the vocabulary has ids from 0 to 249"):
        answering.generate([(answering.tokenizer.decode([260, 270]), {"max_gen_toks": 2})])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--task is missing: name a task, or tasks of lm-eval with --harness"),
        (["--task", "lambada", "--harness", "x"], "--task and --harness cannot be combined"),
        (["--task", "lambada"], "--data is missing: name the file of lambada"),
        (["--harness", "x", "--overlap", "4"], "--overlap has no effect without --task"),
        (["--task", "lambada", "--data", "x", "--limit", "4"], "--limit has no effect without --harness"),
    ],
)
def test_options_that_do_not_belong_together(capsys, words: list[str], expected: str) -> None:
    assert main(["--from", "hf:nothing", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_harness_that_is_not_installed(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert main(["--from", "hf:nothing", "--harness", "hellaswag"]) == 2
    assert "this needs the library lm_eval.tasks: " in (said := capsys.readouterr().err)
    assert "evaluate" in said


@pytest.mark.long  # importing lm_eval takes 20 seconds
def test_a_task_that_lm_eval_does_not_have(tmp_path, capsys) -> None:
    pytest.importorskip("lm_eval", reason=EXTRA)
    for name, text in (("pages", "task: pages\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n"),):
        (tmp_path / f"{name}.yaml").write_text(text)
    for words, expected in (
        (["--harness", "helaswag"], "lm-eval has no task or group 'helaswag' - did you mean 'hellaswag'?"),
        (["--harness", "pages", "--harness-include", str(tmp_path)], "lm-eval can't load pages: "),
        (["--harness", "pages", "--harness-include", str(tmp_path / "no")], "is not a folder"),
    ):
        assert main(["--from", "hf:nothing", *words]) == 2
        assert expected in capsys.readouterr().err.splitlines()[-1]
