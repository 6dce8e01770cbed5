"""A plugin of pytest that prints the tests that a run has chosen: `pytest -p tests.listed --collect-only`."""

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        print(f"listed {item.nodeid}")
