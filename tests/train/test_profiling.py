"""`--profile`: which steps it names."""

from types import SimpleNamespace
from typing import Any

import pytest

from mtjax.errors import UserError
from mtjax.train.observability import profiling
from mtjax.train.observability.profiling import named_steps, parse_steps


@pytest.mark.parametrize(("text", "steps"), [("10:13", [10, 11, 12, 13]), ("7", [7]), ("2:2", [2]), (None, [])])
def test_steps_by_their_first_and_last(text: str | None, steps: list[int]) -> None:
    assert list(parse_steps(text)) == steps


@pytest.mark.parametrize("text", ["", "a", "0:3", "5:4", "1:2:3", "-1:2", "1.5:2", "9" * 13])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="give the first and the last step to trace, like 10:13"):
        parse_steps(text)


def test_a_program_is_compiled_for_a_trace_only_where_steps_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.xla_options, "traced", lambda chosen, device: (chosen, device))
    program: Any = SimpleNamespace(xla="options", mesh=SimpleNamespace(local_devices=["gpu"]))
    assert not named_steps(None, program) and program.xla == "options"
    assert list(named_steps("2:3", program)) == [2, 3] and program.xla == ("options", "gpu")
