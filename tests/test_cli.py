"""The command line: commands, options over file over defaults, help, and how errors end."""

import ast
import dataclasses
import errno
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

from mtjax import __version__, cli, config
from mtjax.commands.data import COMMANDS as data_commands
from mtjax.config import Config
from mtjax.config.common import COMMON, COMMON_FINETUNING
from mtjax.config.lists import options_in_order
from mtjax.config.renamed import with_new_options
from mtjax.config.storage import Storage
from mtjax.errors import UserError

FIELDS = [(group, f.name) for group, cls in get_type_hints(Config).items() for f in dataclasses.fields(cls)]


@dataclasses.dataclass(frozen=True)
class Options:
    """Beside the config."""

    target: str = "cpu"
    """What for."""


def parse(*words: str) -> cli.Command[Options]:
    return cli.parse(words, "mtjax test", "Tests.", Options)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", None),
        ("--mlp-bias", True),
        ("--no-mlp-bias", False),
        ("--mlp-bias None", None),
        ("--mlp-bias=False", False),
    ],
)
def test_a_switch_whose_default_is_a_rule_is_typed_like_any_other(typed, expected):
    parsed = parse(*typed.split(), "--num-layers", "2").config
    assert parsed.model.mlp_bias is expected and parsed.model.num_layers == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fp8"], "delayed"),
        (["--fp8", "--fp8-amax-history", "4"], "delayed"),
        (["--fp8", "tensorwise"], "tensorwise"),
        (["--fp8=rowwise"], "rowwise"),
    ],
    ids=str,
)
def test_fp8_without_a_recipe_is_delayed(words: list[str], expected: str) -> None:
    assert parse(*words).config.training.fp8 == expected


def test_without_options_it_is_the_default_config() -> None:
    command = parse()
    assert command.config == config.load("default")
    assert command.name == "default"
    assert command.options == Options("cpu")
    assert parse("--target", "h100").options == Options("h100")


def test_options_over_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nhidden_size = 64\nnum_heads = 8\n")
    command = parse("--hidden-size", "128", "--config", str(path))
    assert command.name == "mine"
    model = command.config.model
    assert (model.hidden_size, model.num_heads, model.num_layers) == (128, 8, config.Model().num_layers)


@pytest.mark.parametrize("words", [["--config", "gpt2-8.3b"], ["--config=gpt2-8.3b"], ["--config", "gpt2-8.3b.toml"]])
def test_the_config_may_be_written_in_any_of_these_ways(words: list[str]) -> None:
    command = parse(*words)
    assert command.config == config.load("gpt2-8.3b")
    assert command.name == "gpt2-8.3b"


@pytest.mark.parametrize(
    ("words", "lowest", "note"),
    [
        (["--learning-rate", "1e-4"], 1e-5, "min_learning_rate 0.0002 (from {file}) is above learning_rate 0.0001"),
        (["--learning-rate", "1e-3"], 2e-4, ""),
    ],
)
def test_a_lowest_rate_that_was_not_typed_follows_a_lower_peak(
    words: list[str], lowest: float, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[optimizer]\nlearning_rate = 4e-3\nmin_learning_rate = 2e-4\n")
    assert parse("--config", str(path), *words).config.optimizer.min_learning_rate == pytest.approx(lowest)
    said = capsys.readouterr().err
    assert said == "" if not note else note.format(file=path) in said
    path.write_text("[optimizer]\nlearning_rate = 1e-6\n")
    assert parse("--config", str(path)).config.optimizer.min_learning_rate == pytest.approx(1e-7)
    assert "min_learning_rate 1e-05 (the default) is above learning_rate 1e-06" in capsys.readouterr().err


def test_a_lowest_rate_above_the_peak_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[optimizer]\nlearning_rate = 1e-4\nmin_learning_rate = 2e-4\n")
    for words in (["--config", str(path)], ["--learning-rate", "1e-4", "--min-learning-rate", "2e-4"]):
        with pytest.raises(UserError, match="min_learning_rate 0.0002 is above learning_rate 0.0001"):
            parse(*words)


def test_underscores_are_typed_options_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """tyro reads `--a_b` as `--a-b`; what looks at the words before it has to as well."""
    with pytest.raises(UserError, match="min_learning_rate 0.0002 is above learning_rate 0.0001"):
        parse("--learning-rate", "1e-4", "--min_learning_rate", "2e-4")
    assert not capsys.readouterr().err
    assert parse("--layers_per_stage", "5,6").config.parallel.layers_per_stage == (5, 6)
    assert parse("--layers_per_stage=5,6").config.parallel.layers_per_stage == (5, 6)
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nrouter_normalize = true\n")
    for word in ("--no-router-normalize", "--no_router_normalize"):
        with pytest.raises(UserError, match="router_normalize is False") as caught:
            parse("--config", str(path), word)
        assert "from" not in str(caught.value)


def test_a_config_in_the_folder_of_a_run_means_that_folder(tmp_path: Path) -> None:
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    path = tmp_path / "new" / "config.toml"
    path.write_text('[output]\nout = "old"\n')
    assert parse("--config", str(path), "--resume").config.output.out == tmp_path / "new"
    assert parse("--config", str(path), "--resume", "--out", "other").config.output.out == Path("other")
    (tmp_path / "new" / "checkpoints").rmdir()
    assert parse("--config", str(path), "--resume").config.output.out == Path("old")  # written by hand
    config.save(config.replace(config.Config(), out=Path("old")), path)
    with pytest.raises(UserError, match=r"is in \S+/new, which has no checkpoints, and was written by a run in old"):
        parse("--config", str(path), "--resume")


def test_a_run_has_one_end() -> None:
    with pytest.raises(UserError, match="--steps 5 and train_samples 80 both set the end of the run"):
        parse("--steps", "5", "--train-samples", "80")


def test_values_have_their_types() -> None:
    chosen = parse("--out", "a/b", "--rampup-batch-size", "8", "8", "100", "--resume", "--mlp-size", "512").config
    assert chosen.output.out == Path("a/b")
    assert chosen.output.resume is True
    assert chosen.training.rampup_batch_size == (8, 8, 100)
    assert chosen.model.mlp_size == 512


WRONG = {
    "train --zero 5": "--zero 5 is not one of 0, 1, 2, 3",
    "train --recompute ful": "--recompute ful is not one of none, selective, full - did you mean 'full'?",
    "train --hiden-size 64": "no option is called --hiden-size - did you mean '--hidden-size'?",
    "train --model.hidden-size 64": "no option is called --model.hidden-size - did you mean '--hidden-size'?",
    "train --no-bais": "no option is called --no-bais - did you mean '--no-bias'?",
    "train --hidden-size many": "--hidden-size is 'many', and must be an integer",
    "train --learning-rate fast": "--learning-rate is 'fast', and must be a number",
    "train --mlp-size wide": "--mlp-size is 'wide', and must be an integer",
    "train --rampup-batch-size 1 2": "--rampup-batch-size is '1', '2', and must be INT INT INT",
    "train --mesh": "--mesh needs a value",
    "train --resume yes": "unexpected argument 'yes'",
    "plan --gpus many": "--gpus is 'many', and must be an integer",
    "inspect --sweep 1.5": "--sweep is '1.5', and must be an integer",
    "convert --from hf:a": "give --from [KIND:]DIR and --to KIND:DIR, or --show DIR",
    "data preprocess": "--input and --output and --tokenizer are missing",
    "data merge --output": "--output needs a value",
    "data info": "PREFIX is missing",
    "data show": "PREFIX is missing",
    "data verify a --tokeniser b": "no option is called --tokeniser - did you mean '--tokenizer'?",
    "data clean --input a --output b --workers all": "--workers is 'all', and must be an integer",
}


ONLY_IN_HELP_ALL = (
    "(--overlap)",
    "--bias",
    "--no-bias",
    "--attention-window",
    "--norm ",
    "--rampup-batch-size",
    "--decay-steps",
)


def help_that_lists(sentence: str) -> str:
    """The help that lists what a sentence says of training: all options if it names one that is not common."""
    return "--help-all" if any(name in sentence for name in ONLY_IN_HELP_ALL) else "--help"


@pytest.mark.parametrize("line", WRONG)
def test_wrong_options_end_with_one_sentence_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the command; what the option parser says fills a box of several lines."""
    assert cli.main(line.split()) == 2
    command = " ".join(line.split()[: 2 if line.startswith("data") else 1])
    captured = capsys.readouterr()
    assert captured.err == f"error: {WRONG[line]} (mtjax {command} {help_that_lists(WRONG[line])} lists the options)\n"
    assert not captured.out


def test_what_the_option_parser_says_in_other_words_stays_one_line() -> None:
    box = "╭─ News ──╮\n│ something else   │\n│ is wrong.  │\n│ ─────── │\n│ more │\n╰─────────╯\n"
    assert cli._one_sentence(box) == "something else is wrong"


def test_values_are_checked_after_parsing() -> None:
    with pytest.raises(UserError, match="steps is 0"):
        parse("--steps", "0")


def help_of(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, word])
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(shown: str) -> set[str]:
    return {line.split()[0].partition("/")[0] for line in shown.splitlines() if line.startswith("  --")}


@pytest.mark.parametrize(("command", "hidden"), [("train", {"finetuning"}), ("finetune", set())])
def test_help_all_explains_every_field_by_group(
    command: str, hidden: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(command, "--help-all", capsys)
    for group in get_type_hints(Config):
        assert (f"\n{group} options:\n" in shown) == (group not in hidden)
    names = options_in(shown)
    for group, name in FIELDS:
        assert (f"--{name.replace('_', '-')}" in names) == (group not in hidden)
    plain = " ".join(shown.split())
    default = "In default.toml: 0.06; default: 0.02." if command == "train" else "Default: 0.02."
    assert f"Standard deviation of the initial weights (Megatron's --init-method-std). {default}" in plain
    assert "Parallelism degrees: DATAxTENSOR (64x8)" in plain


def test_help_shows_what_most_runs_set(capsys: pytest.CaptureFixture[str]) -> None:
    """Forty options by what they are for, with types that a person reads, and the way to the others."""
    shown = help_of("train", "--help", capsys)
    names = options_in(shown)
    assert len(names) == 40
    headings = [line.rstrip(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Examples", "options", *COMMON]
    assert {"--mesh", "--data", "--learning-rate", "--out", "--num-layers", "--config", "--profile"} <= names
    assert not {"--hysteresis", "--loader-timeout", "--relative-buckets", "--task"} & names
    assert f"`mtjax train --help-all` shows {len(options_in(help_of('train', '--help-all', capsys)) - names)}" in shown
    for words in ("\n  --mlp-size N\n", "\n  --out PATH\n", "\n  --decay-style {constant,linear,cosine,"):
        assert words in shown
    assert "None" not in shown
    assert "\n  --resume\n" in shown
    switch = "--tie-embeddings/--no-tie-embeddings\n      Share the embedding table with the output projection"
    assert switch in help_of("train", "--help-all", capsys)


def test_help_of_a_finetuning_is_about_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    names = options_in(help_of("finetune", "--help", capsys))
    assert {"--task", "--epochs", "--lora-rank", "--init-from", "--learning-rate", "--seeds"} <= names
    assert not {"--steps", "--hidden-size"} & names


def test_common_options_exist() -> None:
    fields = {name for _, name in FIELDS}
    for groups in (COMMON, COMMON_FINETUNING):
        listed = [name for names in groups.values() for name in names]
        assert set(listed) <= fields
        assert len(listed) == len(set(listed))


@pytest.mark.parametrize("command", ["generate", "serve", "convert", "evaluate", "predict", "ensemble"])
def test_help_of_the_other_commands_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, "--help", capsys)
    assert "None" not in shown
    module = import_module(f"mtjax.commands.{command}")
    fields = [
        field
        for field in dataclasses.fields(module.Options)
        if field.name not in ("prompts", "runs", "sampling", "storage")
    ]
    fields += dataclasses.fields(Storage) if command in ("generate", "serve") else []
    names = {"source": "from", "target": "to"}
    assert {f"--{names.get(f.name, f.name).replace('_', '-')}" for f in fields} <= options_in(shown)


ALIASES = {
    "train --lr-warmup-fraction 0.01": (
        "no option is called --lr-warmup-fraction: use --warmup-steps STEPS (STEPS = fraction x decay steps; "
        "--warmup-fraction in mtjax finetune)"
    ),
    "train --lr-decay-samples 3000000": (
        "no option is called --lr-decay-samples: use --decay-steps STEPS (STEPS = samples / global batch size)"
    ),
    "train --window-size 128,0": (
        "no option is called --window-size: use --attention-window TOKENS (TOKENS counts the token itself: the first "
        "number + 1; checkpoints that have it can't be converted)"
    ),
    "train --model-parallel-size 2": (
        "no option is called --model-parallel-size: use --mesh model=2 (2-way tensor parallel)"
    ),
    "train --lr 1e-4": "no option is called --lr: use --learning-rate",
    "train --train-iters 100": "no option is called --train-iters: use --steps",
    "train --tensor-model-parallel-size 8": (
        "no option is called --tensor-model-parallel-size: use --mesh model=8 (8-way tensor parallel)"
    ),
    "train --pipeline-model-parallel-size=4": (
        "no option is called --pipeline-model-parallel-size: use --mesh stage=4 (4 pipeline stages)"
    ),
    "train --micro-batch-size 4": "no option is called --micro-batch-size: use --microbatch-size",
    "train --bf16": "no option is called --bf16: use --compute-dtype bfloat16",
    "train --fp16": "no option is called --fp16: use --compute-dtype float16",
    "train --use-distributed-optimizer": "no option is called --use-distributed-optimizer: use --zero 1",
    "train --overlap-grad-reduce": ("no option is called --overlap-grad-reduce, and mtjax needs none: on (--overlap)"),
    "train --tp-comm-overlap": (
        "no option is called --tp-comm-overlap, and mtjax has no equivalent: tensor-parallel communication is not "
        "split into pieces that overlap with matmuls"
    ),
    "train --normalization RMSNorm": (
        "no option is called --normalization: use --norm rmsnorm (LayerNorm is layernorm)"
    ),
    "train --batch-size 8": (
        "no option is called --batch-size: use --global-batch-size (samples in a step, over all devices) or "
        "--microbatch-size (samples of a data-parallel rank at a time)"
    ),
    "train --per_device_train_batch_size 8": (
        "no option is called --per_device_train_batch_size: use --microbatch-size 8 (samples of a data-parallel rank "
        "at a time); --global-batch-size counts all devices"
    ),
    "train --max-steps 8": "no option is called --max-steps: use --steps",
    "inspect --gpus 8": (
        "no option is called --gpus: use --mesh 8 (mtjax plan --gpus 8 finds the fastest; mtjax train takes --mesh "
        "auto, too: all devices)"
    ),
    "train --tensor-model-parallel-size 2 --out a --lr 1e-3 --lr 1e-4": (
        "no option is called --tensor-model-parallel-size: use --mesh model=2 (2-way tensor parallel); nor --lr: use "
        "--learning-rate. mtjax from-megatron -- OPTIONS translates all of Megatron-LM's at once"
    ),
    "train --max-steps 8 --hlep": "no option is called --max-steps: use --steps; nor --hlep - did you mean '--help'?",
    "train --output-dir a": "no option is called --output-dir: use --out",
    "finetune --num-train-epochs 3": "no option is called --num-train-epochs: use --epochs",
    "train --num-train-epochs 3": "no option is called --num-train-epochs: use --steps",
    "train --hlep": "no option is called --hlep - did you mean '--help'?",
    "train per_device_batch_size=8": (
        "unexpected argument 'per_device_batch_size=8': use --microbatch-size 8; --global-batch-size counts all devices"
    ),
    "train steps=8": "unexpected argument 'steps=8': write --steps 8",
    "generate --from a --max-new-tokens 9": "no option is called --max-new-tokens: use --max-tokens",
    "generate --from a --batch-size 9": "no option is called --batch-size: use --batch (texts at a time)",
    "generate --from a --tp 2": "no option is called --tp: use --mesh model=2 (2-way tensor parallel)",
    "serve --model a --from b": "no option is called --model: use --from",
}


@pytest.mark.parametrize("line", ALIASES)
def test_names_of_other_tools_are_answered_by_meaning(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    ended = f"(mtjax {line.split()[0]} {help_that_lists(ALIASES[line])} lists the options)"
    assert capsys.readouterr().err == f"error: {ALIASES[line]} {ended}\n"


def test_keys_of_other_tools_in_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("[optimizer]\nlr = 1e-4\n", "unknown key 'lr' in [optimizer]: use learning_rate"),
        ("[training]\nmicro_batch_size = 4\n", "unknown key 'micro_batch_size' in [training]: use microbatch_size"),
        ("[parallel]\ntensor_model_parallel_size = 4\n", "use mesh model=4 (4-way tensor parallel)"),
    ):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        assert cli.main(["train", "--config", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_every_field_has_its_own_help() -> None:
    """tyro reads the string below a field; a field without one would show its neighbour's, or nothing."""
    trees = [ast.parse(path.read_text()) for path in Path(config.__file__).parent.glob("*.py")]
    documented = set()
    for cls in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, below in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                documented.add(field.target.id)
    assert {name for _, name in FIELDS} <= documented


def test_the_overview_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        for name in cli.COMMANDS:
            assert f"\n  {name} " in shown


def test_every_command_exists() -> None:
    modules = {"predict": "finetune.predict", "ensemble": "finetune.ensemble", "from-megatron": "convert.from_megatron"}
    for name in cli.COMMANDS:
        assert find_spec(f"mtjax.commands.{name.replace('-', '_')}") is not None
        assert find_spec(f"mtjax.{modules.get(name, name)}.__main__") is not None


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mtjax {__version__}\n"


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: no command is called 'trian' - did you mean 'train'?\n"
    assert cli.main(["--hlep"]) == 2
    assert "did you mean '--help'?" in capsys.readouterr().err


def test_arguments_come_from_the_process_when_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mtjax", "trian"])
    assert cli.main() == 2


def test_how_a_command_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> int:
        def body() -> None:
            raise error

        return cli.run_main(body)

    assert cli.run_main(lambda: None) == 0
    assert cli.run_main(lambda: 1) == 1
    assert fails(UserError("one sentence")) == 2
    assert capsys.readouterr().err == "error: one sentence\n"
    assert fails(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a bug is not the user's mistake: it keeps its traceback
        fails(ZeroDivisionError())


def test_a_value_that_nobody_typed_is_said_to_be_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--num-heads", "7"]) == 2
    said = capsys.readouterr().err
    assert "num_heads 7" in said
    assert said.endswith(f"(hidden_size is from {config.find('default')})\n")
    assert cli.main(["train", "--learning-rate", "1e-4", "--min-learning-rate", "1e-3"]) == 2
    assert "from" not in capsys.readouterr().err


ENDS = {
    "a path that is not there": (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), 2),
    "a path that may not be read": (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device", "a/b"), 2),
    "too little memory": (MemoryError("Unable to allocate 9.0 GiB"), 2),
    "a lost connection": (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),
    "a connection that broke": (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),
    "a library's own": (OSError("can't load it"), 1),
    "a file that no path names": (OSError(errno.EBADF, "Bad file descriptor"), 1),
}


@pytest.mark.parametrize("kind", ENDS)
def test_only_what_the_user_can_put_right_ends_with_code_2(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers do not restart after 2. `MTJAX_DEBUG=1` shows where an error came from; another end names it."""
    error, code = ENDS[kind]

    def body() -> None:
        raise error

    monkeypatch.delenv("MTJAX_DEBUG", raising=False)
    assert cli.run_main(body) == code
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) in shown
    assert ("MTJAX_DEBUG=1" in shown) == (code == 1)
    monkeypatch.setenv("MTJAX_DEBUG", "1")
    assert cli.run_main(body) == code
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_sentence_has_its_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTJAX_DEBUG", "1")
    assert cli.main(["train", "--steps", "0"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: steps is 0, and must be at least 1\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    code = 'from mtjax import cli; raise SystemExit(cli.run_main(lambda: print("x" * 10**6)))'
    command = f"{sys.executable} -u -c '{code}' | head -c 1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "x", "")


QUICK = """
import subprocess
import sys
from mtjax import cli
for line in {lines}:
    try:
        code = cli.main(line.split())
    except SystemExit as ended:
        code = ended.code
    slow = {{"jax", "jaxlib", "flax", "optax", "orbax", "torch"}} & set(sys.modules)
    assert code == (0 if line.endswith("--help") else 2), f"{{line}} ended with {{code}}"
    assert not slow, f"{{line}} has imported {{slow}}"
"""


def test_help_and_errors_do_not_wait_for_jax() -> None:
    """jax takes seconds to import: in a process of its own, since this one has it."""
    lines = [f"{name} --help" for name in cli.COMMANDS] + [f"data {name} --help" for name in data_commands]
    lines += [f"{name} {wrong}" for name in ("train", "plan", "inspect") for wrong in ("--steps 0", "--stesp 1")]
    lines += ["inspect --sweep 8 --vs 1x8", "plan --gpus 0", "convert --from a", "convert --from a --to b:c"]
    ended = subprocess.run([sys.executable, "-c", QUICK.format(lines=lines)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_family_on_the_command_line_brings_its_settings() -> None:
    model = cli.parse(["--family", "llama", "--norm-epsilon", "1e-6"], "prog", "", Options).config.model
    assert (model.family, model.norm, model.position, model.norm_epsilon) == ("llama", "rmsnorm", "rope", 1e-6)
    assert cli.parse(["--family=llama", "--bias"], "prog", "", Options).config.model.bias


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--balance-loss", "0.5"], (["--router-aux-loss", "0.5"], ["--balance-loss is now --router-aux-loss"])),
        (["--failed_saves=2"], (["--max-failed-saves=2"], ["--failed_saves is now --max-failed-saves"])),
        (
            ["--expert-method", "exchange"],
            (
                ["--expert-dispatch", "all-to-all"],
                ["--expert-method exchange is now --expert-dispatch all-to-all"],
            ),
        ),
        (
            ["--context-method=gather"],
            (
                ["--context-method=all-gather"],
                ["--context-method gather is now --context-method all-gather"],
            ),
        ),
        (["--schedule"], (["--pipeline-schedule"], ["--schedule is now --pipeline-schedule"])),
        (
            ["--context-method", "ring", "--prompt", "schedule"],
            (["--context-method", "ring", "--prompt", "schedule"], []),
        ),
    ],
)
def test_options_by_their_old_names_are_read_with_a_note(words, expected) -> None:
    assert with_new_options(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--offload", "parameters, optimizer", "--steps", "4"], ["--offload", "optimizer,parameters", "--steps", "4"]),
        (["--offload=parameters,optimizer"], ["--offload=optimizer,parameters"]),
        (["--offload", "optimizer,foo"], ["--offload", "optimizer,foo"]),
        (["--offload"], ["--offload"]),
    ],
)
def test_names_joined_by_commas_are_read_in_any_order(words, expected) -> None:
    assert options_in_order(words) == expected
