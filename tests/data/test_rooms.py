"""The arrows between the rooms of `mtjax/data` and the samples of the families, read from the source."""

import pytest

from tests.test_architecture import FILES as ALL
from tests.test_architecture import PACKAGE, imports_of, module_of, within

FILES = [path for path in ALL if within(module_of(path), {"data"})]

SHARED = {"cache", "progress", "json_lines"}
ARROWS = {
    "cache": set(),
    "progress": set(),
    "json_lines": set(),
    "tokens": SHARED,
    "corpus": SHARED | {"tokens"},
    "samples": SHARED | {"tokens", "corpus"},
    "families": SHARED | {"tokens", "corpus", "samples"},
    "cleaning": SHARED | {"tokens", "corpus"},
    "batches": {"samples"},
    "run_text": SHARED | {"tokens", "corpus"},
    "split_opener": SHARED | {"tokens", "corpus", "samples", "run_text"},
    "neighbours": SHARED | {"tokens", "corpus", "samples", "families", "batches", "split_opener"},
    "datasets": SHARED | {"tokens", "corpus", "samples", "run_text", "split_opener", "neighbours"},
    "commands": SHARED | {"tokens", "corpus", "samples", "cleaning"},
}
"""Room or file of `mtjax/data`, or the families' samples -> what it may import there beside itself."""


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_arrows_between_rooms_point_one_way(path):
    room = module_of(path).removeprefix("data").removeprefix(".").partition(".")[0]
    if room in ("", "__main__"):
        return
    assert room in ARROWS, f"say in ARROWS where {room} stands"
    inside = [name.removeprefix("data.") for name in imports_of(path) if name.startswith("data.")]
    wrong = [name for name in inside if not within(name, ARROWS[room] | {room})]
    assert not wrong, f"{room} imports {wrong}"
