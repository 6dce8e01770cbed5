"""The words of docs, help, messages and docstrings: expressions for which the field has a term do not come back."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"ranks that share|shares? (the tokens of )?samples": "context parallel ranks",
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


@cache
def texts() -> list[tuple[str, str]]:
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "mtjax").rglob("*.py")):
        yield from ((f"{path.relative_to(ROOT)}:{line}", text) for line, text in strings_of(path))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in sorted(page for page in pages if "notes" not in page.parts):
        yield str(path.relative_to(ROOT)), path.read_text()


@pytest.mark.parametrize("pattern", INSTEAD)
def test_words_for_which_the_field_has_a_term(pattern: str) -> None:
    found = [f"{where}: {match[0]!r}" for where, text in texts() for match in re.finditer(pattern, text, re.IGNORECASE)]
    assert not found, f"write {INSTEAD[pattern]}"


def test_the_search_finds_them() -> None:
    for pattern, text in {r"\blearnt\b": "what is learnt", r"\bfullest\b": "the fullest stage"}.items():
        assert pattern in INSTEAD and re.search(pattern, text)
