"""The tasks by name."""

from collections.abc import Mapping
from pathlib import Path

from mtjax.errors import UserError
from mtjax.evaluate.tasks.lambada import LAMBADA
from mtjax.evaluate.tasks.perplexity import PERPLEXITY
from mtjax.evaluate.tasks.task import TaskKind
from mtjax.evaluate.tasks.wikitext103 import WIKITEXT103

KINDS: Mapping[str, TaskKind] = {kind.name: kind for kind in (WIKITEXT103, LAMBADA, PERPLEXITY)}


def check_data(task: str, path: Path, option: str) -> None:
    """Checks that a task's file exists.

    Raises:
      UserError: it does not exist, or is a folder; `option` names the option for the message.
    """
    is_corpus = path.with_suffix(".idx").is_file() or Path(f"{path}.idx").is_file()
    if not path.is_file() and not (task == PERPLEXITY.name and is_corpus):
        raise UserError(f"{option} {path} {'is a folder: name a file' if path.is_dir() else 'does not exist'}")
