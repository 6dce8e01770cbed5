"""Writes docs/reference/: every setting of a run, from the dataclasses of `mtjax.config`.

python docs/make_reference.py           # write the pages
python docs/make_reference.py --check   # exit with status 1 if they are not what it would write
"""

import ast
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mtjax.config import Config

FOLDER = Path(__file__).parent / "reference"
INTRODUCTION = """# Settings

<!-- Written by docs/make_reference.py from mtjax/config: edit the docstrings there, then `make docs`. -->

Every setting has one name. On the command line `num_layers` is `--num-layers 24`; in a TOML file it is
`num_layers = 24` in the section `[model]`. Options override the file that `--config` names, which overrides the
defaults below. `mtjax train --help` shows the same text.
"""


def main() -> int:
    """Writes or checks the pages; returns the exit status."""
    pages = {FOLDER / "settings.md": settings_page()}
    if "--check" in sys.argv[1:]:
        stale = [str(path) for path, text in pages.items() if not path.exists() or path.read_text() != text]
        if stale:
            print(f"stale: {', '.join(stale)} - run `make docs`", file=sys.stderr)
        return bool(stale)
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


def settings_page() -> str:
    """All settings by section, as Markdown."""
    return INTRODUCTION + "".join(_section(name, cls) for name, cls in get_type_hints(Config).items())


def _section(name: str, cls: Any) -> str:
    docs, kinds = attribute_docstrings(cls), get_type_hints(cls)
    rows = [
        f"| `{field.name}` | {_values(kinds[field.name])} | {_default(field)} | {_cell(docs.get(field.name, ''))} |\n"
        for field in dataclasses.fields(cls)
    ]
    return f"\n## [{name}]\n\n| setting | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def attribute_docstrings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass and of its bases, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= dict(_docstrings_in(base))
    return found


def _docstrings_in(cls: type) -> Iterator[tuple[str, str]]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            yield field.target.id, inspect.cleandoc(str(text.value.value))


def _values(kind: Any) -> str:
    """A type for people: `int`, `none, selective, full`, `two ints`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return ", ".join(_values(a) for a in arguments if a is not type(None))
    if origin is tuple:
        inner = [a for a in arguments if a is not Ellipsis]
        return " ".join(_values(a) for a in inner) + (" ..." if Ellipsis in arguments else "")
    return {bool: "yes/no", str: "text", Path: "path", int: "integer", float: "number"}.get(kind, _cell(str(kind)))


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default
    if value is dataclasses.MISSING or value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
