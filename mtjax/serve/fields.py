"""Reads the JSON object of a request field by field; invalid values raise a 400 error that names the field."""

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
    """Parses the JSON object of a request's body.

    Raises:
      ApiError: the body is not a JSON object.
    """

    def constant(name: str) -> Any:
        # Python's parser accepts NaN and Infinity, which JSON does not have.
        raise ValueError(f"{name} is not valid in JSON")

    try:
        value = json.loads(body.decode(), parse_constant=constant)
    # RecursionError: some thousand opening brackets are enough.
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {first_line(e)}") from e
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shortened(value)}, and must be a JSON object")
    return value


class Fields:
    """A JSON object whose fields are taken one by one; null counts as not given.

    Args:
      values: the object.
      without_effect: fields that are accepted and ignored.
    """

    def __init__(self, values: Mapping[str, Any], without_effect: Collection[str] = ()) -> None:
        # OpenAI's package sends null for what a caller sets to None.
        self._remaining = {name: value for name, value in values.items() if value is not None}
        self._known = set(without_effect)
        for name in without_effect:
            self._remaining.pop(name, None)

    def has(self, name: str) -> bool:
        """Returns whether a field is given and has not been taken yet."""
        return name in self._remaining

    def take(self, name: str) -> Any:
        """Takes a field of any type; None if it is not given."""
        self._known.add(name)
        return self._remaining.pop(name, None)

    def boolean(self, name: str) -> bool:
        """Takes a Boolean; False if it is not given."""
        return self._typed(name, bool, "true or false") or False

    def text(self, name: str) -> str | None:
        """Takes a string; None if it is not given."""
        value = self._typed(name, str, "a string")
        return None if value is None else checked_text(value, name)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """Takes an integer in a range; None if it is not given."""
        value = self._typed(name, int, "an integer")
        if value is not None and not least <= value <= most:
            raise invalid_value(name, value, f"from {least} to {most}")
        return value

    def number(self, name: str, is_valid: Callable[[float], bool], expected: str) -> float | None:
        """Takes a number for which `is_valid` holds; `expected` describes the valid ones in error messages."""
        value = self._typed(name, int | float, "a number")
        try:
            number = None if value is None else float(value)
        except OverflowError:
            raise invalid_value(name, value, expected) from None
        if number is not None and not is_valid(number):
            raise invalid_value(name, value, expected)
        return number

    def sampling(self, **defaults: Any) -> Sampling:
        """Takes the fields of `Sampling`, except for `max_tokens`; `defaults` replace the defaults of `Sampling`.

        A negative seed is taken modulo 2^64, as by other servers.
        """
        chosen = dict(defaults)
        for field in fields_of(Sampling):
            # The endpoints read `max_tokens` under the names of their APIs, and know what is left of the context.
            if field.name in ("max_tokens", "seed"):
                continue
            bound = BOUNDS[field.name]
            assert bound is not None
            value = self._bounded(field.name, bound, is_integer=field.type is int)
            if value is not None:
                chosen[field.name] = value
        seed = self.integer("seed", -(2**63), 2**64 - 1)
        if seed is not None:
            chosen["seed"] = seed % 2**64
        return Sampling(**chosen)

    def _bounded(self, name: str, bound: Bound, *, is_integer: bool) -> float | None:
        value = self._typed(name, int, "an integer") if is_integer else self._typed(name, int | float, "a number")
        if value is not None and (expected := bound.why_not(value)):
            raise invalid_value(name, value, expected)
        return value if value is None or is_integer else float(value)

    def reject_unsupported(self, name: str, reason: str, *accepted: Any) -> None:
        """Takes a field that the server does not support, and rejects values other than those in `accepted`.

        Args:
          name: the field.
          reason: why it is not supported, for the error message.
          accepted: values that ask for nothing.

        Raises:
          ApiError: the field has another value.
        """
        value = self.take(name)
        # In Python 0 == False and 1 == True, so the types must be equal, too.
        if value is not None and not any(type(value) is type(other) and value == other for other in accepted):
            raise ApiError(400, f"{name} is {shortened(value)}, and {reason}: remove it", name)

    def reject_unknown(self) -> None:
        """Rejects fields that were not taken.

        Raises:
          ApiError: names the unknown field.
        """
        for name in self._remaining:
            known = nearest(name, self._known)
            raise ApiError(400, f"unknown field {shortened(repr(name))}{known}", shortened(name))

    def _typed(self, name: str, kind: Any, expected: str) -> Any:
        value = self.take(name)
        # bool is a subclass of int, but not a number in JSON.
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise invalid_value(name, json.dumps(value), expected)
        return value


def invalid_value(name: str, value: object, expected: str) -> ApiError:
    """Builds the error for a field with an invalid value; `expected` describes the valid ones."""
    return ApiError(400, f"{name} is {shortened(value)}, and must be {expected}", name)


def checked_text(text: str, name: str) -> str:
    """Returns a string after checking that it has no lone surrogates, which JSON can express.

    Raises:
      ApiError: the string has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ApiError(
            400, f"{name} has half of a surrogate pair at {e.start}, which is not a character: encode it as UTF-8", name
        ) from e
    return text


def strings_or_one(value: Any, name: str, most: int) -> tuple[str, ...]:
    """Reads a string or a list of at most `most` strings; returns an empty tuple for None."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid_value(name, json.dumps(value), "a string or a list of strings")
    if len(texts) > most:
        raise invalid_value(name, f"a list of {len(texts)}", f"of at most {most}")
    return tuple(checked_text(text, name) for text in texts)
