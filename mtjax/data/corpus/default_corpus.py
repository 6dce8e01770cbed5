"""The default corpus: the documentation that every Python ships, so that a first run needs no download.

The language reference (`pydoc_data`), and the docstrings of the standard library: of the modules built into the
interpreter, and of those that come as sources. The same interpreter gives the same bytes.
"""

import ast
import importlib
import inspect
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mtjax.errors import UserError

# What is not of the language, or is tables rather than text: character maps, and the source of the reference above.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
# Raised when the corpus changes, so that cached tokens of the former one are not taken for it.
VERSION = 3


def identity() -> dict[str, object]:
    """Returns what the corpus depends on: the key of everything that is computed from it."""
    # The path, too: two builds of one version may have other modules.
    return {"corpus": "python", "version": VERSION, "python": sys.version, "root": str(_library())}


def documents() -> list[str]:
    """Returns all documents, about 2.7 MB of text, in a fixed order.

    Raises:
      UserError: this Python came without its sources.
    """
    library = _library()
    sources = [p for p in sorted(library.rglob("*.py")) if not SKIPPED_FOLDERS & set(p.relative_to(library).parts)]
    texts = [*_reference(), *_built_in_docstrings(), *(_docstrings(path) for path in sources)]
    texts = [text for text in texts if text.strip()]
    # Some distributions ship bytecode alone, in which the sources' docstrings can't be found.
    if sum(map(len, texts)) < 1_000_000:
        raise UserError(f"this Python came without its sources ({_library()}); give text to train on with --data FILE")
    # The split into training and validation text goes by position: in the order of paths, validation text would be the
    # last modules of the alphabet.
    random.Random(0).shuffle(texts)
    return texts


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def _docstrings(path: Path) -> str:
    """Returns the docstring of a module, and those of its functions and classes, each after its name and arguments."""
    try:
        module = ast.parse(_read(path))
    except (SyntaxError, ValueError):  # what the library ships as an example of wrong source, or for another version
        return ""
    return "\n\n".join([ast.get_docstring(module) or "", *_documented(module, "")]).strip()


def _documented(parent: ast.AST, owner: str) -> Iterator[str]:
    """Yields for each documented member of a module or class "name(arguments)", and the docstring below it."""
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_class = isinstance(node, ast.ClassDef)
        text = ast.get_docstring(node)
        if text:
            title = f"class {owner}{node.name}" if is_class else f"{owner}{node.name}({ast.unparse(node.args)})"
            yield f"{title}\n\n{text}"
        if is_class:
            yield from _documented(node, f"{owner}{node.name}.")


def _reference() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    yield from (topics[name] for name in sorted(topics))


def _built_in_docstrings() -> Iterator[str]:
    """Yields a document per module written in C: its docstring and those of its functions and classes."""
    for name in sorted(sys.builtin_module_names):
        # `_xx...` are CPython's modules for its own tests.
        if name.startswith("_xx") or name == "__main__":
            continue
        module = importlib.import_module(name)
        parts = [inspect.getdoc(module) or ""]
        for attribute in sorted(vars(module)):
            member = getattr(module, attribute)
            if isinstance(member, type) or inspect.isbuiltin(member):
                parts.append(f"{attribute}: {_docstring(member)}")
        yield "\n\n".join(part for part in parts if part)


def _docstring(member: object) -> str:
    text = getattr(member, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def write(path: Path) -> None:
    """Writes the corpus as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents())
