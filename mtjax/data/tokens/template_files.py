"""The files with chat templates in a tokenizer's folder, as transformers names them."""

from pathlib import Path

DEFAULT = "default"
"""The name of the template for conversations in general."""
TEMPLATE_FILE = "chat_template.jinja"
"""The template of that name; it overrides the one in tokenizer_config.json."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""A folder with files NAME.jinja, which are templates with other names."""


def template_files(folder: Path) -> dict[str, Path]:
    """Finds the files of a folder, by the names of their templates."""
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    return ({DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {}) | files


def template_names(folder: Path) -> list[str]:
    """Lists the same files by their paths in the folder."""
    return [str(path.relative_to(folder)) for path in template_files(folder).values()]
