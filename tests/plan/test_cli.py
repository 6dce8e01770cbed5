"""The command line: what it prints, and that wrong input ends in one sentence."""

import re
import shlex

import numpy as np
import pytest

from mtjax import cli, config
from mtjax.analysis.hardware import DGX_H100
from mtjax.commands.plan import main
from mtjax.commands.train import Options as TrainOptions
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh
from mtjax.plan.side_reports import with_capacity
from tests.convert.hf_folders import GPT2_CONFIG, SEQUENCE, VOCAB, gpt2_shapes, random_tensors, write_folder


def run(capsys, *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_reports_on_the_papers_mesh(capsys):
    out = run(
        capsys, "--config", "gpt2-8.3b", "--mesh", "64x8", "--target", "h100x8", "--tokens", "300e9", "--price", "2"
    )
    assert "8,317,040,640" in out
    assert "8,311,904,256" in out
    for section in ("Parameters", "FLOPs", "Memory", "Traffic", "Bandwidth for", "Time of a step", "Summary"):
        assert section in out
    assert re.search(r"300 Gtokens = 572,205 steps +\d", out)
    assert "cost at 2 per GPU and hour" in out
    assert "MFU" in out and "HFU" in out and "Amdahl" in out


def test_a_teacher_s_memory_work_and_traffic_are_counted(tmp_path, capsys):
    write_folder(tmp_path / "teacher", random_tensors(gpt2_shapes()), GPT2_CONFIG)
    size = {"--vocab-size": VOCAB, "--sequence-length": SEQUENCE, "--num-layers": 2, "--hidden-size": 64}
    words = [str(word) for pair in size.items() for word in pair] + ["--num-heads", "4", "--global-batch-size", "64"]
    words += ["--vocab-multiple", str(VOCAB)]
    student = ("--config", "gpt2-small", "--mesh", "4x2", "--microbatch-size", "8", *words)
    alone, taught = run(capsys, *student), run(capsys, *student, "--teacher", f"hf:{tmp_path / 'teacher'}")
    assert "teacher" not in alone
    held = sum(int(np.prod(shape)) for shape in gpt2_shapes().values())
    assert re.search(rf"teacher \(frozen\) +{held:,}", taught)
    assert f"loss forward: max, sum, target logit {7 * 2}" in re.sub(" +", " ", taught)  # in two microbatches
    for row in ("teacher's forward pass, in addition", "teacher: weights", "teacher, layer forward: g"):
        assert row in taught
    assert main([*student, "--vocab-size", "999", "--teacher", f"hf:{tmp_path / 'teacher'}"]) == 2
    assert f"has a vocabulary of {VOCAB}, but the student's has 999" in capsys.readouterr().err


def test_where_figures_come_from_is_said_once(capsys):
    out = run(capsys, "--config", "gpt2-8.3b", "--mesh", "64x8")
    assert "Model gpt2-8.3b: gpt, 8.32 Gparameters, 72 layers, hidden 3072\n" in out
    assert len(re.findall("by formula", out)) == 1
    assert not re.search(r" model$", out, re.MULTILINE)


def test_a_setting_that_costs_time_is_hinted_at_with_the_step_without_it(capsys):
    asked = ("--config", "gpt2-355m", "--mesh", "8x1", "--target", "h100x8")
    hint = re.search(
        r"Hint: +attention_dropout 0.1 .*--attention-dropout 0 a step takes (\S+ m?s) instead", run(capsys, *asked)
    )
    assert hint
    without = run(capsys, *asked, "--attention-dropout", "0")
    assert "attention_dropout" not in without and f"{hint[1]} (" in without
    hint = re.search(r"Hint: +recompute full is not needed: .* takes (\S+ m?s) instead of (\S+ m?s)", without)
    assert hint and f"{hint[2]} (" in without
    without = run(capsys, *asked, "--attention-dropout", "0", "--recompute", "none")
    assert not re.search(r"Hint: +recompute", without) and f"{hint[1]} (" in without
    asked = ("--config", "llama3-8b", "--mesh", "8x1", "--target", "b200x8", "--global-batch-size", "64")
    asked = (*asked, "--reset-attention-mask")
    hint = re.search(r"Hint: +reset_attention_mask .* --attention cudnn a step takes (\S+ m?s)", run(capsys, *asked))
    assert hint and f"{hint[1]} (" in run(capsys, *asked, "--attention", "cudnn")


def test_a_search_keeps_to_the_usable_memory(capsys):
    """4 GiB of an H100's 80: of the table of the fastest plans, and of what is proposed in place of a plan that is too
    large."""
    asked = ("--config", "gpt2-355m", "--target", "h100x8", "--usable", "0.05")
    fastest = run(capsys, *asked, "--gpus", "8").partition("As fast, but")[0]
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", fastest)]
    assert len(sizes) == 10 and max(sizes) <= 4
    nearest = re.search(
        r"the nearest plan that does is mesh 8x1, microbatch (\d+)", run(capsys, *asked, "--mesh", "8x1")
    )
    assert nearest
    chosen = ("--mesh", "8x1", "--microbatch-size", nearest[1], "--recompute", "none", "--zero", "3", "--unroll-layers")
    assert "This plan does not fit" not in run(capsys, *asked, *chosen)


def test_generation_fits_the_usable_memory():
    memory = DGX_H100.gpu.memory
    assert with_capacity(0.89 * memory, DGX_H100) == "70.40 GiB"
    assert with_capacity(0.91 * memory, DGX_H100) == "71.98 GiB - does not fit"


def test_stages_need_not_divide_the_layers(capsys):
    out = run(capsys, "--config", "llama3-8b", "--gpus", "24")
    typed = re.search(r"Train it: +mtjax train (.*)", out)
    assert typed
    chosen = cli.parse(shlex.split(typed[1]), "mtjax train", "", TrainOptions).config.parallel
    assert (chosen.mesh, chosen.layers_per_stage) == ("data=8,stage=3,model=1", (11, 11, 10))


def test_stages_are_reported_with_their_schedules(capsys):
    out = run(
        capsys, "--mesh", "data=8,stage=4,model=8", "--microbatch-size", "2", "--zero", "1", "--sequence-parallel"
    )
    assert "per GPU, on every stage" in out and "1f1b (planned)" in out
    assert "gpipe" in out and "interleaved" in out and "pipeline bubble" in out


def test_experts_have_parameters_that_a_token_does_not_meet_and_ranks_with_more_to_do(capsys):
    asked = ("--config", "mixtral-8x7b", "--target", "h100x8")
    even, uneven = run(capsys, *asked), run(capsys, *asked, "--expert-imbalance", "1.5")
    assert re.search(r"active per token: 2 of 8 experts +12,879,925,248", even)
    assert "expert (8)" in even and "experts: equal loads" in even and "experts: 1.5 times" in uneven

    def products(out):
        found = re.search(r"^matmuls +([\d.]+) s", out, re.MULTILINE)
        assert found
        return float(found[1])

    assert 1.4 < products(uneven) / products(even) < 1.5


def test_tokens_are_exchanged_where_that_is_faster_and_wait_for_the_rank_with_most(capsys):
    """Of 8 ranks with an expert each a token goes to 2: a quarter of what gathers send."""
    asked = ("--config", "mixtral-8x7b", "--target", "h100x8")

    def row(out, name):
        found = re.search(rf"^{name} +([\d.]+) GB +([\d.]+) (m?)s", out, re.MULTILINE)
        assert found
        return float(found[1]), float(found[2]) / (1000 if found[3] else 1)

    even, uneven = (
        run(capsys, *asked),
        run(capsys, *asked, "--expert-imbalance", "1.5", "--expert-dispatch", "all-to-all"),
    )
    (gathered, gather), (exchanged, exchange) = row(even, r"all-gather \(planned\)"), row(even, "all-to-all")
    assert exchanged / gathered == pytest.approx(1 / 4, rel=0.01) and exchange < gather / 3
    most, slower = row(uneven, r"all-to-all \(planned\)")
    assert most == exchanged and 1.45 < slower / exchange < 1.5 and row(uneven, "all-gather") == (gathered, gather)
    out = run(capsys, *asked, "--gpus", "16", "--global-batch-size", "16")
    assert re.search(r"Train it: .* --mesh data=2,expert=8,model=1 .*--expert-dispatch all-to-all", out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--config", "llama3-8b", "--expert-imbalance", "2"), "needs a model with experts, and num_experts is 0"),
        (("--config", "mixtral-8x7b", "--expert-imbalance", "9"), "is above num_experts 8"),
        (("--config", "mixtral-8x7b", "--expert-imbalance", "0.5"), "must be 1 or more"),
        (
            ("--config", "mixtral-8x7b", "--mesh", "data=2,expert=16,model=1"),
            "is not divisible by the expert parallel degree 16",
        ),
    ],
)
def test_loads_that_experts_can_not_have_are_refused(capsys, words, said):
    assert main(list(words)) == 2
    assert said in capsys.readouterr().err


def test_searches_and_says_why(capsys):
    out = run(
        capsys,
        *("--gpus", "16", "--target", "h100x8", "--tokens", "450e9", "--price", "2.5", "--global-batch-size", "64"),
    )
    assert "Fastest of" in out
    assert "cost of 450 Gtokens" in out and "25 published runs on H100 took 0.97 to 1.29 times" in out
    assert re.search(r"Train it:  mtjax train --config gpt2-8.3b --mesh \S+ ", out)
    assert len(re.findall(r"^mesh ", out, re.MULTILINE)) >= 10
    assert "As fast, but out of memory" in out


def test_the_winners_command_is_one_that_train_understands(capsys):
    out = run(capsys, "--config", "gpt2-small", "--gpus", "8", "--global-batch-size", "32")
    command = re.search(r"Train it: +mtjax train (--config \S+ --mesh \S+ .*)", out)
    assert command
    parsed = cli.parse(command[1].split(), "mtjax train", "", TrainOptions)
    mesh = parse_mesh(parsed.config.parallel.mesh)
    assert mesh.size == 8
    check_config(parsed.config, mesh)


def test_the_command_repeats_what_was_asked_for(capsys, tmp_path):
    path = tmp_path / "my run.toml"
    path.write_text((config.find("gpt2-small")).read_text())
    argv = [
        "--config",
        str(path),
        "--global-batch-size",
        "64",
        "--attention-dropout",
        "0",
        "--no-scaled-init",
        "--gpus",
        "4",
    ]
    out = run(capsys, *argv)
    typed = re.search(r"Train it: +mtjax train (.*)", out)
    assert typed
    parsed = cli.parse(shlex.split(typed[1]), "mtjax train", "", TrainOptions).config
    assert (parsed.training.global_batch_size, parsed.model.attention_dropout) == (64, 0)
    assert not parsed.model.scaled_init


def test_days_find_gpus(capsys):
    out = run(capsys, "--config", "gpt2-1.2b", "--days", "7", "--tokens", "30e9", "--target", "h100x8")
    assert re.search(r"\d+ GPUs train on 3e\+10 tokens within 7 days", out)


def test_inference_figures(capsys):
    out = run(capsys, "--config", "gpt2-xl", "--inference", "--context", "512")
    assert "KV cache" in out and "int4" in out and "8 x 512" in out
    assert "memory per GPU" in out and "predictions, not measurements" in out


@pytest.mark.parametrize(
    ("config", "shown"),
    [("nemotron-h-8b", ()), ("deepseek-v2-lite", ()), ("mistral-7b", ("int4", "int8")), ("gpt2-xl", ("int4", "int8"))],
)
def test_inference_shows_the_types_that_a_model_supports(config, shown, capsys):
    """Patterns and experts have no quantized weights, and short windows no quantized caches."""
    out = run(capsys, "--config", config, "--inference")
    assert all((kind in out) == (kind in shown) for kind in ("int4", "int8"))
    assert ("int8 cache" in " ".join(out.split())) == (config == "gpt2-xl")


def test_inference_counts_the_snapshots_that_are_given(capsys):
    """The states of a sequence: 64 layers x 80 heads x 64 x 128 numbers of float32 are 0.156 GiB."""
    given = ("--config", "mamba2-2.7b", "--inference")
    default, none = (run(capsys, *given, *more) for more in ((), ("--state-snapshots", "0")))
    rows = [next(line.split() for line in out.splitlines() if line.startswith("8 x")) for out in (default, none)]
    assert rows[0][5] == "2.53" and rows[1][5] == "0.00"
    assert main(["--config", "mamba2-2.7b", "--state-snapshots", "3"]) == 2
    assert "--state-snapshots 3 needs --inference" in capsys.readouterr().err


def test_published_runs(capsys):
    out = run(capsys, "--published")
    assert "512 GPUs (64x8)" in out and "177B" in out and "points" in out


def test_a_vocabulary_that_only_a_tokenizer_knows(capsys):
    assert "using GPT-2's 50,257" in run(capsys, "--config", "default", "--mesh", "2x4")
    out = run(capsys, "--config", "default", "--mesh", "2x4", "--tokenizer", "hf:llama3/tokenizer.json")
    assert "the tokenizer is hf:llama3/tokenizer.json: add --vocab-size N" in " ".join(out.split())


def test_a_plan_that_does_not_fit_names_the_nearest_that_does(capsys):
    out = run(capsys, "--config", "gpt2-8.3b", "--mesh", "8x1", "--global-batch-size", "64", "--target", "h100x8")
    assert "does NOT fit" in out
    assert re.search(r"does not fit h100x8: the nearest plan that does is mesh \S+", out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "64x7"], "num_heads 32 is not divisible by the tensor parallel degree 7"),
        (["--mesh", "banana"], "mesh 'banana' is neither"),
        (["--target", "h1000x8"], "no GPU kind is called 'h1000'"),
        (["--gpus", "0"], "--gpus is 0, and must be above 0"),
        (["--days", "3"], "--days needs --tokens"),
        (["--days", "3", "--gpus", "8", "--tokens", "1e9"], "give one of them"),
        (["--gpus", "8", "--mesh", "8x1"], "--gpus searches for the mesh, and --mesh names one: remove one of them"),
        (["--days=3", "--tokens=1e9", "--mesh=8x1"], "--days searches for the mesh, and --mesh names one"),
        (["--tokens", "-5"], "--tokens is -5"),
        (["--tokens", "nan"], "--tokens is nan"),
        (["--usable", "1.5"], "--usable is 1.5"),
        (["--config", "gpt2-small", "--gpus", "13"], "13 GPUs form no mesh"),
        (["--config", "gpt2-large", "--mesh", "8x1", "--target", "h100x7"], "8 GPUs don't fill servers of 7"),
        (["--gpus", "1", "--target", "v100x16", "--global-batch-size", "32"], "no plan for 1 GPUs fits"),
        (["--fp8", "--target", "a100-80x8"], "of compute capability 8.9 or more, and NVIDIA A100-SXM4-80GB has 8.0"),
        (["--plot", "x.txt"], "should end in one of"),
        (["--plot", "/nowhere/x.png"], "the folder /nowhere does not exist"),
        (["--verify", "--gpus", "8"], "--verify compiles one plan"),
        (["--verify", "--mesh", "data=1,expert=2,model=1"], "num_experts is 0: remove expert from the mesh"),
        (["--mesh", "2x5x8", "--microbatch-size", "1"], "num_layers 72 is not divisible by 5 stages"),
        (["--mesh", "8x8x8", "--recompute-num-layers", "2", "--microbatch-size", "1"], "recompute_num_layers 2"),
        (["--config", "gpt2-9b"], "no config file 'gpt2-9b'"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(capsys, argv, message):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1


def test_is_a_command_of_mtjax(capsys):
    assert cli.main(["plan", "--config", "gpt2-small"]) == 0
    assert "125,164,032" in capsys.readouterr().out


def test_plots_into_one_file(capsys, tmp_path):
    path = tmp_path / "plan.png"
    run(capsys, "--config", "gpt2-small", "--mesh", "8x1", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.png"]
