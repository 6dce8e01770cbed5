"""The arrows between the rooms of `mtjax/data`, read from the source."""

from pathlib import Path

import pytest

import mtjax.data
from tests.test_architecture import imports_of, module_of, within

ROOM = Path(mtjax.data.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))

SHARED = {"cache", "progress", "json_lines"}
ARROWS = {
    "cache": set(),
    "progress": set(),
    "json_lines": set(),
    "tokens": SHARED,
    "corpus": SHARED | {"tokens"},
    "samples": SHARED | {"tokens", "corpus"},
    "cleaning": SHARED | {"tokens", "corpus"},
    "batches": {"samples"},
    "run_text": SHARED | {"tokens", "corpus"},
    "split_opener": SHARED | {"tokens", "corpus", "samples", "run_text"},
    "neighbours": SHARED | {"tokens", "corpus", "samples", "batches", "split_opener"},
    "datasets": SHARED | {"tokens", "corpus", "samples", "run_text", "split_opener", "neighbours"},
    "commands": SHARED | {"tokens", "corpus", "samples", "cleaning"},
}
"""Room or file of `mtjax/data` -> what it may import there beside itself."""


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOM)) for path in FILES])
def test_arrows_between_rooms_point_one_way(path):
    room = module_of(path).removeprefix("data").removeprefix(".").partition(".")[0]
    if room in ("", "__main__"):
        return
    assert room in ARROWS, f"say in ARROWS where {room} stands"
    inside = [name.removeprefix("data.") for name in imports_of(path) if name.startswith("data.")]
    wrong = [name for name in inside if not within(name, ARROWS[room] | {room})]
    assert not wrong, f"{room} imports {wrong}"
