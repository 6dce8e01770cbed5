"""The command line: commands, options over file over defaults, help, and how errors end."""

import ast
import dataclasses
import errno
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

from mtjax import __version__, cli, config
from mtjax.config import Config
from mtjax.data.__main__ import COMMANDS as data_commands
from mtjax.errors import UserError

FIELDS = [(group, f.name) for group, cls in get_type_hints(Config).items() for f in dataclasses.fields(cls)]


@dataclasses.dataclass(frozen=True)
class Options:
    """Beside the config."""

    target: str = "cpu"
    """What for."""


def parse(*words: str) -> cli.Command[Options]:
    return cli.parse(words, "mtjax test", "Tests.", Options)


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
    "train --hidden-size many": "--hidden-size is 'many', and must be a whole number",
    "train --learning-rate fast": "--learning-rate is 'fast', and must be a number",
    "train --mlp-size wide": "--mlp-size is 'wide', and must be a whole number",
    "train --rampup-batch-size 1 2": "--rampup-batch-size is '1', '2', and must be INT INT INT",
    "train --mesh": "--mesh needs a value",
    "train --resume yes": "'yes' belongs to no option",
    "plan --gpus many": "--gpus is 'many', and must be a whole number",
    "inspect --sweep 1.5": "--sweep is '1.5', and must be a whole number",
    "convert --from hf:a": "--to is missing",
    "data preprocess": "--input and --output and --tokenizer are missing",
    "data merge --output": "--output needs a value",
    "data info": "PREFIX is missing",
    "data show": "PREFIX is missing",
    "data verify a --tokeniser b": "no option is called --tokeniser - did you mean '--tokenizer'?",
    "data clean --input a --output b --workers all": "--workers is 'all', and must be a whole number",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_options_end_with_one_sentence_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the command; what the option parser says fills a box of several lines."""
    assert cli.main(line.split()) == 2
    command = " ".join(line.split()[: 2 if line.startswith("data") else 1])
    captured = capsys.readouterr()
    assert captured.err == f"error: {WRONG[line]} (mtjax {command} --help lists the options)\n"
    assert not captured.out


def test_what_the_option_parser_says_in_other_words_stays_one_line() -> None:
    box = "╭─ News ──╮\n│ something else   │\n│ is wrong.  │\n│ ─────── │\n│ more │\n╰─────────╯\n"
    assert cli._one_sentence(box) == "something else is wrong"


def test_values_are_checked_after_parsing() -> None:
    with pytest.raises(UserError, match="steps is 0"):
        parse("--steps", "0")


@pytest.mark.parametrize(("command", "hidden"), [("train", {"finetuning"}), ("finetune", set())])
def test_help_explains_every_field_by_group(command: str, hidden: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for group in get_type_hints(Config):
        assert (f" {group} options " in shown) == (group not in hidden)
    words = set(shown.replace(",", " ").split())
    for group, name in FIELDS:
        assert (f"--{name.replace('_', '-')}" in words) == (group not in hidden)
    plain = " ".join(shown.replace("│", " ").split())
    assert "Standard deviation of initial weights." in plain
    assert "Devices as DATAxMODEL, say 64x8" in plain


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
    for module, _ in cli.COMMANDS.values():
        assert find_spec(f"{module}.__main__") is not None


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mtjax {__version__}\n"


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: no command is called 'trian' - did you mean 'train'?\n"


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
