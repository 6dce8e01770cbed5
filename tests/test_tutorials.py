"""The commands of the tutorials are ones that mtjax understands: options exist, and settings fit each other."""

import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mtjax import cli
from mtjax.commands.data import COMMANDS as DATA_COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
CONFIG_OF = {"runs/8b/config.toml": "llama3-8b", "runs/small/config.toml": "gpt2-small"}
"""Config of a run on a page, as the command above it wrote it; `default` for the others."""


class Parsed(BaseException):
    """Raised instead of running a command whose options are valid."""


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words after `mtjax` of each indented command line, with its continuation lines."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"^    (.*)$", text, re.MULTILINE):
        if match := re.match(r"(?:srun (?:--\S+ )*|echo .*\| )?mtjax (.*)", line):
            yield [word for word in shlex.split(match[1], comments=True) if word != "&"]


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command as far as its options are parsed and checked."""
    name, *argv = words
    if name == "launch":
        check(["train", *argv[argv.index("--") + 1 :]], monkeypatch)
        argv = argv[: argv.index("--")]
    if name == "data":
        name, argv = f"data.commands.{argv[0]}", argv[1:]
        assert name.rpartition(".")[2] in DATA_COMMANDS
        module = import_module(f"mtjax.{name}")
    else:
        module = import_module(f"mtjax.commands.{name.replace('-', '_')}")

    def then_stop(parse):
        def parsed(*args, **kwargs):
            parse(*args, **kwargs)
            raise Parsed

        return parsed

    with monkeypatch.context() as patch:
        for parser in ("parse", "read"):
            for owner in (module, cli):
                if hasattr(owner, parser):
                    patch.setattr(owner, parser, then_stop(getattr(owner, parser)))
        if name == "finetune":  # its defaults depend on the weights, which are not there
            patch.setattr(module, "base_config", lambda config, _: config)
        with pytest.raises(Parsed):
            module.main(argv if name != "launch" else [*argv, "--"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(commands_of(page))
    assert len(found) >= 4
    for words in found:
        for word in words:
            if word.endswith("/config.toml"):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / "configs" / f"{CONFIG_OF.get(word, 'default')}.toml", word)
        check(words, monkeypatch)


def test_a_wrong_option_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        check(["generate", "--from", "runs/first", "--prompt", "Return the"], monkeypatch)
    assert "no option is called --prompt" in capsys.readouterr().err
