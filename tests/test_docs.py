"""Documentation that is written from the code is what the code says now."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_settings_page_is_what_the_dataclasses_say():
    checked = subprocess.run(
        [sys.executable, "docs/make_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_every_page_is_on_the_site_and_every_link_of_the_readme_has_a_file():
    pages = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    found = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == found
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


def test_the_tests_that_the_compatibility_page_names_exist():
    text = (ROOT / "docs/reference/compatibility.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)`", text)
    assert len(named) > 20 and all((ROOT / path).exists() for path in named)


def test_the_files_and_functions_that_the_architecture_page_names_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "mtjax").rglob("*.py"))
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    assert len(paths) > 40
    roots = (ROOT / "mtjax", ROOT)
    assert [path for path in paths if not any((root / path).is_file() for root in roots)] == []
    where = text[text.index("### Where is ...?") : text.index("## Packages")]
    names = re.findall(r"`([a-z_]+)`(?: makes| decides| \()", where)
    assert len(names) >= 10 and [name for name in names if not re.search(rf"\b{name}\b", code)] == []


def test_the_source_files_that_pages_name_exist():
    """Notes are of their time: they may name files that are gone."""
    folders = ("mtjax", "tests", "benchmarks", "docs")
    known = {f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    # Scripts of Megatron-LM and of SQuAD, and what a reader may add.
    others = {"/tools/preprocess_data.py", "/evaluate-v2.0.py", "/models/mixers/NAME.py"}
    others |= {f"/pretrain_{name}.py" for name in ("gpt", "bert", "mamba")}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts] + [*ROOT.glob("*.md")]
    named = [(page.name, f"/{name}") for page in pages for name in re.findall(r"`([\w/.-]+\.py)`", page.read_text())]
    assert len(named) > 150
    wanted = [(page, name.replace("/NAME/", "/gpt/")) for page, name in named if name not in others]
    assert [pair for pair in wanted if not any(path.endswith(pair[1]) for path in known)] == []


def test_examples_that_train_a_preset_on_text_name_its_tokenizer():
    """Without one, a small vocabulary is trained on the text, and most of a preset's table is unused."""
    presets = {path.stem: "vocab_size = " in path.read_text() for path in (ROOT / "configs").glob("*.toml")}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts]
    texts = [*pages, *ROOT.glob("*.md"), *(ROOT / "mtjax").rglob("*.py"), *(ROOT / "configs").glob("*.toml")]
    commands = [
        (path.name, command)
        for path in texts
        for command in re.findall(
            r"^[ #]*((?:srun |torchrun .*)?mtjax (?:train|launch|compile) (?:.*\\\n)*.*)", path.read_text(), re.M
        )
    ]
    named = [(page, command) for page, command in commands if presets.get(_after("--config", command))]
    assert len(named) > 60
    text = [pair for pair in named if "--data" in pair[1] and not _after("--data", pair[1]).endswith("_document")]
    assert [pair for pair in text if "--tokenizer" not in pair[1]] == []


def _after(option: str, command: str) -> str:
    """Returns the word after an option of a command; "" without the option."""
    return command.partition(f"{option} ")[2].split(" ")[0].strip()


def test_what_pages_import_from_the_package_exists():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    lines = [line for page in pages for line in re.findall(r"^ *(from mtjax\S* import .*)", page.read_text(), re.M)]
    assert len(lines) > 5
    wrong = []
    for line in lines:
        for node in ast.parse(line).body:
            assert isinstance(node, ast.ImportFrom) and node.module, line
            wrong += [f"{node.module}.{alias.name}" for alias in node.names if not exists(node.module, alias.name)]
    assert wrong == []


def exists(module: str, name: str) -> bool:
    """Whether a module of the package defines or imports a name at its top level, or has a module of this name."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (path / name).is_dir() or (path / f"{name}.py").is_file():
        return True
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        match node:
            case ast.FunctionDef(name=defined) | ast.AsyncFunctionDef(name=defined) | ast.ClassDef(name=defined):
                names.add(defined)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=defined)):
                names.add(defined)
            case ast.ImportFrom(names=imported):
                names |= {alias.asname or alias.name for alias in imported}
    return name in names


@pytest.mark.long
def test_the_page_on_the_same_numbers_has_the_marks_of_today() -> None:
    noted = json.loads((ROOT / "docs/same_numbers.json").read_text())["tests"]
    files = sorted({name.partition("::")[0] for name in noted})
    for level, marks in (("suite", "not (long or exhaustive)"), ("long", "long and not exhaustive")):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "tests.listed", "-m", marks, *files]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        collected = set(re.findall(r"^listed (.*)$", listed, re.MULTILINE))
        assert {name for name, note in noted.items() if note["level"] == level} <= collected, level


def test_the_tests_that_the_page_on_the_same_numbers_counts_exist():
    noted = json.loads((ROOT / "docs/same_numbers.json").read_text())["tests"]
    functions = {name.partition("[")[0] for name in noted}
    assert len(functions) > 4
    for path, _, function in (name.partition("::") for name in functions):
        assert f"def {function}(" in (ROOT / path).read_text(), function
