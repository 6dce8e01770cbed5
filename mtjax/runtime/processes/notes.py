"""Notes for the user."""

from collections.abc import Iterable

from mtjax.data.progress import say
from mtjax.runtime.processes.coordination import this_process


def say_notes(notes: Iterable[str]) -> None:
    """Prints notes for the user on stderr, in the first process only."""
    if this_process():
        return
    for note in notes:
        say(f"note    {note}")
