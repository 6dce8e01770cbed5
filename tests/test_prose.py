"""The words of docs, help, messages, docstrings and comments: no expressions for which the field has a term."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"ranks that share|shares? (the tokens of |every |each |a )?samples?\b": "context parallel ranks",
    r"\b(model|data|expert|context|batch) ways\b": "tensor, data, expert, context parallel degree",
    r"\bsplit sequences\b": "sequence parallelism",
    r"\bin whole\b|\bwhole numbers?\b": "full, unsharded; integer",
    r"\b(go|goes|going) ahead\b|\bsends? ahead\b": "prefetch",
    r"\bcomputed (again|once more|anew)\b": "recomputed",
    r"\bturned round\b|\blie turned\b": "transposed",
    r"\blearnt\b": "trainable, trained",
    r"\bset aside\b": "quarantined",
    r"\bfullest\b": "peak",
    r"\bnobody\b|\bsomebody\b|\banybody\b|\beverybody\b": "name the process, the caller, the user",
    r"\b(leave|leaves) (it|one|them) out\b": "remove it, skip it",
    r"\bpage of metadata\b": "metadata",
    r"\bunder way\b": "in flight, running",
    r"\bhas room for\b|\bhave room for\b": "fits, holds",
}
"""Pattern -> what to write."""
KEYS = ("computed again",)
"""Strings that are keys of JSON."""


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and messages of a Python file: its strings of several words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and node.value not in KEYS
        ):
            yield node.lineno, node.value


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Comments of a Python file; those of lines below each other are one text."""
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield first, "\n".join(lines)
            lines = []
        first, last = (first if lines else token.start[0]), token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield first, "\n".join(lines)


@cache
def texts() -> list[tuple[str, str]]:
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "mtjax").rglob("*.py")):
        for line, text in (*strings_of(path), *comments_of(path)):
            yield f"{path.relative_to(ROOT)}:{line}", text
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in sorted(page for page in pages if "notes" not in page.parts):
        yield str(path.relative_to(ROOT)), path.read_text()


@pytest.mark.parametrize("pattern", INSTEAD)
def test_words_for_which_the_field_has_a_term(pattern: str) -> None:
    found = [f"{where}: {match[0]!r}" for where, text in texts() for match in matches(pattern, text)]
    assert not found, f"write {INSTEAD[pattern]}"


def matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Where a pattern is in a text, also across the end of a line."""
    return re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)


def test_the_search_finds_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1  # in\n# whole\n\n# the fullest stage\n")
    texts = dict(comments_of(tmp_path / "a.py"))
    assert texts == {1: "in\nwhole", 4: "the fullest stage"}
    for pattern, text in {r"\bin whole\b|\bwhole numbers?\b": texts[1], r"\bfullest\b": texts[4]}.items():
        assert pattern in INSTEAD and list(matches(pattern, text))
