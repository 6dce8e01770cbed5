"""Writes docs/reference/: every setting of a run, from the dataclasses of `mtjax.config`, and which features combine.

python docs/make_reference.py           # write the pages
python docs/make_reference.py --check   # exit with status 1 if they are not what it would write
"""

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import compatibility
import same_numbers

from mtjax.config import Config
from mtjax.help import Option, options_of

FOLDER = Path(__file__).parent / "reference"
INTRODUCTION = """# Settings

<!-- Written by docs/make_reference.py from mtjax/config: edit the docstrings there, then `make docs`. -->

Every setting has one name. On the command line `num_layers` is `--num-layers 24`; in a TOML file it is
`num_layers = 24` in the section `[model]`. Options override the file that `--config` names, which overrides the
defaults below. `mtjax train --help` shows the same text.
"""


def main() -> int:
    """Writes or checks the pages; returns the exit status."""
    pages = {FOLDER / "settings.md": settings_page(), FOLDER / "compatibility.md": compatibility.page()}
    pages[FOLDER / "same-numbers.md"] = same_numbers.page()
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
    sections = itertools.groupby(options_of(Config), lambda option: option.group)
    return INTRODUCTION + "".join(_section(name, options) for name, options in sections)


def _section(name: str, options: Iterable[Option]) -> str:
    rows = [
        f"| `{option.field}` | {_values(option.type)} | {_default(option.default)} | {_cell(option.text)} |\n"
        for option in options
    ]
    return f"\n## [{name}]\n\n| setting | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def _values(kind: Any) -> str:
    """Returns a type in words: `integer`, `none, selective, full`, `integer ...`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return " ".join("..." if member is Ellipsis else _values(member) for member in arguments)
    return {bool: "yes/no", str: "text", Path: "path", int: "integer", float: "number"}[kind]


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
