"""`mtjax finetune` as it is typed: best checkpoint, resuming, early stopping, and wrong input."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from mtjax.commands.ensemble import main as ensemble
from mtjax.commands.finetune import main
from mtjax.commands.predict import main as predict
from mtjax.convert.saved_model import Hints
from mtjax.errors import UserError
from mtjax.finetune.objective import TaskFinetuning
from mtjax.finetune.pretrained_trunk import PretrainedTrunk
from mtjax.finetune.scorer import open_scorer
from mtjax.finetune.tasks.registry import TASKS
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.train.folder import tokenizer as run_tokenizer
from mtjax.train.layer_decay import layer_factors
from mtjax.train.observability.metrics import read_metrics
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, write_folder
from tests.tiny import program_of, tiny_config

pytestmark = pytest.mark.usefixtures("bare_end")
CHUNKS = {"chunks": 2, "microbatch_size": 4, "pipeline_schedule": "interleaved"}
WORDS = ["the cat", "the dog", "and", "there they rested"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`hf`, weights with their tokenizer, and `rows`, texts whose first word tells their class, 44 and 12."""
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("finetune")
    write_folder(folder / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
    (folder / "rows").mkdir()
    for name, count in (("train", 44), ("dev", 12)):
        rows = [{"text": f"{WORDS[i % 4]} {WORDS[i % 3]}", "label": "ab"[i % 2]} for i in range(count)]
        (folder / "rows" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finetune(folder, out, *words: str) -> int:
    begin = ["--task", "classify", "--data", str(folder / "rows"), "--init-from", f"hf:{folder / 'hf'}"]
    shape = ["--global-batch-size", "8", "--compute-dtype", "float32", "--mesh", "2x1", "--log-every", "1"]
    return main([*begin, *shape, "--out", str(out), *words])


def measured(run) -> list[dict[str, float]]:
    """Losses and validations of each step."""
    entries = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in entry.items() if k == "loss" or k.startswith("valid")} for entry in entries]


@pytest.fixture(scope="module")
def whole(folder):
    """A run of 11 steps, of which every second is saved and validated."""
    every = ["--valid-every", "2", "--checkpoint-every", "2", "--keep-last", "9"]
    assert finetune(folder, folder / "whole", "--epochs", "2", "--learning-rate", "2e-2", *every) == 0
    return folder / "whole"


def test_a_task_is_learnt_and_its_best_checkpoint_kept(whole, capsys):
    entries = [e for e in read_metrics(whole / "metrics.jsonl") if "valid_accuracy" in e]
    assert [e["step"] for e in entries] == [2, 4, 6, 8, 10, 11]
    best = max(entries, key=lambda e: (e["valid_accuracy"], -e["step"]))
    assert entries[-1]["valid_loss"] < 0.8 * entries[0]["valid_loss"]
    weights = find_weights(whole)
    assert weights.folder == whole / "best" / str(best["step"])
    assert weights.config.finetuning.labels == ("a", "b")
    assert (weights.config.model.head, weights.config.model.num_labels) == ("classification", 2)
    assert (weights.config.training.steps, weights.config.optimizer.warmup_steps) == (11, 1)


def test_a_resumed_run_is_the_same_to_the_bit(whole, tmp_path):
    """As it was when it was killed after step 7: the best checkpoint, if it is a later one, does not count."""
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for step in (8, 10, 11):
        shutil.rmtree(again / "checkpoints" / str(step))
    assert main(["--config", str(whole / "config.toml"), "--resume", "--out", str(again)]) == 0
    ends = [find_weights(place / "checkpoints" / "11").metadata["fingerprints"] for place in (whole, again)]
    assert ends[0] == ends[1]
    assert measured(again) == measured(whole)
    assert find_weights(again).folder.name == find_weights(whole).folder.name


def test_processes_compare_their_rows_and_tokenizers(folder, tmp_path, monkeypatch):
    shutil.copytree(folder / "rows", tmp_path / "rows")
    trunk = PretrainedTrunk(f"hf:{folder / 'hf'}", Hints())
    settings = {"family": "gpt", "task": "classify", "head": "classification", "vocab_size": None, "epochs": 1.0}
    config = tiny_config(**settings, data=str(tmp_path / "rows"), mesh="1x1")

    def read():
        return dict(TaskFinetuning(TASKS["classify"], trunk).load_data(config, tmp_path)[1].read)

    before, rows = read(), tmp_path / "rows" / "dev.jsonl"
    rows.write_text(rows.read_text().replace("they rested", "the rested"))
    after = read()
    assert [text.documents for texts in before.values() for text in texts] == [44, 12]
    assert after["training rows"] == before["training rows"] and after["validation rows"] != before["validation rows"]
    monkeypatch.setattr(run_tokenizer, "num_processes", lambda: 2)
    monkeypatch.setattr(run_tokenizer, "all_gather_text", lambda name, word: ["another", word])
    with pytest.raises(UserError, match="process 1 has another tokenizer than process 0"):
        read()


def copy_after(whole, out, step):
    """The run as it was when it was killed after a step."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return ["--config", str(out / "config.toml"), "--resume"]


@pytest.mark.long
def test_another_batch_size_goes_through_the_epochs_that_are_left(whole, tmp_path, capsys):
    """Of 2 epochs of 44 rows, 48 rows are read after step 6: 40 are left, 10 batches of 4."""
    resumed = copy_after(whole, tmp_path / "other", 6)
    assert main([*resumed, "--global-batch-size", "4"]) == 0
    assert [entry["step"] for entry in measured_steps(tmp_path / "other")] == list(range(1, 17))
    said = capsys.readouterr().out
    assert "global_batch_size" in said and "10 steps left, which read samples 49 to 88" in said


@pytest.mark.long
def test_more_epochs_say_how_the_learning_rate_jumps(whole, tmp_path, capsys):
    resumed = copy_after(whole, tmp_path / "longer", 11)
    assert main([*resumed, "--epochs", "3"]) == 0
    entries = measured_steps(tmp_path / "longer")
    assert len(entries) == 17
    said = capsys.readouterr().out
    # It decays linearly to 0 over 17 steps, one of them of warmup, where it had decayed to 0 over 11.
    expected = 2e-2 * (17 - 11) / (17 - 1)
    assert entries[11]["learning_rate"] == pytest.approx(expected, rel=1e-5)
    assert re.search(r"learning rate, step 12 +0\.00e\+00 +7\.50e-03 ", said)
    assert f"--epochs 6 --out {tmp_path / 'longer'}-6-epochs" in said  # advises a run from the beginning instead


def measured_steps(run):
    return read_metrics(run / "metrics.jsonl")


def test_other_rows_and_another_order_of_them_ask_for_the_word(whole, folder, tmp_path, capsys):
    resumed = copy_after(whole, tmp_path / "rows", 6)
    rows = shutil.copytree(folder / "rows", tmp_path / "data")
    with (rows / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "the cat", "label": "a"}) + "\n")
    for words, kind in ((["--data", str(rows)], "data"), (["--seed", "9"], "order")):
        assert main([*resumed, *words]) == 2
        assert f"--allow-changed {kind}" in capsys.readouterr().err
    assert main([*resumed, "--seed", "9", "--allow-changed", "order"]) == 0
    assert "a new order of samples begins after sample 48" in capsys.readouterr().out


def test_a_run_keeps_its_own_tokenizer_and_what_the_weights_say_of_tokens(whole, folder, tmp_path, capsys):
    assert json.loads((whole / "special_token_ids.json").read_text()) == {"model_type": "gpt2", "bos_token_id": 7}
    own = (whole / "tokenizer.json").read_bytes()
    assert own == (folder / "hf" / "tokenizer.json").read_bytes()
    other = tmp_path / "other.json"
    content = json.loads(own)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other.write_text(json.dumps(content))
    resume = ["--config", str(whole / "config.toml"), "--resume", "--tokenizer", str(other)]
    assert main(resume) == 2
    assert f"trained with the tokenizer {whole}/tokenizer.json, and --tokenizer {other}" in capsys.readouterr().err
    assert finetune(folder, tmp_path / "out", "--tokenizer", str(other)) == 2
    assert f"came with the tokenizer {folder}/hf/tokenizer.json, and --tokenizer {other}" in capsys.readouterr().err
    assert (whole / "tokenizer.json").read_bytes() == own


@pytest.mark.long
def test_a_run_that_does_not_get_better_ends_early_and_stays_so(folder, tmp_path):
    out = tmp_path / "early"
    still = ["--epochs", "9", "--learning-rate", "0", "--patience", "2", "--valid-every", "1"]
    assert finetune(folder, out, *still, "--class-weights", "balanced") == 0
    assert [int(path.name) for path in (out / "checkpoints").iterdir()] == [3]
    assert main(["--config", str(out / "config.toml"), "--resume"]) == 0
    assert [int(path.name) for path in (out / "checkpoints").iterdir()] == [3]
    assert find_weights(out).folder == out / "best" / "1"


SEVERAL = ["--coordinator", "localhost:12345", "--num-processes", "2", "--process-id", "0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "sst"], "--task sst is not one of"),
        (["--task", "none"], "--task is missing: use one of mnli, qqp"),
        (["--steps", "5"], "--steps has no effect on finetuning"),
        (["--train_samples", "5"], "--train-samples has no effect on finetuning"),
        (["--sequence-length", "17"], "above the 16 learned positions of"),
        (["--num-layers", "2"], "num_layers is 3 there and 2 here"),
        (["--task", "rte"], "but needs sentence1 and sentence2"),
        (["--labels", "x", "y"], "labels such as 'a', 'b' are not among x, y"),
        (["--class-weights", "c=2"], "names no class"),
        (["--task", "regress"], "labels such as 'a', 'b' are not numbers"),
        (["--task", "regress", "--class-weights", "balanced"], "are not numbers"),
        (["--label-smoothing", "0.1"], "--label-smoothing and --z-loss apply only to losses over the vocabulary"),
        (["--init-from", "nowhere"], "nowhere contains no mtjax weights: it does not exist"),
        ([*SEVERAL, "--seeds", "2"], "with several processes: start each run separately"),
        (["--layer-decay", "1.5"], "layer_decay is 1.5, and must be above 0 and at most 1"),
    ],
)
def test_wrong_input_ends_with_one_sentence(words, message, folder, tmp_path, capsys):
    assert finetune(folder, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_lower_layers_learn_more_slowly():
    """`decay^(L - l)` in layer l of L, `decay^(L + 1)` below, on stages in the order in which layers lie."""
    fields = {"head": "classification", "num_layers": 4}
    for mesh, more, order in (
        ("1x1", {}, [0, 1, 2, 3]),
        ("data=1,stage=2,model=1", CHUNKS, [0, 2, 1, 3]),
    ):
        program = program_of(mesh, **fields, **more)
        records = {record.name: record for record in jax.tree.leaves(program.records)}

        def factors(name: str, program=program, records=records) -> np.ndarray:
            return layer_factors(records[name], 0.5, program.config.model, program.layer_orders)

        expected = np.float32(0.5) ** (4 - np.array(order))
        np.testing.assert_array_equal(factors("stack.layers.mlp.up.bias")[:, 0], expected)
        assert factors("embedding") == factors("positions") == 0.5**5
        assert factors("head.classifier.weight") == factors("final_norm.scale") == 1.0
    program = program_of("1x1", head="classification", num_layers=4, embedding_size=24)
    records = {record.name: record for record in jax.tree.leaves(program.records)}
    for name, expected in (("project_in.weight", 0.5**5), ("project_out.weight", 1.0)):
        assert layer_factors(records[name], 0.5, program.config.model, program.layer_orders) == expected


def test_layers_with_experts_count_on_from_those_without():
    program = program_of("1x1", num_layers=3, family="llama", num_experts=4, first_dense_layers=1)
    records = {record.name: record for record in jax.tree.leaves(program.records)}
    for name, expected in (("dense.layers.mlp.up.weight", [0.125]), ("stack.layers.experts.up.weight", [0.25, 0.5])):
        np.testing.assert_array_equal(layer_factors(records[name], 0.5, program.config.model, {}).ravel(), expected)


def answers(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_are_those_of_the_best_validation(whole, folder, tmp_path, capsys):
    data, out = folder / "rows" / "dev.jsonl", tmp_path / "answers.jsonl"
    assert predict(["--from", str(whole), "--data", str(data), "--out", str(out), "--rows", "5"]) == 0
    best = max(e.get("valid_accuracy", 0.0) for e in read_metrics(whole / "metrics.jsonl"))
    assert f"accuracy {best:.4f}" in capsys.readouterr().err
    rows = answers(out)
    assert [row["line"] for row in rows] == list(range(1, 13))
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in rows)
    assert all(row["label"] == max(row["probabilities"], key=row["probabilities"].get) for row in rows)
    label = min(rows[0]["probabilities"])
    texts = [row["text"] for row in answers(data)]
    scores = open_scorer(str(whole), label, rows=4)(texts)
    assert scores == pytest.approx([row["probabilities"][label] for row in rows], abs=1e-5)
    with pytest.raises(UserError, match="--score-label is other, and --scorer"):
        open_scorer(str(whole), "other")
    assert predict(["--from", f"hf:{folder / 'hf'}", "--data", str(data)]) == 2
    assert "has no head for a task: finetune it first" in capsys.readouterr().err


@pytest.mark.long
def test_seeds_are_run_and_their_ensemble_is_the_mean_of_their_answers(folder, tmp_path, capsys):
    runs, data = tmp_path / "runs", folder / "rows" / "dev.jsonl"
    words = ["--epochs", "1", "--learning-rate", "3e-3", "--seeds", "2", "--seed", "5"]
    assert finetune(folder, runs, *words) == 0
    facts = json.loads((runs / "seeds.json").read_text())
    best = {
        seed: max(e.get("valid_accuracy", 0.0) for e in read_metrics(runs / f"seed-{seed}" / "metrics.jsonl"))
        for seed in (5, 6)
    }
    assert facts["seeds"] == {str(seed): value for seed, value in best.items()}
    assert facts["median"] == pytest.approx(sum(best.values()) / 2)
    assert finetune(folder, runs, *words, "--resume") == 0  # both are done: no more steps
    members = [runs / "seed-5", runs / "seed-6"]
    for member in members:
        assert predict(["--from", str(member), "--data", str(data), "--out", f"{member}.jsonl"]) == 0
    together = tmp_path / "together.jsonl"
    assert ensemble([*map(str, members), "--data", str(data), "--out", str(together)]) == 0
    parts = zip(answers(together), *(answers(runs / f"seed-{seed}.jsonl") for seed in (5, 6)), strict=True)
    for row, *each in parts:
        for name, value in row["probabilities"].items():
            assert value == pytest.approx(sum(one["probabilities"][name] for one in each) / 2, abs=1e-12)
    assert "seed-5" in capsys.readouterr().err
    assert ensemble([str(members[0]), "--data", str(data)]) == 2
