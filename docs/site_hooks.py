"""Hooks of mkdocs: what a page in the repository links to outside of docs/ has no page on the site."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into plain text."""
    return OUTSIDE.sub(r"\1", markdown)
