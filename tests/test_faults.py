"""The planted faults of `tests/faults.py`, whose texts follow the code."""

from tests.faults import FAULTS, ROOT


def test_the_text_of_every_fault_is_in_the_package_once():
    package = "\0".join(path.read_text() for path in (ROOT / "mtjax").rglob("*.py"))
    assert {fault.what: count for fault in FAULTS if (count := package.count(fault.old)) != 1} == {}
