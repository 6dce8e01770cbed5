"""Hooks of mkdocs: what a page in the repository links to outside of docs/ has no page on the site."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files of the repository into plain text."""
    up = r"\.\./" * (page.file.src_uri.count("/") + 1)  # out of docs/, from a page in one of its folders
    return re.sub(rf"\[([^\]]+)\]\({up}[^)]+\)", r"\1", markdown)
