"""The JSON object of a request, read field by field: whatever is wrong is a 400 that names the field."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields as fields_of
from typing import Any

from mtjax.config.field_metadata import Bound, setting_of
from mtjax.errors import first_line, nearest, shortened
from mtjax.generate.request import Sampling
from mtjax.serve.api_error import ApiError

BOUNDS = {field.name: setting_of(field).bound for field in fields_of(Sampling)}


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
      Refused: it is not an object in JSON.
    """

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        value = json.loads(body.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {first_line(e)}") from e
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shortened(value)}, and should be a JSON object")
    return value


class Fields:
    """An object, read by asking for its fields; null is the same as not given.

    Args:
      values: the object.
      without_effect: fields that may be there and change nothing.
    """

    def __init__(self, values: Mapping[str, Any], without_effect: Collection[str] = ()) -> None:
        self._remaining = {name: value for name, value in values.items() if value is not None}
        self._known = set(without_effect)
        for name in without_effect:
            self._remaining.pop(name, None)

    def has(self, name: str) -> bool:
        """Tells whether a field is given and has not been taken yet."""
        return name in self._remaining

    def take(self, name: str) -> Any:
        """A field of any kind; None when it is not given."""
        self._known.add(name)
        return self._remaining.pop(name, None)

    def boolean(self, name: str) -> bool:
        """True or false; false when it is not given."""
        return self._typed(name, bool, "true or false") or False

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._typed(name, str, "a string")
        return None if value is None else checked_text(value, name)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number."""
        value = self._typed(name, int, "a whole number")
        if value is not None and not least <= value <= most:
            raise invalid_value(name, value, f"from {least} to {most}")
        return value

    def number(self, name: str, is_valid: Callable[[float], bool], expected: str) -> float | None:
        """A number; `words` say which are admitted."""
        value = self._typed(name, int | float, "a number")
        try:
            number = None if value is None else float(value)
        except OverflowError:
            raise invalid_value(name, value, expected) from None
        if number is not None and not is_valid(number):
            raise invalid_value(name, value, expected)
        return number

    def sampling(self, **defaults: Any) -> Sampling:
        """How tokens are chosen: fields with the names that `Sampling` has; `defaults` are of those not given.

        A seed below 0 counts down from 2^64, as other servers have it.
        """
        chosen = dict(defaults)
        for field in fields_of(Sampling):
            if field.name in ("max_tokens", "seed"):
                continue
            bound = BOUNDS[field.name]
            assert bound is not None
            value = self._bounded(field.name, bound, whole=field.type is int)
            if value is not None:
                chosen[field.name] = value
        seed = self.integer("seed", -(2**63), 2**64 - 1)
        if seed is not None:
            chosen["seed"] = seed % 2**64
        return Sampling(**chosen)

    def _bounded(self, name: str, bound: Bound, *, whole: bool) -> float | None:
        value = self._typed(name, int, "a whole number") if whole else self._typed(name, int | float, "a number")
        if value is not None and (expected := bound.why_not(value)):
            raise invalid_value(name, value, expected)
        return value if value is None or whole else float(value)

    def reject_unsupported(self, name: str, what: str, *same: Any) -> None:
        """A field of which only values that change nothing are taken: `what` says what the server lacks."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in same):
            raise ApiError(400, f"{name} is {shortened(value)}, and {what}: leave it out", name)

    def reject_unknown(self) -> None:
        """Refuses what nobody has asked for."""
        for name in self._remaining:
            known = nearest(name, self._known)
            raise ApiError(400, f"no field is called {shortened(repr(name))}{known}", shortened(name))

    def _typed(self, name: str, kind: Any, expected: str) -> Any:
        value = self.take(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise invalid_value(name, json.dumps(value), expected)
        return value


def invalid_value(name: str, value: object, expected: str) -> ApiError:
    """A field whose value is not one of those in words."""
    return ApiError(400, f"{name} is {shortened(value)}, and must be {expected}", name)


def checked_text(text: str, name: str) -> str:
    """A string whose characters are whole: JSON can write halves of them.

    Raises:
      Refused: they are not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ApiError(400, f"{name} has half a character at {e.start}: write it in UTF-8", name) from e
    return text


def strings_or_one(value: Any, name: str, most: int) -> tuple[str, ...]:
    """A string, or a list of at most `most`; nothing for None."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid_value(name, json.dumps(value), "a string or a list of strings")
    if len(texts) > most:
        raise invalid_value(name, f"a list of {len(texts)}", f"of at most {most}")
    return tuple(checked_text(text, name) for text in texts)
