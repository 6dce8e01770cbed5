"""The planted faults of `tests/faults.py`, whose texts follow the code."""

from functools import cache

from tests.faults import FAULTS, ROOT


@cache
def texts_of(folder: str) -> str:
    path = ROOT / "tests" / folder
    return "\n".join(each.read_text() for each in ([path] if path.is_file() else path.rglob("*.py")))


def test_the_text_of_every_fault_is_in_the_package_once():
    package = "\0".join(path.read_text() for path in (ROOT / "mtjax").rglob("*.py"))
    assert {fault.what: count for fault in FAULTS if (count := package.count(fault.old)) != 1} == {}


def test_the_tests_that_should_notice_are_in_their_folders():
    assert [f.what for f in FAULTS if f"def {f.test.partition('[')[0]}" not in texts_of(f.folder)] == []
